"""The search: queries over a filled store, the index's size and time, and CPU of a turn with and without it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from app.sessions.indexer import Indexer
from app.sessions.log_end import LogEnd
from app.sessions.search import Search
from app.store import group_reads, reads
from app.store.engine import Database
from app.store.search.writing import entry_count
from app.store.writer import Writer
from ops.bench.measure import percentile, save_figures, table
from ops.bench.primary import primary
from ops.bench.search_texts import Asked, Texts
from ops.bench.sessions import Script, short_turns
from ops.bench.sizes import MIB
from ops.bench.stand import Side, cores, folder_for_bench, simulator, turnlog
from ops.bench.stored import write_sessions
from ops.server import ServerProcess

PAGE = 20
"""Hits of a page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=100_000, help="0: no queries")
    parser.add_argument("--turns", type=int, default=10, help="turns of each session, of two messages each")
    parser.add_argument("--words", type=int, default=40, help="words of a message")
    parser.add_argument("--times", type=int, default=100, help="how often each query is asked")
    parser.add_argument("--store", type=Path, help="folder of an SQLite store that is kept, and used again")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6, help="periods of each side, for the CPU of a turn; 0: none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each period")


async def main(arguments: argparse.Namespace) -> int:
    figures: dict[str, Any] = {}
    if arguments.sessions:
        with contextlib.ExitStack() as stack:
            folder = arguments.store or stack.enter_context(folder_for_bench(arguments.folder))
            folder.mkdir(parents=True, exist_ok=True)
            url = stack.enter_context(primary(arguments.folder)).new_database() if arguments.postgres else None
            figures |= await _searched(ServerProcess(folder, database_url=url).migrate(), arguments)
    if arguments.rounds:
        figures["turns"] = await _turns(arguments)
        table(figures["turns"])
    save_figures("search", figures)
    return 0


async def _searched(server: ServerProcess, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fill the store and its index where they are not, and ask."""
    database = Database(server.environment["TURNLOG_DATABASE_URL"])
    await database.open()
    writer, log_end = Writer(database), LogEnd(database, 0.0)
    writer.start()
    texts = Texts(arguments.words)
    figures: dict[str, Any] = {}
    try:
        if not await database.read(entry_count):
            figures["index"] = await _filled(
                database, Indexer(database, writer, log_end, lambda: 1, rest=0.0), texts, arguments
            )
            table(figures["index"])
        search = Search(database, log_end, group_reads.newest_version)
        figures["queries"] = await _asked(search, texts.queries(), arguments.times)
        table(figures["queries"])
    finally:
        await writer.stop()
        await database.close()
    return figures


async def _filled(
    database: Database, indexer: Indexer, texts: Texts, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    began = time.perf_counter()
    sessions = texts.sessions(arguments.sessions, arguments.turns)
    await write_sessions(database, sessions, b'{"model":"simulator"}', ended=True)
    filled_s, size = time.perf_counter() - began, await database.read(reads.database_bytes)
    print(f"{arguments.sessions} sessions written in {filled_s:.0f} s", flush=True)
    cpu, began = time.process_time(), time.perf_counter()
    await indexer.catch_up()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    entries = await database.read(entry_count)
    whole = await database.read(reads.database_bytes)
    return [
        {
            "messages": entries,
            "store MiB": size / MIB,
            "index MiB": (whole - size) / MIB,
            "index / store": (whole - size) / size,
            "bytes a message": (whole - size) / entries,
            "filled in s": filled_s,
            "indexed in s": seconds,
            "messages/s": entries / seconds,
            "CPU us a message": cpu * 1e6 / entries,
        }
    ]


async def _asked(search: Search, queries: Mapping[str, Asked], times: int) -> list[dict[str, Any]]:
    """All queries once, then all again, and so on: each finds the database's memory as the others have left it."""
    took: dict[str, list[float]] = {name: [] for name in queries}
    hits: dict[str, str] = {}
    for _ in range(times):
        for name, asked in queries.items():
            began = time.perf_counter()
            page = await search.page(*asked, None, PAGE)
            took[name].append((time.perf_counter() - began) * 1000)
            hits[name] = f"{len(page.hits)}{'+' if page.next_cursor else ''}"
    return [
        {
            "query": name,
            "hits": hits[name],
            "first ms": found[0],
            "p50 ms": percentile(found, 50),
            "p99 ms": percentile(found, 99),
        }
        for name, found in took.items()
    ]


async def _turns(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """CPU of a turn without an index and with one, the time included in which the index catches up."""
    cpu_sets = cores()
    found: dict[str, list[float]] = {"off": [], "on": []}
    latencies: dict[str, list[float]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(simulator(cpu_sets))
        script = short_turns(2048, 8)
        sides: dict[str, tuple[ServerProcess, Side]] = {}
        for setting in found:
            environment = {"TURNLOG_SEARCH": setting}
            server = stack.enter_context(turnlog(engine, cpu_sets, arguments.folder, environment))
            sides[setting] = server, await _side(server, script, arguments.clients).warm_up()
        for _ in range(arguments.rounds):
            for setting, (server, side) in sides.items():
                await side.create_ahead(arguments.seconds)
                await _caught_up(server, setting)
                before = side.cpu_s()
                period = await side.run_period(arguments.seconds)
                await _caught_up(server, setting)
                found[setting].append((side.cpu_s() - before) * 1000 / period.turns)
                latencies[setting].append(percentile(period.latencies, 99) * 1000)
    own = percentile(found["off"], 50)
    return [
        {
            "search": setting,
            "CPU ms a turn": percentile(costs, 50),
            "over off": percentile([on / off for on, off in zip(costs, found["off"], strict=True)], 50),
            "lowest": min(costs) / own,
            "highest": max(costs) / own,
            "p99 ms": percentile(latencies[setting], 50),
        }
        for setting, costs in found.items()
    ]


def _side(server: ServerProcess, script: Script, clients: int) -> Side:
    return Side([server], script, clients=clients, turns_per_session=8)


async def _caught_up(server: ServerProcess, setting: str) -> None:
    if setting == "off":
        return
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{server.base_url}/search", params={"q": "x", "limit": 1}) as response:
                if (await response.json())["is_current"]:
                    return
            await asyncio.sleep(0.5)
