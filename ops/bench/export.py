"""Speed, CPU and memory of `/export` for each format on a full store."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from ops.bench.load import question_bytes
from ops.bench.measure import MIB, Figures, Peak, cpu_s, save_figures, stat, table
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, simulator, started
from ops.bench.stored import copy_up_to, play
from ops.server import ServerProcess

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

PLAYED = 2048
"""Number of different turns that all sessions have. It exceeds the rows of a Parquet row group; otherwise Parquet would
compress repetitions that only the benchmark has. The simulator's 8,191 logprobs come again in any case."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each turn: half new prompt, half output")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="formats and shapes to measure")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    with pinned(cpu_sets.others), folder_for_bench(arguments.folder) as folder:
        server = await _filled(folder, cpu_sets, arguments)
        rows = [await _export(server, form, arguments.sessions, cpu_sets) for form in arguments.forms]
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
