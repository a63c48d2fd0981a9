"""Is a server with a full store ready as fast as one with an empty store?"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import secrets
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.domain.events import BlobRef, Event, SessionConfig, SessionCreated, TurnCommitted, TurnOpened, VersionSpan
from app.sessions.recovery import register
from app.store.engine import Database
from app.store.log import Operation, StoredBlob
from app.store.log_sessions import Create
from app.store.log_turns import Claim, Commit
from ops.bench.client import Connection
from ops.bench.latency import timed
from ops.bench.load import Conversation, opening_messages
from ops.bench.measure import keep, table
from ops.bench.stand import cores, folder_for_bench, pinned
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from workers import codec
from workers.codec import Facts, Wire
from workers.parse import token_text

SESSIONS_PER_TRANSACTION = 50
PARAMETERS = b'{"model":"simulator"}'
QUESTION_BYTES = 512
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 20
POLL_S = 0.005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the databases are put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    places = cores()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(places.others))
        engine = stack.enter_context(SimulatorProcess("--reasoning", "0"))
        for count in (0, arguments.sessions):
            folder = stack.enter_context(folder_for_bench(arguments.folder))
            server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
            began = time.perf_counter()
            await fill(server.environment["TURNLOG_DATABASE_URL"], count, arguments.turns)
            filled = time.perf_counter() - began
            times = [await _first_turn(server, places.server, f"first-{number}") for number in range(arguments.repeat)]
            rows.append(
                {
                    "sessions": count,
                    "database MiB": server.database_path.stat().st_size / 2**20,
                    "to fill s": filled,
                    "health answers s": sorted(up for up, _ in times)[len(times) // 2],
                    "first turn s": sorted(turn for _, turn in times)[len(times) // 2],
                }
            )
    table(rows)
    print(f"written to {keep('startup', rows)}")
    return 0


async def _first_turn(server: ServerProcess, cpus: set[int], session_id: str) -> tuple[float, float]:
    """Seconds from the start of the process to its first answer, and to a first committed turn."""
    body = Conversation(opening_messages(1024)).body()
    began = time.perf_counter()
    with pinned(cpus):
        server.launch()
    try:
        while not server.answers():
            time.sleep(POLL_S)  # noqa: ASYNC251 - nothing else runs on this loop
        up = time.perf_counter() - began
        async with await Connection.connect(server.base_url) as connection:
            await connection.json("POST", "/sessions", {"session_id": session_id})
            await timed(connection, f"/sessions/{session_id}/v1/chat/completions", body)
        return up, time.perf_counter() - began
    finally:
        server.stop()


async def fill(url: str, sessions: int, turns: int) -> None:
    """Write sessions as the service would, in large transactions instead of a turn each."""
    database = Database(url)
    await database.open()
    try:
        incarnation = await register(database)
        commits = _commits(turns, incarnation)
        for start in range(0, sessions, SESSIONS_PER_TRANSACTION):
            batch = [
                operation
                for number in range(start, min(start + SESSIONS_PER_TRANSACTION, sessions))
                for operation in _session(f"filled-{number}", commits)
            ]
            await database.write(
                lambda tx, batch=batch: [operation.apply(tx) for operation in batch],  # type: ignore[misc]
                durable=False,
            )
    finally:
        await database.close()


def _session(session_id: str, commits: Sequence[Commit]) -> list[Operation[Any]]:
    """All sessions have the same turns: what a start costs depends on how many, not on what they say."""
    at = time.time()
    created = SessionCreated(SessionConfig(rollback_window=1), body_hash="0" * 32)
    operations: list[Operation[Any]] = [Create(session_id, at, created, "0" * 32, None, None)]
    for turn, commit in enumerate(commits, 1):
        opened = TurnOpened(turn, turn - 1, commit.incarnation, body_hash="0" * 32)
        operations.append(Claim(session_id, commit.fence - 1, at, at, opened, 8.0))
        operations.append(msgspec.structs.replace(commit, session_id=session_id, at=at))
    return operations


def _commits(turns: int, incarnation: int) -> list[Commit]:
    hasher = hashlib.sha256()
    return [_commit("", turn, 2 * turn, incarnation, hasher, time.time()) for turn in range(1, turns + 1)]


def _ids(count: int) -> bytes:
    """Random token ids of five digits, as int32."""
    return array("i", (secrets.randbelow(90_000) + 10_000 for _ in range(count))).tobytes()


def _commit(session_id: str, turn: int, fence: int, incarnation: int, hasher: Any, at: float) -> Commit:
    """A turn that continues its parent's messages and tokens, so that the session folds and verifies."""
    suffix, output = _ids(PROMPT_TOKENS), _ids(OUTPUT_TOKENS)
    text = token_text(memoryview(suffix + output).cast("i"))
    hasher.update(text)
    facts = codec.pack(Facts(suffix, output, os.urandom(8 * OUTPUT_TOKENS)))
    question = opening_messages(QUESTION_BYTES, seed=turn)
    answer = b'{"role":"assistant","content":"It is so."}'
    wire = codec.pack(Wire(question, answer, b'{"choices":[{"message":' + answer + b"}]}", []))
    blob = BlobRef(0, "params", len(PARAMETERS), hashlib.sha256(PARAMETERS).hexdigest())
    first = turn == 1
    per_turn = len(question) + 1
    event: Event = TurnCommitted(
        turn=turn,
        parent=turn - 1,
        fence=fence,
        segment=0,
        base_messages=per_turn * (turn - 1),
        new_messages=len(question),
        message_hashes=tuple(hashlib.sha256(b"%d" % index).hexdigest()[:32] for index in range(per_turn)),
        client_hash="0" * 32,
        base_tokens=(PROMPT_TOKENS + OUTPUT_TOKENS) * (turn - 1),
        suffix_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        tokens_hash=hasher.hexdigest(),
        tokens_text_bytes=len(text) * turn,
        body_hash="0" * 32,
        content_hash=codec.content_hash(facts, wire),
        params=0,
        dialect="sglang",
        engine="http://127.0.0.1:1",
        weight_versions=(VersionSpan("default", 0, OUTPUT_TOKENS),),
        requested_at=at,
        finish_reason="stop",
        new_blobs=(blob,) if first else (),
    )
    rows = [StoredBlob(0, "params", blob.size, blob.hash, codec.compress(PARAMETERS))] if first else []
    return Commit(session_id, fence, incarnation, at, [event], facts, wire, rows)
