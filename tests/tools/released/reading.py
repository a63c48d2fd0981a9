"""What is read of a store: by the release that wrote it, then by every later one, which must give all of it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from ops.server import ROOT
from tests.tools.released.scenario import LAST, MANY_EVENTS, STAGED, until

SHAPES = (
    *("turnlog", "tree", "miles", "slime", "verl", "skyrl", "trl", "trl-async", "openenv", "xtuner", "rllm", "tinker"),
    *("areal", "prime-rl", "atropos"),
)
OTHER_FORMATS = ("parquet", "safetensors", "msgpack", "atif", "messages")
ASKED = {"advantage": "grpo", "evaluation": "true"}
VIEWS = ("", "/tree", "/messages")
SHOWN = (
    *(
        "linear",
        "tree",
        "restored",
        "messages",
        "responses",
        "completions",
        "ids",
        "text",
        "named",
        "erased",
        "deleted",
    ),
    *("archived-0", "failed", "limited", "objects", "segments", "undone", MANY_EVENTS),
)
LISTS = ("/sessions?limit=200", "/groups", "/runs", "/checkpoints", "/adapters", "/search?q=hello&limit=50")

LONG, FEW = 400, 4
"""A text of more characters, and a list of more numbers, is kept by its hash."""

VOLATILE = frozenset({"updated_at", "last_at", "seconds"})
"""Fields that say when they are read, or what happened since the store was packed: its recovery."""


def until_recovered(client: httpx.Client) -> None:
    """The dead process's open turns have been ended by this one, and the search has found all that was said."""
    for name in (LAST, STAGED):
        until(lambda: "TurnAbandoned" in str(_events(client, name)), f"the recovery of {name}")  # noqa: B023
    until(lambda: _json(client, "/search?q=hello")["is_current"], "the search")


def verified(environment: Mapping[str, str]) -> Any:
    """The report of `turnlog verify`, which found no problem. Raises CalledProcessError."""
    command = [sys.executable, "-m", "turnlog.cli", "verify", "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**environment}, capture_output=True, check=True)
    return json.loads(done.stdout)


def everything(client: httpx.Client, *, is_whole: bool = True) -> dict[str, Any]:
    """What the server gives of the store, by request. `is_whole`: all shapes, formats and sessions; otherwise a part of
    them that takes a second."""
    found: dict[str, Any] = {}
    for path in LISTS:
        found[path] = _json(client, path)
    for shape in SHAPES if is_whole else SHAPES[:2]:
        query = {**ASKED, "replay": "true", **({"explain": "true"} if shape == SHAPES[0] else {})}
        found[f"export {shape}"] = lines(client, f"/export?shape={shape}", **query)
    for format in OTHER_FORMATS if is_whole else ():
        query = {"format": format, **ASKED, **({"replay": "true"} if format not in ("atif", "messages") else {})}
        reply = client.get("/export", params=query)
        found[f"export {format}"] = _decoded(format, _checked(reply).content)
    for name in SHOWN if is_whole else SHOWN[:3]:
        for view in VIEWS:
            reply = client.get(f"/sessions/{name}{view}")
            found[name + view] = {"status": reply.status_code, "json": reply.json()}
    for name in (LAST, STAGED):
        found[f"{name}/events"] = [event["type"] for event in _events(client, name)]
    for kind in ("1", "4"):
        reply = client.get(f"/sessions/payloads/turns/{kind}/routed_experts")
        found[f"payload {kind}"] = {"status": reply.status_code, "bytes": _shown(reply.content)}
    # The recovery is among the others' events, too.
    found["events"] = [one for one in lines(client, "/events") if one["session_id"] not in (MANY_EVENTS, LAST, STAGED)]
    return {name: _kept(value) for name, value in found.items()}


def behind(client: httpx.Client, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What an export and the log have behind the places that a client has kept."""
    rows = lines(client, "/export", cursor=kept["cursor"])
    events = lines(client, "/events", after=kept["position"])
    return {
        "rows": [[row["session_id"], row["segment"], row["branch"]] for row in rows],
        "events": [event["position"] for event in events if event["session_id"] not in (LAST, STAGED)],
    }


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.request.url}: {reply.status_code} {reply.text}")
    return reply


def _json(client: httpx.Client, path: str) -> Any:
    return _checked(client.get(path)).json()


def lines(client: httpx.Client, path: str, **query: str) -> list[Any]:
    reply = _checked(client.get(path, params=httpx.URL(path).params.merge(query)))
    return [json.loads(line) for line in reply.content.splitlines()]


def _events(client: httpx.Client, name: str) -> list[Any]:
    return lines(client, f"/sessions/{name}/events")


def _decoded(format: str, data: bytes) -> Any:
    if format == "parquet":
        import pyarrow.parquet as parquet

        return parquet.read_table(io.BytesIO(data)).to_pylist()
    if format == "safetensors":
        from safetensors.numpy import load

        arrays = load(data)
        return {name: [str(one.dtype), list(one.shape), _shown(one.tobytes())] for name, one in sorted(arrays.items())}
    if format == "msgpack":
        import msgpack

        return list(msgpack.Unpacker(io.BytesIO(data)))
    return [json.loads(line) for line in data.splitlines()]


def _shown(data: bytes) -> str:
    return base64.b64encode(data).decode() if len(data) < LONG else _hash(data)


def _hash(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:8]}"


def _kept(value: Any) -> Any:
    """As JSON has it, without what is volatile, and with hashes in the place of what is long."""
    if isinstance(value, dict):
        return {str(key): _kept(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        if len(value) > FEW and _is_of_numbers(value):
            return _hash(json.dumps(value).encode())
        return [_kept(one) for one in value]
    if isinstance(value, bytes):
        return _shown(value)
    return _hash(value.encode()) if isinstance(value, str) and len(value) >= LONG else value


def _is_of_numbers(value: Any) -> bool:
    """Ids, logprobs, masks: a list of numbers and nothing else, at any depth."""
    if isinstance(value, list | tuple):
        return all(map(_is_of_numbers, value))
    return value is None or isinstance(value, int | float)


def differences(kept: Any, now: Any, at: str = "") -> Iterator[str]:
    """Where what is read now lacks what was kept. A field that came since is none."""
    if isinstance(kept, dict) and isinstance(now, dict):
        for name, value in kept.items():
            if name not in now:
                yield f"{at}.{name} is gone: it was {value!r}"
            else:
                yield from differences(value, now[name], f"{at}.{name}")
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for number, (one, other) in enumerate(zip(kept, now, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif type(kept) is not type(now) or kept != now:
        yield f"{at} was {kept!r}, and is {now!r}"
