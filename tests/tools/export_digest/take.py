"""Plays the requests to one checkout's server, and reads everything that it then gives out."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.simulator.tokenizer import Tokenizer
from ops.simulator.tokenizer_files import write
from tests.tools.export_digest.requests import Player, Taken, play

CLOCK = Path(__file__).with_name("clock")
SHAPES = ("turnlog", "slime", "miles", "verl", "areal", "skyrl", "trl", "prime-rl", "tinker", "atropos")
FORMATS = ("ndjson", "parquet", "safetensors", "msgpack")
DOCUMENTS = ("atif", "messages")
EVERYTHING = {"explain": "true", "replay": "true", "advantage": "grpo"}
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "main": {"branches": "main"},
    "longest": {"branches": "longest"},
    "all": {"branches": "all", "loss": "every"},
    "cut at turns": {"max_seq_len": "150"},
    "cut at tokens": {"max_seq_len": "150", "truncate": "token"},
    "images": {"images": "inline"},
    "group": {"group_id": "7", "min_reward": "0.2"},
    "stale": {"max_staleness": "2"},
}

NORMALISED: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("an engine's request id has random digits", re.compile(r"turnlog-[0-9a-f][0-9a-f-]{30,40}"), "turnlog-RID"),
    ("it hashes the form in which a turn is stored", re.compile(r'"content_hash":"\w+"'), '"content_hash":"H"'),
    ("an engine is asked for its version now and then", re.compile(r'"dispatched":"\w+"'), '"dispatched":"V"'),
    ("stages of a turn take their time", re.compile(r'"timing":(\[[\d,]+\]|\{[^}]+\})'), '"timing":"S"'),
    ("a request's id begins with its process's", re.compile(r'"request_id":"[^"]+"'), '"request_id":"ID"'),
    ("servers and engines listen on free ports", re.compile(r"127\.0\.0\.1:\d{4,5}"), "127.0.0.1:PORT"),
)
"""What must differ between two runs, why, and what stands there instead. Beside these: the ids of forks, and in
cursors the store's epoch. Parquet files are compared as their schema and rows."""


PINNED = Path(__file__).with_name("pinned.txt")
"""What `digests` gave for the short form when it was last looked at."""

WAYS = ("sglang", "vllm", "tokenizer")
"""An engine's dialect; or with prompts as ids, made by a tokenizer of the server's."""


def taken(root: Path, way: str = "sglang", *, short: bool = False) -> Taken:
    """Everything that the server of the checkout `root` gives out, normalised, by name. `short`: without replies of
    many MiB, and of each session only its state and its log."""
    with _playing(root, way) as player:
        play(player, large=not short)
        found = player.taken | _read(player, short)
        names = player.made_up
    return {name: _normalised(data, names) for name, data in found.items()}


def digests(items: Taken) -> dict[str, str]:
    """A digest for each export, and one for all replies, states and so on together."""
    hashes: dict[str, Any] = {}
    for name, data in items.items():
        kind, _, rest = name.partition(" ")
        kind = name if kind == "export" else f"{kind} {rest.rpartition('/')[2]}" if "/" in rest else kind
        hashes.setdefault(kind if kind != "reply" else "replies", hashlib.sha256()).update(name.encode() + data)
    return {kind: made.hexdigest()[:16] for kind, made in hashes.items()}


@contextlib.contextmanager
def _playing(root: Path, way: str) -> Iterator[Player]:
    environment = {
        "TURNLOG_REPLAY": "routed_experts,indexer_topk",
        "TURNLOG_MOE_LAYERS": "4",
        "TURNLOG_MOE_TOPK": "2",
        "TURNLOG_WORKERS": "2",
        "TURNLOG_SESSION_SECRET": "a secret of this tool's own, which is no secret",
        "PYTHONPATH": str(CLOCK),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-digest-")))
        dialect = "vllm" if way == "vllm" else "sglang"
        if way == "tokenizer":
            write(folder / "tokenizer", Tokenizer())
            environment["TURNLOG_TOKENIZER"] = str(folder / "tokenizer")
        engine = SimulatorProcess("--seed", "11", "--dialect", dialect, "--weight-version", "5")
        engine.environment = {**os.environ, "PYTHONPATH": f"{CLOCK}{os.pathsep}{ROOT}"}
        server = ServerProcess(folder, upstreams=[engine.base_url], environment=environment, root=root)
        for process in (engine, server):
            # Also in tests, whose forks would keep the running clock.
            vars(process)["spawn"] = subprocess.Popen
            stack.enter_context(process)
        yield Player(stack.enter_context(httpx.Client(base_url=server.base_url, timeout=60)))


def _read(player: Player, short: bool) -> Taken:
    found: Taken = {}

    def get(name: str, path: str, method: str = "GET", **query: str) -> None:
        reply = player.http.request(method, path, params=query, json={} if method == "POST" else None)
        found[name] = reply.content if reply.status_code == 200 else f"{reply.status_code} {reply.text}".encode()

    for shape in SHAPES:
        for format in FORMATS if not short or shape == "turnlog" else FORMATS[:1]:
            asked = EVERYTHING if not short or format != "ndjson" else {"explain": "true"}
            get(f"export {shape} {format}", "/export", shape=shape, format=format, **asked)
        for name, query in VARIANTS.items() if not short or shape == "turnlog" else ():
            get(f"export {shape}, {name}", "/export", shape=shape, **query)
    for format in DOCUMENTS:
        get(f"export {format}", "/export", format=format, **EVERYTHING)
    for session_id in (*player.sessions, *player.forks):
        path = f"/sessions/{session_id}"
        for what in ("/", "/events") if short else ("/", "/events", "/state", "/tree"):
            get(f"session {session_id}{what}", path + what.removesuffix("/"))
        if short:
            continue
        get(f"session {session_id}/samples", f"{path}/samples", "POST")
        for kind in ("routed_experts", "indexer_topk"):
            for turn in ("1", "2", "3"):
                get(f"payload {session_id} {turn}/{kind}", f"{path}/turns/{turn}/{kind}")
    for name in ("/events", "/groups", "/sessions", "/export/groups?consumer=c&size=2"):
        get(f"all {name}", name)
    return found


def _normalised(data: bytes, names: Mapping[str, str]) -> bytes:
    if data.startswith(b"PAR1"):
        data = _parquet(data)
    text = data.decode("latin-1")
    for name, instead in names.items():
        text = text.replace(name, instead)
    for _, pattern, written in NORMALISED:
        text = pattern.sub(written, text)
    return re.sub(r"eyJ[A-Za-z0-9_-]{8,}", _without_epoch, text).encode("latin-1")


def _without_epoch(cursor: re.Match[str]) -> str:
    """A cursor is base64 of a JSON object; its `epoch` is drawn when a store is made."""
    whole = cursor[0]
    try:
        place = json.loads(base64.urlsafe_b64decode(whole + "=" * (-len(whole) % 4)))
    except ValueError:
        return whole
    return json.dumps({**place, "epoch": "EPOCH"} if "epoch" in place else place)


def _parquet(data: bytes) -> bytes:
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(data))
    rows = [json.dumps(row, default=_spelled) for row in table.to_pylist()]
    return "\n".join([str(table.schema), *rows]).encode()


def _spelled(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
