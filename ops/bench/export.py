"""Speed, CPU and memory of `/export` for each format on a full store, or (`--long`) of one long row in each shape."""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import numpy as np

from app.export import jsontext
from ops.bench.client import Connection
from ops.bench.load import open_session, question_bytes
from ops.bench.measure import MIB, Figures, Peak, cpu_s, percentile, save_figures, stat, table
from ops.bench.real.conversation import WIRES, Conversation
from ops.bench.real.material import Material
from ops.bench.real.play import Talk
from ops.bench.real.stand import BASE, NEW, SAMPLED, engine_process
from ops.bench.stand import Cores, asking, cores, folder_for_bench, pinned, simulator, started
from ops.bench.stored import copy_up_to, play
from ops.server import ServerProcess
from workers import codec

FORMS = (
    "ndjson turnlog",
    "parquet turnlog",
    "safetensors turnlog",
    "msgpack turnlog",
    "ndjson slime",
    "parquet slime",
    "ndjson trl",
    "parquet trl",
)

SHAPES = ("turnlog", "slime", "miles", "trl", "trl-async", "verl", "skyrl", "areal", "xtuner", "tree")
GROUPED = ("tinker", "prime-rl", "atropos")
PROMPTS_REPEATED = ("openenv", "rllm")
"""Their rows have the whole prompt of each generation."""

LONG_FORMS = (
    *(f"ndjson {shape}" for shape in (*SHAPES, *GROUPED, *PROMPTS_REPEATED)),
    *(f"{format} {shape}" for format in ("parquet", "safetensors", "msgpack") for shape in ("turnlog", "slime")),
    "messages turnlog",
    "atif turnlog",
)
LONG_TURNS = 502
FORKS = 16
ROUNDS = 5
LONG_S = 2.0
"""An export that takes longer is measured once."""

PLAYED = 2048
"""Number of different turns that all sessions have. It exceeds the rows of a Parquet row group; otherwise Parquet would
compress repetitions that only the benchmark has. The simulator's 8,191 logprobs come again in any case."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each turn: half new prompt, half output")
    every = dict.fromkeys((*FORMS, *LONG_FORMS))
    parser.add_argument("--forms", nargs="+", choices=every, help="formats and shapes to measure")
    parser.add_argument("--long", action="store_true", help=f"one row of {LONG_TURNS} turns, 517,000 tokens, instead")


async def main(arguments: argparse.Namespace) -> int:
    if arguments.long:
        return await _long(arguments)
    cpu_sets = cores()
    with pinned(cpu_sets.others), folder_for_bench(arguments.folder) as folder:
        server = await _filled(folder, cpu_sets, arguments)
        rows = [await _export(server, form, arguments.sessions, cpu_sets) for form in arguments.forms or FORMS]
    table(rows)
    save_figures(f"export-{arguments.sessions}x{arguments.turns}x{arguments.tokens}", rows)
    return 0


async def _filled(folder: Path, cpu_sets: Cores, arguments: argparse.Namespace) -> ServerProcess:
    """A server with a full store in the folder."""
    half = arguments.tokens // 2
    size = question_bytes(half)
    sim = msgspec.json.encode({"completion_tokens": half, "tool_calls": False, "reasoning": False})
    played = min(-(-PLAYED // arguments.turns), arguments.sessions)
    with simulator(cpu_sets) as engine:
        server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
        with started(server, cpu_sets):
            await play(server.base_url, played, arguments.turns, question_bytes=size, sim=sim, ended=True)
    copy_up_to(server.database_path, arguments.sessions)
    return ServerProcess(folder)


async def _export(server: ServerProcess, form: str, count: int, cpu_sets: Cores) -> Figures:
    """Measure one export by a new server. MB are 10^6 bytes of output."""
    format, shape = form.split()
    with started(server, cpu_sets):
        await download(server, format=format, shape=shape, limit="1")
        cpu = _cpu_s(server.pid)
        with Peak(server.pid) as peak:
            began = time.perf_counter()
            downloaded = await download(server, format=format, shape=shape)
            seconds = time.perf_counter() - began
        cpu = _cpu_s(server.pid) - cpu
    if format == "ndjson" and downloaded.lines != count:
        raise Incomplete(f"{form}: {downloaded.lines} rows of {count} sessions")
    return {
        "form": form,
        "rows/s": count / seconds,
        "seconds": seconds,
        "output MB/s": downloaded.size / seconds / 1e6,
        "CPU us a row": cpu / count * 1e6,
        "peak MiB": peak.most / MIB,
        "before MiB": peak.before / MIB,
    }


async def _long(arguments: argparse.Namespace) -> int:
    """One long row in each shape, alone and behind forks of a session as long, of which no token is in the loss."""
    cpu_sets = cores()
    with pinned(cpu_sets.others), folder_for_bench(arguments.folder) as folder:
        with engine_process(folder, "sglang", "code", spaced=False) as engine:
            settings = {"TURNLOG_UPSTREAM_DIALECT": "sglang"}
            server = ServerProcess(folder, upstreams=[engine.base_url], environment=settings).migrate()
            with started(server, cpu_sets):
                for number, name in enumerate(("source", "long"), 1):
                    await _played(server.base_url, number, name)
        rows = [{"form": "floor of ndjson turnlog", "ms": None, "CPU ms": _floor_ms(server), "output MB": None}]
        rows[0] |= {"/health max ms": None, "peak MiB": None}
        with started(server, cpu_sets):
            await download(server, format="parquet", limit="1")
            rows += [await _long_row(server, form, session_id="long") for form in arguments.forms or LONG_FORMS]
            rows.append(await _long_row(server, "ndjson slime", f"ndjson slime behind {FORKS} forks", limit="1"))
    print("export of one 517k row, each shape")
    table(rows)
    save_figures("export-long", rows)
    return 0


async def _played(base_url: str, number: int, name: str) -> None:
    """A session of so many turns; the first is forked at its end, before the second begins."""
    opens = partial(open_session, history="tree", group_id=name)
    conversation = Conversation(number, BASE, Material("code", False), WIRES["chat"])
    talk = await Talk.begin(base_url, opens, name, conversation)
    for _ in range(LONG_TURNS):
        await talk.turn(NEW, SAMPLED, calls=True)
    talk.close()
    async with await Connection.connect(base_url) as connection:
        await connection.json("PUT", f"/sessions/{name}/reward", {"reward": 1.0})
        if name == "source":
            await connection.json("POST", f"/sessions/{name}/fork", {"turn": LONG_TURNS, "count": FORKS})
            await connection.request("DELETE", f"/sessions/{name}?erase=true")


def _floor_ms(server: ServerProcess) -> float:
    """CPU of what a row's bytes cost at least: to read, check and unpack its turns, and to write the arrays."""
    with closing(sqlite3.connect(server.database_path)) as connection:
        began = time.process_time()
        tokens: list[codec.StoredTokens] = []
        for frames in connection.execute("SELECT tokens, exchange FROM turns WHERE session_id = 'long' ORDER BY turn"):
            codec.content_hash(*frames)
            codec.unpack_messages(frames[1])
            tokens.append(codec.unpack_tokens(*frames))
        ids = np.frombuffer(b"".join(part for turn in tokens for part in (turn.suffix_ids, turn.output_ids)), "<i4")
        logprobs = np.frombuffer(b"".join(turn.logprobs for turn in tokens), "<f8")
        prompts = np.zeros(len(ids) - len(logprobs))
        masks, versions = np.zeros((2, len(ids)), np.uint8), np.zeros(len(ids), np.int64)
        jsontext.encode([ids, logprobs, prompts, masks, versions])
        return (time.process_time() - began) * 1000


async def _long_row(server: ServerProcess, form: str, name: str | None = None, **query: str) -> Figures:
    """Medians, but for the slowest answer of /health beside any of the exports."""
    format, shape = form.split()
    query |= {"format": format, "shape": shape} | ({"advantage": "grpo"} if shape in GROUPED else {})
    ms, cpu_ms, health, size = list[float](), list[float](), list[float](), 0
    with Peak(server.pid) as peak:
        while len(ms) < ROUNDS and (not ms or ms[0] < LONG_S * 1000):
            cpu, began = _cpu_s(server.pid), time.perf_counter()
            async with asking(server.base_url) as times:
                size = (await download(server, **query)).size
            ms.append((time.perf_counter() - began) * 1000)
            cpu_ms.append((_cpu_s(server.pid) - cpu) * 1000)
            health.append(percentile(times, 100) * 1000)
    median = statistics.median
    figures = {"form": name or form, "ms": median(ms), "CPU ms": median(cpu_ms), "output MB": size / 1e6}
    return {**figures, "/health max ms": max(health), "peak MiB": peak.most / MIB}


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, those that have ended too."""
    fields = stat(pid)
    return cpu_s(pid) + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Incomplete(Exception):
    """An export did not contain everything."""


class Downloaded(NamedTuple):
    size: int
    lines: int  # of NDJSON


async def download(server: ServerProcess, **query: str) -> Downloaded:
    """Read an export and discard it. Raises aiohttp.ClientError if it ends early."""
    size = lines = 0
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as session,
        session.get(f"{server.base_url}/export", params=query, raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            size += len(piece)
            lines += piece.count(b"\n")
    return Downloaded(size, lines)
