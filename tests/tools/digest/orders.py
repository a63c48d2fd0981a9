"""The fixed requests that come behind the turns: names, limits, annotations, checkpoints, archives, engines, gates."""

from __future__ import annotations

from typing import Any

from tests.tools.digest.requests import PLAIN, Json, Player, user

VLLM, SGLANG = "inference/v1/generate", "generate"
READ = (
    *("v1/models", "ping", "workers", "list_workers", "is_paused", "version", "get_model_info", "get_server_info"),
    *("ready", "adapters"),
)
NAMED = {"x-session-id": "epochs"}


def order(player: Player) -> None:
    """All of them. Each leaves engines and gates as it found them."""
    for part in (
        _token_ids,
        _streams,
        _names,
        _limits,
        _annotations,
        _finished,
        _engines,
        _gates,
        _checkpoints,
        _erased,
    ):
        part(player)


def token_body(route: str, ids: list[int], **fields: Any) -> Json:
    """A request of a client that speaks ids, as vLLM's route takes it or SGLang's."""
    if route == VLLM:
        return {"token_ids": ids, "sampling_params": {"max_tokens": 8}, **fields}
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True, **fields}


def _token_ids(player: Player) -> None:
    for route, key in ((VLLM, "request_id"), (SGLANG, "rid")):
        name = f"ids-{key}"
        player.session(name, history="tree")
        path = f"/sessions/{name}/{route}"
        ids = [5, 6, 7]
        for number in range(2):
            body = token_body(route, ids, **{key: f"{name}-{number}"})
            reply = player.send(f"{name} {number}", "POST", path, body).json()
            player.send(f"{name} {number} again", "POST", path, body)
            ids = [*ids, *_sampled(reply), 11 + number]
        player.send(f"{name} stream", "POST", path, token_body(route, ids, stream=True))
        player.send(f"{name} without ids", "POST", path, token_body(route, []))
        player.send(f"{name} n", "POST", path, token_body(route, ids, n=2))


def _sampled(reply: Json) -> list[int]:
    """The ids; none where the turn failed, which its reply shows."""
    if "choices" in reply:
        return list(reply["choices"][0]["token_ids"])
    return list(reply.get("output_ids", ()))


def _streams(player: Player) -> None:
    talk = player.session("streams", history="tree")
    options: Json = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    talk.chat(user("Stream"), **options, sim={"reasoning": True, "tool_calls": True})
    talk.ask("completions", {"prompt": "Once", "stream": True, "max_tokens": 9, "sim": PLAIN})
    talk.chat(user("Fails"), stream=True, sim={**PLAIN, "fault": "not_json"})


def _names(player: Player) -> None:
    """A name that comes again after its session was finished."""
    for epoch in range(2):
        for text in ("One", "Two"):
            body = {"model": "simulator", "messages": [user(f"{text} of {epoch}")], "sim": PLAIN}
            player.send(f"epoch {epoch}", "POST", "/v1/chat/completions", body, NAMED)
        player.send(f"finish {epoch}", "POST", "/finish_session?session_id=epochs")
    for generation in ("1", "2", "3", "x"):
        player.send(f"generation {generation}", "GET", f"/sessions/epochs/state?generation={generation}")
    player.send("by name", "GET", "/sessions?name=epochs")
    # The second one's id is made up, and trainers' rows hold what is hashed of it.
    player.send("erase the second", "DELETE", "/sessions/epochs?generation=2&erase=true")


def _limits(player: Player) -> None:
    talk = player.session("limited", limits={"turns": 2})
    for text in ("One", "Two", "Three"):
        talk.chat(user(text))
    talk = player.session("few-tokens", limits={"tokens": 30}, history="tree")
    for text in ("One", "Two", "Three"):
        talk.chat(user(text), sim={**PLAIN, "completion_tokens": 20})
    root = player.session("limited-root", limits={"turns": 1, "per": "rollout"})
    root.chat(user("Plan"))
    player.session("limited-child", parent_session_id="limited-root").chat(user("Do"))


def _annotations(player: Player) -> None:
    path = "/sessions/tree"
    column = {"values": [0.5, None, -0.25], "dtype": "float32", "over": "output"}
    for name, given in (
        ("advantage", {"value": 0.5}),
        ("kl", column),
        ("seen", {"value": {"ü": [1, None]}}),
        ("bad name!", {"value": 1}),
    ):
        player.send(f"annotate {name}", "PUT", f"{path}/annotations/{name}", given)
        player.send(f"annotate turn {name}", "PUT", f"{path}/turns/2/annotations/{name}?writer=w", given)
        player.send(f"annotation {name}", "GET", f"{path}/annotations/{name}")
    player.send("delete seen", "DELETE", f"{path}/annotations/seen")
    player.send("delete seen again", "DELETE", f"{path}/annotations/seen")
    player.send("annotations", "GET", f"{path}/annotations")
    player.send("annotations of turn 2", "GET", f"{path}/turns/2/annotations")


def _finished(player: Player) -> None:
    talk = player.session("finished", evaluation=True, temperature=0.6)
    talk.chat(user("One"))
    for number in range(2):
        done = {"producer_finished": True, "timeout": 5 * number}
        player.send(f"finish {number}", "POST", "/sessions/finished/finish", done)
    talk.chat(user("Two"))
    player.send("models", "GET", "/sessions/finished/v1/models")


def _engines(player: Player) -> None:
    player.send("engines", "GET", "/engines")
    for method, path, body in (
        *(
            ("GET", f"/{name}", None)
            for name in ("v1/models", "ping", "workers", "list_workers", "is_paused", "version")
        ),
        *(("GET", f"/{name}", None) for name in ("get_model_info", "get_server_info", "ready", "adapters")),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/flush_cache", None),
        ("POST", "/sleep", None),
        ("POST", "/engines", {"url": "no URL"}),
        ("DELETE", "/engines?url=http://absent:1", None),
        ("POST", "/abort_request", {"rid": "absent"}),
        ("GET", "/nowhere", None),
        ("PATCH", "/sessions", None),
    ):
        player.send(f"{method} {path}", method, path, body)


def _gates(player: Player) -> None:
    for path, body in (
        ("/fleet/pause", {"mode": "in_place", "lease_s": 60}),
        ("/fleet/resume", {}),
        ("/adapters/a/pause", {"lease_s": 60}),
        ("/adapters/a/resume", {"version": "7"}),
        ("/pause_generation", {"mode": "abort"}),
        ("/continue_generation", {}),
        ("/update_weight_version", {"new_version": "8"}),
        ("/fleet/pause", {"mode": "sideways"}),
    ):
        player.send(f"order {path}", "POST", path, body)
    player.send("fleet", "GET", "/fleet")
    player.session("adapted", adapter="a").chat(user("With it"))


def _checkpoints(player: Player) -> None:
    talk = player.session("kept")
    talk.chat(user("Before"))
    player.send("cut", "POST", "/checkpoints", {"name": "cut"})
    talk.chat(user("After"))
    player.put("kept", "reward", reward=1)
    player.send("cut again", "POST", "/checkpoints", {"name": "cut"})
    player.send("restore", "POST", "/checkpoints/cut/restore", {})
    player.send("restored", "GET", "/sessions/kept/state")
    talk.chat(user("Instead"), keep=2)
    player.send("restore nothing", "POST", "/checkpoints/absent/restore", {})
    player.send("checkpoints", "GET", "/checkpoints")
    player.send("delete", "DELETE", "/checkpoints/absent")


def _erased(player: Player) -> None:
    talk = player.session("erased")
    talk.chat(user("Never seen"))
    for number in range(2):
        player.send(f"erase {number}", "DELETE", "/sessions/erased?erase=true")
    for what in ("", "/events", "/state", "/tree"):
        player.send(f"erased{what}", "GET", f"/sessions/erased{what}")
    player.send("archive", "POST", "/archives", {"to": "file:///absent", "older_than_s": 0})
    player.send("import", "POST", "/archives/import", {"file": "file:///absent/x"})
