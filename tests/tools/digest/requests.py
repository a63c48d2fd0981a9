"""The fixed requests: each kind of session, turn, retry and refusal, one after the other."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

Json = dict[str, Any]
Taken = dict[str, bytes]
"""What was read, by name, in the order in which it was read."""

PLAIN: Json = {"tool_calls": False, "reasoning": False}
SHOWN_HEADERS = ("content-type", "retry-after", "x-should-retry", "x-turnlog-")
FAULTS: Sequence[str] = (
    *("not_json", "nan_logprob", "negative_id", "short_logprobs", "two_choices", "missing_prompt_ids", "error_200"),
    *("duplicate_choices", "deep_nesting", "other_response_ids", "usage_prompt_tokens", "misaligned_experts"),
)
STATUSES = ("status_400", "status_429", "status_503")
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x40\0\0\0\x40" + bytes(range(64))
SCHEMA = {"type": "object", "properties": {"at": {"type": "number"}, "of": {"enum": ["x", "ü"]}}, "required": ["at"]}
TOOLS: Mapping[str, Sequence[Json]] = {
    "chat": [{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": SCHEMA}}],
    "messages": [{"name": "look", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "look", "parameters": SCHEMA}],
}
CALLS = [{"name": "look", "arguments": '{"at": 1e3,  "of":"ü"}'}, {"name": "look", "arguments": '{"at": 2}'}]


def _choice(reply: Json) -> Json:
    """The reply's choice; empty where the turn failed, which its reply shows."""
    return dict(reply.get("choices", [{}])[0])


def user(text: Any) -> Json:
    return {"role": "user", "content": text}


class Player:
    """Sends requests to a server and keeps each reply. `sessions` are those that were made, `forks` among them."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.taken: Taken = {}
        self.sessions: list[str] = []
        self.forks: list[str] = []
        self.made_up: dict[str, str] = {}

    def send(self, name: str, method: str, path: str, body: Any = None, headers: Any = None) -> httpx.Response:
        """Keep the reply as `reply <number> <name>`: its status, the headers that promise something, its body."""
        reply = self.http.request(method, path, json=body, headers=headers)
        shown = sorted(item for item in reply.headers.items() if item[0].startswith(SHOWN_HEADERS))
        head = "".join(f"{key}: {value}\n" for key, value in shown)
        self.taken[f"reply {len(self.taken):03} {name}"] = f"{reply.status_code}\n{head}\n".encode() + reply.content
        if "x-turnlog-replayed" in reply.headers:
            self._await_delivery(path.split("/")[2], int(reply.headers["x-turnlog-turn"]))
        made = re.search(r"x-turnlog-session-id: (\w+)|/sessions/(01\w{30})/v1", f"{head}{reply.text[:200]}")
        if made is not None and (made_up := made[1] or made[2]) not in (*self.sessions, *self.made_up):
            self.made_up[made_up] = f"made-up-{len(self.made_up):024}"
        return reply

    def _await_delivery(self, session_id: str, turn: int) -> None:
        """That a reply was given again is written down behind it: wait, so that the log has one order."""
        deadline = time.monotonic() + 30
        while ("ReplyRedelivered", turn) not in self._events(session_id):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no event says that turn {turn} of {session_id} was given again")

    def _events(self, session_id: str) -> list[tuple[str, int | None]]:
        lines = self.http.get(f"/sessions/{session_id}/events").content.splitlines()
        return [(event["type"], event.get("turn")) for event in map(json.loads, lines)]

    def session(self, name: str, **body: Any) -> Talk:
        self.sessions.append(name)
        self.send(f"create {name}", "POST", "/sessions", {"session_id": name, **body})
        return Talk(self, name)

    def put(self, name: str, what: str, **body: Any) -> None:
        self.send(f"{what} {name}", "PUT", f"/sessions/{name}/{what}", body)


class Talk:
    """One session and its history as an honest client keeps it, in one protocol at a time."""

    def __init__(self, player: Player, name: str) -> None:
        self.player = player
        self.name = name
        self.history: list[Json] = []

    def ask(self, path: str, body: Json, headers: Any = None) -> httpx.Response:
        return self.player.send(
            f"{self.name} {path}", "POST", f"/sessions/{self.name}/v1/{path}", {"model": "simulator", **body}, headers
        )

    def chat(self, *new: Json, keep: int | None = None, headers: Any = None, **fields: Any) -> Json:
        """A turn whose history grows by it. `keep`: behind the first so many messages of the history."""
        messages = [*self.history[:keep], *new]
        reply = self.ask("chat/completions", {"messages": messages, "sim": PLAIN, **fields}, headers)
        if reply.status_code == 200 and not fields.get("stream"):
            self.history = [*messages, reply.json()["choices"][0]["message"]]
            return dict(self.history[-1])
        return {}

    def results(self) -> list[Json]:
        """A result for each call of the last reply."""
        calls = self.history[-1].get("tool_calls") or ()
        return [{"role": "tool", "tool_call_id": call["id"], "content": f"22 °C {call['id']}"} for call in calls]


def play(player: Player, *, large: bool = True) -> None:
    """All requests. `large`: also replies for a worker process."""
    for part in (_linear, _trees, _protocols, _retries, _refusals, _groups, _engines_fields, _forks, _live):
        part(player)
    if large:
        _large(player)


def _linear(player: Player) -> None:
    tools = player.session("tools", group_id="7", attempt=0, metadata={"task": "ü", "n": 1}, rollback_window=3)
    offered: Json = {"tools": TOOLS["chat"], "temperature": 0.5, "top_p": 0.9, "seed": 3}
    tools.chat(user("Weather?"), **offered, sim={"calls": CALLS, "reasoning": True, "text": "So: "})
    tools.chat(*tools.results(), **offered)
    tools.chat(user("“straße”, 你好 🚀 \u2028?"), **offered, stream_options=None, max_tokens=20)
    undone = player.session("undone", group_id="7", attempt=1, rollback_window=2)
    for text in ("One", "Two", "Three"):
        undone.chat(user(text))
    undone.chat(user("Instead"), keep=4)
    undone.chat(user("Much too early"), keep=1)
    undone.chat(user("Go on"))
    for on_divergence in ("reject", "segment"):
        talk = player.session(f"diverged-{on_divergence}", on_divergence=on_divergence)
        for text in ("First", "Second", "Third"):
            talk.history = []
            talk.chat({"role": "system", "content": "Be brief"}, user(text), tools=TOOLS["chat"])
        talk.chat(user("And on"))
    split = player.session("split", group_id="7", attempt=2)
    for text in ("1", "2", "3", "4"):
        more: Json = {"tools": TOOLS["chat"]} if text > "2" else {}
        split.chat(user(text), sim={**PLAIN, "weight_version": "3"}, **more)
    for matcher in ("strict", "role_content_only"):
        talk = player.session(f"matched-{matcher}", matcher=matcher)
        talk.chat(user("Think"), sim={"reasoning": True, "tool_calls": False})
        kept = talk.history
        talk.history = [kept[0], {"role": "assistant", "content": f"\n{kept[1]['content']}  "}]
        talk.chat(user("Without reasoning"))
        talk.history = kept
        talk.chat(user("With it"))
    pictured = player.session("pictured")
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    pictured.chat(user([{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]))
    pictured.chat(user("What was it?"))
    pinned = player.session("pinned", params={"temperature": 0.25, "top_k": 4}, model="other", params_mode="override")
    pinned.chat(user("Hello"), temperature=1.0)
    long = player.session("long")
    for number in range(20):
        long.chat(user(f"{number} " + "word " * 60))


def _trees(player: Player) -> None:
    tree = player.session("tree", history="tree", group_id="8", metadata={"env_name": "sums"})
    first = tree.chat(user("One"))
    second = tree.chat(user("Two"))
    tree.chat(user("Instead"), keep=2)
    tree.chat(user("On"))
    tree.history = []
    tree.chat(user("One"), first, user("Two"))
    tree.chat(user("Deeper"))
    tree.history = []
    tree.chat(user("A title for this?"))
    tree.history = []
    tree.chat(user("So far: things"), second, user("Go on"))
    for agent in ("a", "b", "a"):
        tree.history = [] if agent == "b" else tree.history
        tree.chat(user(f"Agent {agent}"), headers={"x-turnlog-agent-id": agent})
    player.put("tree", "reward", reward=0.75, components={"ü": 1, "b": 0.5})
    player.put("tree", "reward", reward=0.5, turn=2)
    player.put("tree", "annotations/note", value="Looks odd")
    player.put("tree", "annotations/tags", value=["x", "ü"])
    for number in range(3):
        headers = {"x-session-id": "harness", "x-turnlog-agent-id": f"sub-{number % 2}"}
        body = {"model": "simulator", "messages": [user(f"By header {number}")], "sim": PLAIN}
        player.send("by header", "POST", "/v1/chat/completions", body, headers)
    player.sessions.append("harness")


def _protocols(player: Player) -> None:
    for name in ("messages", "messages-tree"):
        talk = player.session(name, **({"history": "tree"} if "tree" in name else {}))
        body: Json = {"max_tokens": 5000, "system": "Be brief", "tools": TOOLS["messages"]}
        said: list[Json] = [user([{"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}}])]
        reply = talk.ask("messages", {**body, "messages": said, "sim": {"calls": CALLS, "reasoning": True}}).json()
        said.append({"role": "assistant", "content": reply.get("content", [])})
        used = [block["id"] for block in said[-1]["content"] if block.get("type") == "tool_use"]
        said.append(user([{"type": "tool_result", "tool_use_id": one, "content": f"Saw {one}"} for one in used]))
        reply = talk.ask("messages", {**body, "messages": said, "sim": PLAIN}).json()
        said += [{"role": "assistant", "content": reply.get("content", [])}, user("And?")]
        talk.ask("messages", {**body, "messages": said, "sim": {**PLAIN, "reasoning": True}, "stream": True})
        talk.ask("messages/count_tokens", {"messages": said[:1]})
    talk = player.session("responses", history="tree")
    fields: Json = {"instructions": "sys", "tools": TOOLS["responses"]}
    reply = talk.ask("responses", {**fields, "input": "Look", "sim": {"calls": CALLS, "reasoning": True}}).json()
    output = [item for item in reply.get("output", ()) if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Seen"} for call in output]
    second = {**fields, "input": results, "previous_response_id": reply.get("id"), "sim": PLAIN}
    reply = talk.ask("responses", second).json()
    talk.ask("responses", {**fields, "input": [user("On")], "previous_response_id": reply.get("id"), "stream": True})
    player.send("response", "GET", f"/sessions/responses/v1/responses/{reply.get('id')}")
    mixed = player.session("mixed")
    mixed.chat(user("Chat"))
    mixed.ask("messages", {"max_tokens": 99, "messages": [*mixed.history, user("Messages")], "sim": PLAIN})
    writing = player.session("writing")
    text = "Once upon a time"
    for more in (" and then", " until"):
        reply = writing.ask("completions", {"prompt": text, "max_tokens": 9, "sim": PLAIN}).json()
        text += _choice(reply).get("text", "") + more
    ids = player.session("ids")
    prompt = [5, 6, 7]
    for more_ids in ([8], [9, 10], []):
        body = {"prompt": prompt, "return_token_ids": True, "max_tokens": 8}
        choice = _choice(ids.ask("completions", body).json())
        prompt = [*prompt, *choice.get("token_ids", []), *more_ids]


def _retries(player: Player) -> None:
    talk = player.session("retried")
    key = {"idempotency-key": "k1"}
    talk.chat(user("One"), headers=key)
    talk.chat(user("One"), keep=0, headers=key)
    talk.chat(user("Other"), keep=0, headers=key)
    talk.chat(user("Two"))
    talk.chat(user("Two"), keep=2, headers={"x-stainless-retry-count": "1"})
    talk.chat(user("Two"), keep=2, headers={"x-stainless-retry-count": "1"}, stream=True)
    talk.chat(user("Three"), stream=True, headers={"idempotency-key": "k2"})
    talk.chat(user("Three"), stream=True, headers={"idempotency-key": "k2"})
    tree = player.session("retried-tree", history="tree")
    for mark in ({}, {}, {"x-stainless-retry-count": "1"}):
        tree.chat(user("Same"), keep=0, headers=mark)


def _refusals(player: Player) -> None:
    for name in ("refused", "refused-tree"):
        talk = player.session(name, **({"history": "tree"} if "tree" in name else {}))
        talk.chat(user("Fine"))
        for fault in (*FAULTS, *STATUSES):
            talk.chat(user(f"With {fault}"), sim={**PLAIN, "fault": fault})
        talk.chat(user("Fine again"))
    odd = player.session("odd")
    bodies: Sequence[Json] = (
        {},
        {"messages": []},
        {"messages": "x"},
        {"messages": [user("x")], "n": 2},
        {"messages": [1]},
    )
    for body in bodies:
        odd.ask("chat/completions", body)
    odd.ask("responses", {"input": "x", "background": True})
    odd.ask("messages", {"messages": [user("x")]})
    player.send("create again", "POST", "/sessions", {"session_id": "odd", "group_id": "other"})
    player.send("create unknown", "POST", "/sessions", {"unknown": 1})
    player.send("no session", "POST", "/sessions/absent/v1/chat/completions", {"messages": [user("x")]})
    player.put("absent", "reward", reward=1)


def _groups(player: Player) -> None:
    for name, reward in (("tools", 1.0), ("undone", 0.25), ("split", 0.0)):
        player.put(name, "reward", reward=reward)
        player.send(f"close {name}", "DELETE", f"/sessions/{name}")
    root = player.session("root", group_id="9", history="tree")
    root.chat(user("Plan"))
    child = player.session("child", parent_session_id="root")
    child.chat(user("Do"))
    player.put("root", "reward", reward=2.0)
    player.send("close root", "DELETE", "/sessions/root")
    player.session("empty", group_id="9", attempt=1)
    gone = player.session("gone", group_id="gone")
    gone.chat(user("Never"))
    player.send("erase gone", "DELETE", "/sessions/gone?erase=true")
    gone.chat(user("Still?"))


def _engines_fields(player: Player) -> None:
    named = player.session("named", retain="all")
    named.chat(user("Hello"), sim={**PLAIN, "weight_versions": ["a", "b"]})
    named.chat(user("Nested"), sim={**PLAIN, "indexer_topk": {"nested": True}, "experts": {"nested": True}})
    for finish in ("length", "abort", "stop"):
        talk = player.session(f"ends-{finish}", on_abort="return", group_id="7")
        talk.chat(user("Long"), sim={**PLAIN, "finish_reason": finish})
        talk.chat(user("On"))
    counted = player.session("counted")
    for tokens in (1, 2, 300):
        counted.chat(user("So many"), sim={**PLAIN, "completion_tokens": tokens})
    counted.chat(user("Two\n\nlines"), stop=["e"], max_completion_tokens=64)


def _forks(player: Player) -> None:
    source = player.session("source", group_id="f", metadata={"task": 1})
    for text in ("One", "Two", "Three"):
        source.chat(user(text), tools=TOOLS["chat"])
    orders: list[tuple[Json, Callable[[Talk], object]]] = [
        ({"turn": 2, "count": 2}, lambda fork: fork.chat(user("Another way"), tools=TOOLS["chat"])),
        ({"turn": 1, "parent_loss": True, "metadata": {"s": 1}}, lambda fork: None),
    ]
    for number, (order, go_on) in enumerate(orders):
        for _ in range(2):
            key = {"idempotency-key": f"f{number}"}
            reply = player.send(f"fork {number}", "POST", "/sessions/source/fork", order, key)
            for one in reply.json().get("sessions", ()):
                fork_id = one["session_id"]
                if fork_id in player.forks:
                    continue
                player.forks.append(fork_id)
                player.made_up[fork_id] = f"fork-{len(player.forks):027}"
                fork = Talk(player, fork_id)
                fork.history = source.history[: 2 * order["turn"]]
                go_on(fork)


def _live(player: Player) -> None:
    talk = player.session("live", stream_mode="live")
    talk.chat(user("One"), stream=True, sim={**PLAIN, "text": "In pieces, please: one two three"})
    talk.ask("messages", {"max_tokens": 99, "messages": [user("One")], "stream": True, "sim": PLAIN})
    other = player.session("live-responses", stream_mode="live", history="tree")
    other.ask("responses", {"input": "One", "stream": True, "sim": {"calls": CALLS}, "tools": TOOLS["responses"]})


def _large(player: Player) -> None:
    talk = player.session("large")
    for tokens in (6_000, 3, 4_000):
        talk.chat(user("Much"), sim={**PLAIN, "completion_tokens": tokens})
    talk.chat(user("Padded"), sim={**PLAIN, "body_bytes": 2**20})
    talk.chat(user("Wrong"), sim={**PLAIN, "completion_tokens": 6_000, "fault": "short_logprobs"})
