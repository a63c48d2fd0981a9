"""What is played to the servers of a release: something of everything that a store can hold, as small as it may be.

Each part says in its name what it leaves. The sessions' ids say what they are of.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.tools.digest.requests import CALLS, PLAIN, PNG, TOOLS, Json, Player, Talk, user

ADMIN = "the admin token of a store that everybody may read"
WEBHOOK = "whsec_" + "MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0"
SHORT: Json = {"completion_tokens": 3}
SMALL: Json = {"sim": {**PLAIN, "experts": {"layers": 2, "top_k": 2}}, "return_routed_experts": True}
LARGE: Json = {
    "sim": {**PLAIN, "experts": {"layers": 48, "top_k": 4, "experts": 128}, "completion_tokens": 110},
    "return_routed_experts": True,
}
"""Of the payload a chunk is an object; one under 16 KiB stays in its row."""

MANY = 1024
"""Events from which a session has a snapshot."""

RUN, CUT = "taught", "cut"
MANY_EVENTS, LAST, STAGED = "many-events", "killed", "staged"
"""Sessions: one with a snapshot, one whose turn is open when the server is killed, one of which tokens are staged."""


class Brief(Player):
    """Generations are short, so that the store is small."""

    def send(self, name: str, method: str, path: str, body: Any = None, headers: Any = None) -> httpx.Response:
        if isinstance(body, dict) and "sim" in body and not {"calls", "text"} & set(body["sim"]):
            body = {**body, "sim": {**SHORT, **body["sim"]}}
        return super().send(name, method, path, body, headers)


class Site(NamedTuple):
    """A server over one database, and its engines: SGLang's, vLLM's, and a vendor that gives no tokens."""

    folder: Path
    server: ServerProcess
    sglang: SimulatorProcess
    vllm: SimulatorProcess

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        with httpx.Client(
            base_url=self.server.base_url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}
        ) as made:
            yield made


def environment(folder: Path, vendor: str) -> dict[str, str]:
    """A server's settings over a store in the folder: all features, and nothing of what is old is thrown away."""
    return {
        "TURNLOG_FEATURES": "all",
        "TURNLOG_ADMIN_TOKEN": ADMIN,
        "TURNLOG_SESSION_SECRET": "the secret of a store that everybody may read",
        "TURNLOG_SESSION_REWARDS": "allow",
        "TURNLOG_WORKERS": "1",
        "TURNLOG_LEASE_S": "1",
        "TURNLOG_REPLAY": "routed_experts",
        "TURNLOG_PAYLOADS": (folder / "objects").as_uri(),
        "TURNLOG_PAYLOADS_KEEP_S": str(30 * 86400),
        "TURNLOG_CLOSED_REPLAY_TTL_S": "off",
        "TURNLOG_FILE_ROOT": str(folder),
        "TURNLOG_TEXT_UPSTREAMS": json.dumps({"judge": {"url": f"{vendor}/v1", "model": "large"}}),
        "TURNLOG_WEBHOOKS": "http://127.0.0.1:9/hook",
        "TURNLOG_WEBHOOK_SECRET": WEBHOOK,
        "TURNLOG_WEBHOOK_NETWORKS": "127.0.0.0/8",
    }


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what another process does. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


class Again(NamedTuple):
    """A request that has been answered: who sends it again gets the same bytes."""

    path: str
    body: Json
    headers: Mapping[str, str]
    reply: str


def play(site: Site) -> dict[str, Any]:
    """All of it. Afterwards the server is dead, killed in a turn. Returns what a client of that time has kept: the
    histories of its sessions, tokens, requests that it may repeat, cursors, and the rows of sessions that are in an
    archive now."""
    kept: dict[str, Any] = {}
    with site.client() as http:
        player = Brief(http)
        for part in (
            _linear,
            _trees,
            _protocols,
            _token_ids,
            _refused_and_dropped,
            _limits,
            _payloads,
            _said_of_them,
            _rollouts,
            _groups,
            _names,
            _runs,
            _affinities,
            _forks,
            _text,
            _fleet,
            _ended,
        ):
            part(site, player)
        kept["archived"] = _archive(site, player)
        _checkpoint(player)
        kept["tokens"] = _tokens(player)
        kept["histories"] = _histories(player)
        kept["again"] = _repeatable(player)
        _of_many_events(player)
        kept["cursor"] = json.loads(http.get("/export", params={"limit": "5"}).content.splitlines()[-1])["cursor"]
        events = http.get("/events").content.splitlines()
        kept["position"] = json.loads(events[len(events) // 2])["position"]
    site.server.stop()
    _killed(site)
    return kept


def _ok(reply: httpx.Response) -> httpx.Response:
    if reply.status_code >= 300:
        raise RuntimeError(f"{reply.request.method} {reply.request.url}: {reply.status_code} {reply.text}")
    return reply


def _order(player: Player, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """A request that must succeed; its JSON."""
    reply = _ok(player.http.request(method, path, json=body, headers=headers))
    return reply.json() if reply.content else None


def _linear(site: Site, player: Player) -> None:
    tools = player.session("linear", metadata={"task": "ü", "n": 1}, rollback_window=2)
    offered: Json = {"tools": TOOLS["chat"], "temperature": 0.5, "top_p": 0.9, "seed": 3}
    tools.chat(user("Weather?"), **offered, sim={"calls": CALLS, "reasoning": True, "text": "So: "})
    tools.chat(*tools.results(), **offered, sim=PLAIN)
    tools.chat(user("“straße”, 你好 🚀"), **offered, max_tokens=20)
    undone = player.session("undone", rollback_window=2)
    for text in ("One", "Two", "Three"):
        undone.chat(user(text))
    undone.chat(user("Instead"), keep=4)
    split = player.session("segments", on_divergence="segment")
    for text in ("First", "Second", "Third"):
        split.history = []
        split.chat(user(text))
    pinned = player.session("pinned", params={"temperature": 0.25, "top_k": 4}, model="other", retain="all")
    pinned.chat(user("Hello"), temperature=1.0)
    image = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    seen = player.session("image")
    seen.chat(user([{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": image}}]))
    seen.chat(user("What was it?"))


def _trees(site: Site, player: Player) -> None:
    tree = player.session("tree", history="tree", metadata={"env_name": "sums"})
    tree.chat(user("One"))
    second = tree.chat(user("Two"))
    tree.chat(user("Instead"), keep=2)
    tree.chat(user("On"))
    tree.history = []
    tree.chat(user("A title for this?"))
    tree.history = []
    tree.chat(user("So far: things"), second, user("Go on"))
    for agent in ("a", "b"):
        tree.history = []
        tree.chat(user(f"Agent {agent}"), headers={"x-turnlog-agent-id": agent})


def _protocols(site: Site, player: Player) -> None:
    talk = player.session("messages")
    body: Json = {"max_tokens": 5000, "system": "Be brief", "tools": TOOLS["messages"]}
    said: list[Json] = [user("Look")]
    reply = _ok(talk.ask("messages", {**body, "messages": said, "sim": {"calls": CALLS, "reasoning": True}})).json()
    said.append({"role": "assistant", "content": reply["content"]})
    used = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
    said.append(user([{"type": "tool_result", "tool_use_id": one, "content": "Saw", "is_error": True} for one in used]))
    _ok(talk.ask("messages", {**body, "messages": said, "stream": True, "sim": PLAIN}))
    talk = player.session("responses", history="tree")
    fields: Json = {"instructions": "sys", "tools": TOOLS["responses"]}
    reply = _ok(talk.ask("responses", {**fields, "input": "Look", "sim": {"calls": CALLS, "reasoning": True}})).json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Seen"}
        for item in reply["output"]
        if item["type"] == "function_call"
    ]
    _ok(talk.ask("responses", {**fields, "input": results, "previous_response_id": reply["id"], "sim": PLAIN}))
    writing = player.session("completions")
    text = _ok(writing.ask("completions", {"prompt": "Once upon", "max_tokens": 9, "sim": PLAIN})).json()
    more = f"Once upon{text['choices'][0]['text']} a time"
    _ok(writing.ask("completions", {"prompt": more, "max_tokens": 9, "sim": PLAIN}))


def _token_ids(site: Site, player: Player) -> None:
    player.session("ids", history="tree")
    ids = [5, 6, 7]
    for number in range(2):
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 8},
            "return_logprob": True,
            "rid": f"ids-{number}",
        }
        reply = _ok(player.send("ids", "POST", "/sessions/ids/generate", body)).json()
        ids = [*ids, *reply["output_ids"], 11 + number]


def _refused_and_dropped(site: Site, player: Player) -> None:
    talk = player.session("refused")
    talk.chat(user("Fine"))
    talk.chat(user("Broken"), sim={**PLAIN, "fault": "not_json"})
    talk.chat(user("Fine again"), sim={**PLAIN, "weight_versions": ["5", "6"]})
    closed = player.session("abandoned")
    closed.chat(user("One"))
    with _held(site):
        _hang_up(site, "abandoned", {"messages": [*closed.history, user("Two")]})
        _order(player, "DELETE", "/sessions/abandoned")
    dropped = player.session("undelivered")
    with _held(site):
        _hang_up(site, "undelivered", {"messages": [user("Hello")]})
    until(lambda: "ReplyUndelivered" in _types(player, "undelivered"), "a reply that nobody took")
    dropped.chat(user("Hello"))
    until(lambda: "ReplyRedelivered" in _types(player, "undelivered"), "a reply that is given again")


@contextlib.contextmanager
def _held(site: Site) -> Iterator[None]:
    """What the engine is asked to generate meanwhile is generated at the end."""
    httpx.post(f"{site.sglang.base_url}/pause_generation", json={"mode": "in_place"})
    try:
        yield
    finally:
        httpx.post(f"{site.sglang.base_url}/continue_generation")


def _hang_up(site: Site, session_id: str, body: Json) -> None:
    """A turn whose client goes when the engine has it."""
    _begun(
        site, f"/sessions/{session_id}/v1/chat/completions", {"model": "simulator", "sim": {**SHORT, **PLAIN}, **body}
    ).close()


def _begun(site: Site, path: str, body: Json) -> http.client.HTTPConnection:
    """A request that an engine has in its hands."""
    engines = [engine.base_url for engine in (site.sglang, site.vllm)]
    before = sum(map(_in_hand, engines))
    connection = http.client.HTTPConnection("127.0.0.1", site.server.port)
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    connection.request("POST", path, json.dumps(body), headers)
    until(lambda: sum(map(_in_hand, engines)) > before, f"the engine is asked by {path}")
    return connection


def _in_hand(url: str) -> int:
    return sum(one["answered"] is None for one in httpx.get(f"{url}/sim/requests", params={"last": 256}).json())


def _types(player: Player, session_id: str) -> list[str]:
    lines = _ok(player.http.get(f"/sessions/{session_id}/events")).content.splitlines()
    return [json.loads(line)["type"] for line in lines]


def _limits(site: Site, player: Player) -> None:
    talk = player.session("limited", limits={"turns": 2})
    for text in ("One", "Two", "Three"):
        talk.chat(user(text))
    talk = player.session("ends-at-length", limits={"tokens": 30}, on_limit="length")
    for text in ("One", "Two"):
        talk.chat(user(text), sim={**PLAIN, "completion_tokens": 20})
    root = player.session("budget-root", limits={"turns": 5, "per": "rollout"})
    root.chat(user("Plan"))
    player.session("budget-child", parent_session_id="budget-root").chat(user("Do"))


def _payloads(site: Site, player: Player) -> None:
    window = player.session("payloads", retain="window")
    window.chat(user("Large"), **LARGE)
    for text in ("Small", "Smaller", "Smallest"):
        window.chat(user(text), **SMALL)
    player.session("objects", retain="all").chat(user("Large"), **LARGE)
    sampled = player.session("sampled-rows", retain="sampled")
    for text in ("One", "Two", "Three", "Four"):
        sampled.chat(user(text), **SMALL)


def _said_of_them(site: Site, player: Player) -> None:
    _order(player, "PUT", "/sessions/tree/reward", {"reward": 0.75, "components": {"ü": 1, "b": 0.5}})
    _order(player, "PUT", "/sessions/tree/reward", {"reward": 0.5, "turn": 2})
    _order(player, "PUT", "/sessions/tree/annotations/note", {"value": "Looks odd"})
    _order(player, "PUT", "/sessions/tree/annotations/tags", {"value": ["x", "ü"]})
    _order(player, "PUT", "/sessions/tree/turns/1/annotations/judge?writer=w", {"value": {"passed": [True, None]}})
    sampled = next(json.loads(line) for line in _events(player, "linear") if b"TurnCommitted" in line)["output_tokens"]
    for name, dtype, first in (("kl", "float32", -0.25), ("mask", "int32", 7)):
        column = {"values": [None, *[first] * (sampled - 1)], "dtype": dtype, "over": "output"}
        _order(player, "PUT", f"/sessions/linear/turns/1/annotations/{name}", column)


def _events(player: Player, session_id: str) -> list[bytes]:
    return _ok(player.http.get(f"/sessions/{session_id}/events")).content.splitlines()


def _rollouts(site: Site, player: Player) -> None:
    child = player.session("joined-child", parent_session_id="joined-root")
    child.chat(user("Do"))
    player.session("joined-root", limits={"turns": 9, "per": "rollout"}).chat(user("Plan"))
    player.session("failed").chat(user("Try"))
    _order(player, "POST", "/sessions/failed/close", {"failed": {"kind": "sandbox", "message": "out of disk"}})


def _groups(site: Site, player: Player) -> None:
    """The consumer has acknowledged one group, has leased one, and one is complete; one more waits for an attempt."""
    for group in ("consumed", "leased", "complete"):
        for attempt in range(2):
            _rewarded(player, f"{group}-{attempt}", attempt, group_id=group, group_size=2)
        if group != "complete":
            _ok(player.http.get("/export/groups", params={"consumer": "trainer", "size": "2", "lease_s": "86400"}))
        if group == "consumed":
            _order(player, "POST", "/export/groups/ack", {"consumer": "trainer", "groups": [group]})
    _rewarded(player, "waiting-0", 1.0, group_id="waiting", group_size=2)


def _rewarded(player: Player, name: str, reward: float, **given: Any) -> Talk:
    talk = player.session(name, **given)
    talk.chat(user(f"Of {name}"), **(SMALL if "run" in given else {}))
    _order(player, "PUT", f"/sessions/{name}/reward", {"reward": reward})
    _order(player, "DELETE", f"/sessions/{name}")
    return talk


def _last_of_a_group(player: Player) -> None:
    """The server is killed before it has counted it, so that its note is still there."""
    _rewarded(player, "noted-0", 0.5, group_id="noted", group_size=2)


def _names(site: Site, player: Player) -> None:
    for epoch in range(2):
        body = {"model": "simulator", "messages": [user(f"Epoch {epoch}")], "sim": PLAIN}
        _order(player, "POST", "/v1/chat/completions", body, **{"x-session-id": "named"})
        if not epoch:
            _order(player, "POST", "/finish_session?session_id=named")
    player.session("evaluation", evaluation=False, temperature=0.6).chat(user("One"))
    _order(player, "POST", "/sessions/evaluation/finish", {"producer_finished": True})


def _runs(site: Site, player: Player) -> None:
    given = {"limits": {"tokens": 100_000, "live": 100}, "metadata": {"seed": 1}, "note": "The first"}
    _order(player, "PUT", f"/runs/{RUN}", given)
    for attempt in range(2):
        _rewarded(player, f"{RUN}-{attempt}", attempt, run=RUN, group_id="of-the-run", group_size=2)
    player.session(f"{RUN}-open", run=RUN).chat(user("Of a run"))
    player.session("of-a-closed-run", run="closed-run").chat(user("Hello"))
    _order(player, "DELETE", "/runs/closed-run")
    player.session("of-an-erased-run", run="erased-run").chat(user("Hello"))
    _until_erased(player, "/runs/erased-run")


def _until_erased(player: Player, path: str) -> None:
    until(lambda: player.http.delete(path, params={"erase": "true"}).status_code in (204, 404), f"{path} is erased")


def _affinities(site: Site, player: Player) -> None:
    for name, actions in (("bound", ("bind",)), ("released", ("bind", "close"))):
        talk = player.session(name)
        for action in actions:
            talk.chat(user("Hello"), nvext={"session_control": {"session_id": f"affinity-{name}", "action": action}})


def _forks(site: Site, player: Player) -> None:
    order = {"turn": 2, "count": 1, "metadata": {"s": 1}}
    [made] = _order(player, "POST", "/sessions/linear/fork", order)["sessions"]
    fork = Talk(player, made["session_id"])
    fork.history = player_history(player, "linear")[:4]
    player.forks.append(fork.name)


def player_history(player: Player, session_id: str) -> list[Json]:
    """The conversation as the server has it."""
    found = _ok(player.http.get(f"/sessions/{session_id}/messages", params={"limit": "500"})).json()["messages"]
    return [one["message"] for one in found]


def _text(site: Site, player: Player) -> None:
    talk = player.session("text", capture="text", upstream="judge")
    talk.chat(user("Judge this"))
    talk.chat(user("And this"))


def _fleet(site: Site, player: Player) -> None:
    def serve(version: str) -> None:
        _order(player, "POST", "/update_weight_version", {"new_version": version})
        httpx.post(f"{site.sglang.base_url}/update_weight_version", json={"new_version": version})
        player.session(f"version-{version}").chat(user("Which?"), sim={**PLAIN, "weight_version": version})

    for version in ("7", "6"):
        serve(version)
    until(lambda: "regressed" in json.dumps(_order(player, "GET", "/engines")), "an engine went back")
    with SimulatorProcess("--seed", "3") as other:
        _order(player, "POST", "/engines", {"url": other.base_url})
        other.kill()
        url = site.server.environment["TURNLOG_DATABASE_URL"]
        until(lambda: count(url, "fleet_events WHERE type = 'EngineDied'"), "an engine died")
        _order(player, "DELETE", f"/engines?url={other.base_url}")
    _order(player, "POST", "/fleet/pause", {"mode": "in_place", "lease_s": 60})
    _order(player, "POST", "/fleet/resume", {})
    _order(player, "POST", "/adapters/calm/pause", {"lease_s": 60})
    _order(player, "POST", "/adapters/calm/resume", {"version": "2"})
    _order(player, "PUT", "/public-url", {"url": "https://turnlog.example.org", "lease_s": 86400})
    player.session("adapted", adapter="calm").chat(user("With it"))


def _ended(site: Site, player: Player) -> None:
    player.session("erased").chat(user("Never seen"))
    _until_erased(player, "/sessions/erased")
    player.session("deleted").chat(user("Done"))
    _order(player, "DELETE", "/sessions/deleted")


def _archive(site: Site, player: Player) -> list[Any]:
    """Two rollouts leave; their rows of before."""
    names = [f"archived-{number}" for number in range(2)]
    for name in names:
        _rewarded(player, name, 0.5, run="archive", metadata={"task": name})
    rows = [json.loads(line) for line in _ok(player.http.get("/export?run=archive&replay=true")).content.splitlines()]
    order = {"to": (site.folder / "archives").as_uri(), "older_than_s": 0, "run": "archive"}
    assert _order(player, "POST", "/archives", order)["archived"] == len(names)
    return rows


def _checkpoint(player: Player) -> None:
    """A cut; then a turn and a reward that a restore takes back; then the cut is there still."""
    talk = player.session("restored")
    talk.chat(user("Before"))
    _order(player, "POST", "/checkpoints", {"name": CUT, "cut": "drain", "metadata": {"step": 3}})
    talk.chat(user("After"))
    _order(player, "PUT", "/sessions/restored/reward", {"reward": 1})
    player.session("later").chat(user("Gone"))
    _order(player, "POST", f"/checkpoints/{CUT}/restore", {})
    talk.history = talk.history[:2]
    talk.chat(user("Instead"))


def _tokens(player: Player) -> dict[str, str]:
    made = _order(player, "POST", "/sessions", {"session_id": "with-token"})
    return {"session": made["token"], "run": _order(player, "POST", f"/runs/{RUN}/token")["token"]}


def _histories(player: Player) -> dict[str, list[Json]]:
    """What clients would send to go on: chat messages, by session."""
    names = ("linear", "undone", "pinned", "tree", "messages", "payloads", "restored", player.forks[0], f"{RUN}-open")
    return {name: player_history(player, name) for name in names}


def _repeatable(player: Player) -> list[dict[str, Any]]:
    found = []
    for protocol, path, body in (
        ("chat", "chat/completions", {"messages": [user("Once")]}),
        ("messages", "messages", {"max_tokens": 99, "messages": [user("Once")]}),
        ("responses", "responses", {"input": "Once"}),
        ("completions", "completions", {"prompt": "Once", "max_tokens": 9}),
        ("streamed", "chat/completions", {"messages": [user("Once")], "stream": True}),
    ):
        name = f"repeated-{protocol}"
        player.session(name)
        whole = {"model": "simulator", "sim": {**PLAIN, **SHORT}, **body}
        headers = {"idempotency-key": f"key of {protocol}"}
        url = f"/sessions/{name}/v1/{path}"
        reply = _ok(player.http.post(url, json=whole, headers=headers))
        found.append(Again(url, whole, headers, reply.text)._asdict())
    return found


def _of_many_events(player: Player) -> None:
    """A session that is read by its snapshot from the next start on."""
    talk = player.session(MANY_EVENTS)
    talk.chat(user("One"))
    for _ in range(MANY):
        _order(player, "PUT", f"/sessions/{MANY_EVENTS}/reward", {"reward": 0})


def _killed(site: Site) -> None:
    """The server dies with two open turns, of one of which tokens are staged."""
    settings = {
        "TURNLOG_REPLAY": "",  # a stream has no payloads
        "TURNLOG_STAGE_TOKENS_S": "0.05",
        "TURNLOG_UPSTREAM_DIALECT": "vllm",
        "TURNLOG_UPSTREAMS": site.vllm.base_url,
    }
    site.server.environment = {**site.server.environment, **settings}
    site.server.start()
    with site.client() as http:
        player = Brief(http)
        talk = player.session(LAST)
        talk.chat(user("Of vLLM"))
        player.session(STAGED, limits={"tokens": 10_000})
        _ok(http.get(f"/sessions/{MANY_EVENTS}"))
        slow = {**PLAIN, "completion_tokens": 200, "chunk_tokens": 4}
        said: dict[str, Json] = {
            LAST: {"messages": [*talk.history, user("Never answered")], "sim": {**slow, "latency_s": 3600}},
            STAGED: {"messages": [user("Staged")], "max_tokens": 208, "sim": {**slow, "latency_s": 20}},
        }
        begun = [
            _begun(site, f"/sessions/{name}/v1/chat/completions", {"model": "simulator", "temperature": 0, **body})
            for name, body in said.items()
        ]
        url = site.server.environment["TURNLOG_DATABASE_URL"]
        until(lambda: count(url, "staged_tokens"), "staged tokens")
        until(lambda: count(url, "snapshots"), "a snapshot")
        _last_of_a_group(player)
        site.server.kill()
        for connection in begun:
            connection.close()


def count(url: str, table: str) -> int:
    """How many rows a table has, looked at past the server."""
    import asyncio

    from sqlalchemy import text

    from app.store.database import create_engine

    async def counted() -> int:
        engine = create_engine(url)
        async with engine.connect() as connection:
            found = (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
        await engine.dispose()
        return int(found)

    return asyncio.run(counted())
