"""What one turn weighs in PostgreSQL: bytes by table, WAL and CPU, at a named size of turns and contexts.

A few sessions are taken from empty to full contexts by a real server in front of the simulator, once without replay
payloads and once with them. Nothing is scaled but two things: the simulator's logprobs are few and compress, so what
drawn ones would add is measured and added; and a payload's bytes are by token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np

from ops.bench.client import Connection
from ops.bench.latency import timed
from ops.bench.load import Conversation, opening_messages, reply_message
from ops.bench.measure import cpu_s, keep, table
from ops.bench.memory import total_tokens
from ops.bench.primary import Primary, Watch, plain_url, primary
from ops.bench.sizes import Payload
from ops.bench.stand import cores, folder_for_bench, simulator
from ops.server import ServerProcess
from workers import codec
from workers.codec import Facts

TEMPLATE_TOKENS = 10
"""Of each turn's prompt; the question's words are the rest."""

BYTES_PER_TOKEN = 4.9
"""Of the simulator's vocabulary, about."""

REPLAY_TURNS = 12
SAMPLED = 200
"""Turns whose logprobs are drawn anew."""

INCREMENTAL = {"TURNLOG_REPLAY": "routed_experts", "TURNLOG_REPLAY_INCREMENTAL": "1"}
_SIZES = """
SELECT relname AS name, pg_relation_size(oid) AS rows, pg_indexes_size(oid) AS indexes,
       CASE WHEN reltoastrelid = 0 THEN 0 ELSE pg_total_relation_size(reltoastrelid) END AS toast
FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1
"""


class TableBytes(msgspec.Struct, frozen=True):
    """Bytes a turn of one table: its rows in place, out of line (TOAST, with its index), its indexes."""

    name: str
    rows: float
    toast: float
    indexes: float

    @property
    def total(self) -> float:
        return self.rows + self.toast + self.indexes


class Weights(msgspec.Struct, frozen=True):
    """Of a turn with so many tokens, the mean over contexts from empty to `context_tokens`. Bytes and milliseconds.

    `logprob_bytes` are what real logprobs take over the simulator's; `wal_bytes` are without full pages, which come
    once a page and checkpoint. By token of a payload, which arrives as `raw_bytes`: what is stored, its WAL, and the
    WAL of freeing it again, after a checkpoint, which is mostly the full pages that its rows are marked dead in.
    """

    context_tokens: int
    new_tokens: float
    output_tokens: float
    turns: int
    tables: list[TableBytes]
    logprob_bytes: float
    wal_bytes: float
    commits: float
    database_ms: float
    server_ms: float
    raw_bytes: float
    replay_bytes: float
    replay_wal_bytes: float
    free_wal_bytes: float

    @property
    def stored_bytes(self) -> float:
        return sum(one.total for one in self.tables) + self.logprob_bytes

    @property
    def index_bytes(self) -> float:
        return sum(one.indexes for one in self.tables)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context-tokens", type=int, default=100_000, help="where a session ends")
    parser.add_argument("--new-tokens", type=int, default=300, help="of prompt, each turn")
    parser.add_argument("--output-tokens", type=int, default=400, help="each turn")
    parser.add_argument("--samples", type=int, default=4, help="sessions that are taken there")
    parser.add_argument("--folder", type=Path, help="where the database is put")


async def main(arguments: argparse.Namespace) -> int:
    found = await measured(arguments)
    show(found)
    print(f"written to {keep('weights', msgspec.to_builtins(found))}")
    return 0


def show(weights: Weights) -> None:
    """Print what was measured."""
    print(
        f"{weights.turns} turns of {weights.new_tokens:.0f} + {weights.output_tokens:.0f} tokens, "
        f"contexts up to {weights.context_tokens}"
    )
    rows: list[dict[str, Any]] = [
        {"table": one.name, "rows": one.rows, "TOAST": one.toast, "indexes": one.indexes, "bytes a turn": one.total}
        for one in weights.tables
        if one.total >= 1
    ]
    table(rows)
    print(f"real logprobs: {weights.logprob_bytes:+.0f} bytes; in all {weights.stored_bytes:.0f} bytes a turn")
    print(f"WAL {weights.wal_bytes:.0f} bytes and {weights.commits:.2f} transactions a turn")
    print(f"CPU a turn: database {weights.database_ms:.2f} ms, API process {weights.server_ms:.2f} ms")
    print(
        f"replay payload of {weights.raw_bytes:.0f} bytes a token: {weights.replay_bytes:.0f} stored, "
        f"{weights.replay_wal_bytes:.0f} of WAL a token, {weights.free_wal_bytes:.0f} of WAL to free it"
    )


async def measured(arguments: argparse.Namespace) -> Weights:
    """Some minutes for contexts of 100,000 tokens."""
    with primary(arguments.folder) as database:
        plain = await _Run(database, arguments, {}, None).result(arguments.samples)
        payload = Payload(asked=False)
        replay = await _Run(database, arguments, INCREMENTAL, payload).result(1, REPLAY_TURNS)
    by_token = replay.turns / replay.tokens
    return Weights(
        context_tokens=arguments.context_tokens,
        new_tokens=plain.tokens / plain.turns - arguments.output_tokens,
        output_tokens=arguments.output_tokens,
        turns=plain.turns,
        tables=plain.tables,
        logprob_bytes=plain.logprob_bytes,
        wal_bytes=plain.wal_bytes,
        commits=plain.commits,
        database_ms=plain.database_ms,
        server_ms=plain.server_ms,
        raw_bytes=payload.token_bytes * 3 / 4,
        replay_bytes=sum(one.total for one in replay.tables if one.name == "chunks") * by_token,
        replay_wal_bytes=max(replay.wal_bytes - plain.wal_bytes, 0.0) * by_token,
        free_wal_bytes=replay.free_wal_bytes * by_token,
    )


class _Found(msgspec.Struct, frozen=True):
    """Of one run, by turn but for `turns` and `tokens`."""

    turns: int
    tokens: int
    tables: list[TableBytes]
    logprob_bytes: float
    wal_bytes: float
    commits: float
    database_ms: float
    server_ms: float
    free_wal_bytes: float


class _Run:
    """Sessions of one kind on a new database of `primary`."""

    def __init__(
        self, primary: Primary, arguments: argparse.Namespace, environment: dict[str, str], payload: Payload | None
    ) -> None:
        self._primary = primary
        self._url = primary.new_database()
        self._arguments = arguments
        self._environment = environment
        output = {"completion_tokens": arguments.output_tokens, "tool_calls": False, "reasoning": False}
        wish = {} if payload is None else {"experts": payload.wish()}
        self._sim = msgspec.json.encode({**output, **wish})
        size = int((arguments.new_tokens - TEMPLATE_TOKENS) * BYTES_PER_TOKEN)
        self._questions = [opening_messages(size, seed=seed)[0] for seed in range(64)]

    async def result(self, sessions: int, most: int | None = None) -> _Found:
        """`most` turns of each session, else as many as its context holds."""
        places = cores(spread=True)
        with folder_for_bench(self._arguments.folder) as folder, simulator(places) as engine:
            server = ServerProcess(
                folder, upstreams=[engine.base_url], database_url=self._url, environment=self._environment
            ).migrate()
            async with Watch.of(self._url) as watch, _connection(self._url) as connection:
                server.start()
                try:
                    await self._session(server, "warm", 3)
                    await watch.tidy()
                    sizes = await _sizes(connection)
                    counted, base, own = await watch.counted(), self._primary.cpu_s(), cpu_s(server.pid)
                    began = time.perf_counter()
                    done = await asyncio.gather(
                        *(self._session(server, f"weighed-{number}", most) for number in range(sessions))
                    )
                    base, own = self._primary.cpu_s() - base, cpu_s(server.pid) - own
                    print(f"{sum(turns for turns, _ in done)} turns in {time.perf_counter() - began:.0f} s", flush=True)
                finally:
                    server.stop()
                grown = (await watch.counted()).since(counted)
                await watch.tidy()
                after, logprob_bytes = await _sizes(connection), await _logprob_bytes(connection)
                free_wal_bytes = await _free(connection)
        turns, tokens = (sum(values) for values in zip(*done, strict=True))
        return _Found(
            turns,
            tokens,
            [
                TableBytes(
                    name, *((size - before) / turns for size, before in zip(after[name], sizes[name], strict=True))
                )
                for name in after
            ],
            logprob_bytes,
            grown.wal_bytes / turns,
            grown.commits / turns,
            base * 1000 / turns,
            own * 1000 / turns,
            free_wal_bytes / turns,
        )

    async def _session(self, server: ServerProcess, name: str, most: int | None) -> tuple[int, int]:
        """Turns taken, and the tokens of the context at the end."""
        conversation = Conversation(self._questions[:1], self._sim)
        tokens = 0
        async with await Connection.connect(server.base_url) as connection:
            await connection.json("POST", "/sessions", {"session_id": name})
            while tokens < self._arguments.context_tokens and (most is None or conversation.turns < most):
                reply, _ = await timed(connection, f"/sessions/{name}/v1/chat/completions", conversation.body())
                tokens = total_tokens(reply)
                question = self._questions[conversation.turns % len(self._questions)]
                conversation.answered(reply_message(reply), question)
        return conversation.turns, tokens


@contextlib.asynccontextmanager
async def _connection(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(plain_url(url))
    try:
        yield connection
    finally:
        await connection.close()


async def _sizes(connection: asyncpg.Connection) -> dict[str, tuple[int, int, int]]:
    """Bytes of each table's rows, TOAST and indexes."""
    return {row["name"]: (row["rows"], row["toast"], row["indexes"]) for row in await connection.fetch(_SIZES)}


async def _free(connection: asyncpg.Connection) -> int:
    """Take out all replay payloads, as the janitor does of closed sessions. Bytes of WAL that it took."""
    place = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
    await connection.execute("UPDATE chunks SET data = NULL WHERE data IS NOT NULL")
    await connection.execute("VACUUM chunks")
    written: int = await connection.fetchval("SELECT (pg_current_wal_insert_lsn() - $1::pg_lsn)::bigint", place)
    return written


async def _logprob_bytes(connection: asyncpg.Connection) -> float:
    """What a turn's facts would take more with logprobs of 32 random bits, as engines give them."""
    rng = np.random.default_rng(1)
    more: list[int] = []
    for (stored,) in await connection.fetch("SELECT facts FROM turns ORDER BY random() LIMIT $1", SAMPLED):
        facts = codec.unpack(stored, Facts)
        drawn = -rng.exponential(0.5, len(facts.logprobs) // 8).astype(np.float32)
        real = msgspec.structs.replace(facts, logprobs=drawn.astype("<f8").tobytes())
        more.append(len(codec.pack(real)) - len(stored))
    return sum(more) / len(more)
