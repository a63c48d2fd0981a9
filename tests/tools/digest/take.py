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
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.simulator.tokenizer import Tokenizer
from ops.simulator.tokenizer_files import write
from tests.tools.digest.orders import order
from tests.tools.digest.requests import Player, Taken, play

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

SORTS = ("created_at", "updated_at", "turns", "reward", "staleness")
FILTERS = ("group_id=7", "status=open", "min_reward=0.2", "metadata.n=1", "attempt=1", "sort=odd")
PAGE = ("", "/actions", "/conversation", "/tokens", "/turns/1", "/turns/1?whole=true", "/find?text=Two")
"""What the page asks for of a session."""
WHOLE = ("/fleet", "/checkpoints", "/engines", "/ui/api/me", "/nowhere")

NORMALISED: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("an engine's request id has random digits", re.compile(r"turnlog-[0-9a-f][0-9a-f-]{30,40}"), "turnlog-RID"),
    ("it hashes the form in which a turn is stored", re.compile(r'"content_hash":"\w+"'), '"content_hash":"H"'),
    ("an engine is asked for its version now and then", re.compile(r'"dispatched":"\w+"'), '"dispatched":"V"'),
    ("stages of a turn take their time", re.compile(r'"timing":(\[[\d,]+\]|\{[^}]+\})'), '"timing":"S"'),
    ("a request's id begins with its process's", re.compile(r'"request_id":"[^"]+"'), '"request_id":"ID"'),
    ("the database has a clock of its own", re.compile(r"\b17\d{8}\.\d+"), "1700000000.0"),
    ("a lease runs by real time", re.compile(r'"lease_left_s":[\d.]+'), '"lease_left_s":1.0'),
    ("an epoch is drawn", re.compile(r'"epoch":"[\d.]+-\w{8}"'), '"epoch":"E"'),
    ("a snapshot's id is drawn", re.compile(r'"snapshot_id":"\w+"'), '"snapshot_id":"S"'),
    ("servers and engines listen on free ports", re.compile(r"127\.0\.0\.1:\d{4,5}"), "127.0.0.1:PORT"),
)
"""What must differ between two runs, why, and what stands there instead. Beside these: made-up ids of sessions, and
in cursors the store's epoch. Parquet files are compared as their schema and rows."""


PINNED = Path(__file__).with_name("pinned.txt")
"""What `digests` gave for the short form when it was last looked at."""

WAYS = ("sglang", "vllm", "tokenizer", "rllm")
"""An engine's dialect; or with prompts as ids, made by a tokenizer of the server's; or with rLLM's routes."""


def taken(root: Path, way: str = "sglang", *, short: bool = False) -> Taken:
    """Everything that the server of the checkout `root` gives out, normalised, by name, and what is to be seen of its
    code. `short`: without replies of many MiB and what is visible, and of each session only its state and its log."""
    with _playing(root, way) as player:
        play(player, large=not short)
        order(player)
        found = player.taken | _read(player, short) | _looks(player, way)
        # With rLLM's routes two sessions have made-up ids, whose order in a list is not that of their creation.
        found |= _pages(player.http) if way != "rllm" else {}
        names = player.made_up
    seen = {name: _normalised(data, names) for name, data in found.items()}
    return seen if short else seen | _surface(root)  # releases pin it (`tests.tools.released`)


def digests(items: Taken) -> dict[str, str]:
    """A digest for each export and list, and one for all replies, states, routes and so on."""
    hashes: dict[str, Any] = {}
    for name, data in items.items():
        kind, _, rest = name.partition(" ")
        if kind in ("export", "list"):
            kind = name
        elif kind == "session":
            kind = f"sessions' {rest.partition('/')[2] or 'views'}"
        hashes.setdefault(kind, hashlib.sha256()).update(name.encode() + data)
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
        if way == "rllm":
            environment["TURNLOG_FEATURES"] = "all,rllm"
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


def _pages(http: httpx.Client) -> Taken:
    """Every list, page by page."""
    found: Taken = {}

    def walk(name: str, path: str, next_of: Callable[[httpx.Response], str | None], parameter: str = "cursor") -> None:
        pages, after = [], None
        while True:
            reply = http.get(path, params=None if after is None else httpx.URL(path).params.set(parameter, after))
            pages.append(f"{reply.status_code} ".encode() + reply.content)
            after = next_of(reply) if reply.status_code == 200 else None
            if after is None:
                break
        found[f"list {name}"] = b"\n".join(pages)

    def in_body(reply: httpx.Response) -> str | None:
        cursor = reply.json()["next_cursor"]
        return None if cursor is None else str(cursor)

    def last(field: str) -> Callable[[httpx.Response], str | None]:
        def of_rows(reply: httpx.Response) -> str | None:
            lines = reply.content.splitlines()  # Text may hold other line ends.
            return str(json.loads(lines[-1])[field]) if lines else None

        return of_rows

    for sort in SORTS:
        for direction in ("asc", "desc"):
            walk(f"sessions {sort} {direction}", f"/sessions?limit=7&sort={sort}&order={direction}", in_body)
    for query in FILTERS:
        walk(f"sessions {query}", f"/sessions?limit=2&{query}", in_body)
    walk("page sessions", "/ui/api/sessions?limit=9&columns=task", in_body)
    walk("groups", "/groups?limit=2", in_body)
    walk("messages", "/sessions/long/messages?limit=7", in_body)
    walk("events", "/events?limit=40", last("position"), "after")
    walk("events of a kind", "/events?limit=3&type=RewardAssigned", last("position"), "after")
    walk("export", "/export?limit=3", last("cursor"))
    walk("export of a group", "/export?limit=1&group_id=7&branches=all", last("cursor"))
    return found


def _looks(player: Player, way: str) -> Taken:
    """What the page shows of some sessions, what describes the server, its routes, and the names of its metrics."""
    found: Taken = {}

    def get(path: str) -> None:
        reply = player.http.get(path)
        found[f"look {path}"] = f"{reply.status_code} ".encode() + reply.content

    for name in ("tools", "tree", "messages", "undone", "erased", "absent"):
        for what in PAGE:
            get(f"/ui/api/sessions/{name}{what}")
        get(f"/ui/api/rollouts?rollout={name}")
        if way == "rllm":
            get(f"/sessions/{name}/traces")
    for path in WHOLE:
        get(path)
    document = player.http.get("/openapi.json").json()
    for path, operations in document.pop("paths").items():
        for method, operation in operations.items():
            found[f"route {method.upper()} {path}"] = json.dumps(operation, sort_keys=True).encode()
    found["look /openapi.json"] = json.dumps(document, sort_keys=True).encode()
    lines = player.http.get("/metrics").text.splitlines()
    found["look metrics"] = "\n".join(sorted(line.rpartition(" ")[0] for line in lines if line[:1] != "#")).encode()
    return found


def _surface(root: Path) -> Taken:
    """What is visible of the checkout's code."""
    command = [sys.executable, str(Path(__file__).with_name("surface.py"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        found.setdefault(f"surface {kind}", []).append(rest)
    return {kind: "\n".join(lines).encode() for kind, lines in found.items()}


def _normalised(data: bytes, names: Mapping[str, str]) -> bytes:
    if data.startswith(b"PAR1"):
        data = _parquet(data)
    text = re.sub(r"(eyJ|WyJ)[A-Za-z0-9_-]{8,}", _read_cursor, data.decode("latin-1"))
    for name, instead in names.items():
        text = text.replace(name, instead)
    for _, pattern, written in NORMALISED:
        text = pattern.sub(written, text)
    return text.encode("latin-1")


def _read_cursor(cursor: re.Match[str]) -> str:
    """A cursor is base64 of JSON: an object has an `epoch`, drawn when a store is made, a list a session's id."""
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
