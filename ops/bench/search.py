"""The search: ten queries over a filled store, the index's size and time, and CPU of a turn with and without it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import msgspec

from app.sessions.indexer import Indexer
from app.sessions.log_end import LogEnd
from app.sessions.search import Search
from app.store import reads
from app.store.engine import Database
from app.store.heads_view import HeadFilter
from app.store.search.reading import EntryFilter
from app.store.search.writing import entry_count
from app.store.writer import Writer
from ops.bench.measure import percentile, save_figures, table
from ops.bench.primary import primary
from ops.bench.sessions import Script, short_turns
from ops.bench.sizes import MIB
from ops.bench.stand import Side, cores, folder_for_bench, simulator, turnlog
from ops.bench.stored import StoredTurn, write_sessions
from ops.server import ServerProcess
from workers.codec import Facts, Wire

WORDS = 30_000
"""Words of the vocabulary; the n-th is 1 / n as frequent as the first, as in a language."""

POOL = 20_000
"""Different turns of which the sessions are composed."""

TIMES = 5
"""How often each query is asked."""

TOOLS = ("bash", "read", "write", "browse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=10, help="turns of each session, of two messages each")
    parser.add_argument("--words", type=int, default=40, help="words of a message")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6, help="periods of each side, for the CPU of a turn; 0: none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each period")


async def main(arguments: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        url = stack.enter_context(primary(folder)).new_database() if arguments.postgres else None
        server = ServerProcess(folder, database_url=url).migrate()
        database = Database(server.environment["TURNLOG_DATABASE_URL"])
        await database.open()
        try:
            filled, queries = await _filled(database, arguments)
        finally:
            await database.close()
    figures: dict[str, Any] = {"index": filled, "queries": queries}
    if arguments.rounds:
        figures["turns"] = await _turns(arguments)
        table(figures["turns"])
    save_figures("search", figures)
    return 0


async def _filled(database: Database, arguments: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Fill the store and its index, and ask."""
    text = _Text(arguments.words)
    began = time.perf_counter()
    sessions = text.sessions(arguments.sessions, arguments.turns)
    await write_sessions(database, sessions, b'{"model":"simulator"}', ended=True)
    filled_s, size = time.perf_counter() - began, await database.read(reads.database_bytes)
    writer, log_end = Writer(database), LogEnd(database, 0.0)
    writer.start()
    cpu, began = time.process_time(), time.perf_counter()
    await Indexer(database, writer, log_end, lambda: 1, rest=0.0).catch_up()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    entries = await database.read(entry_count)
    whole = await database.read(reads.database_bytes)
    index = [
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
    table(index)
    found = [await _asked(Search(database, log_end), name, *query) for name, query in text.queries().items()]
    table(found)
    await writer.stop()
    return index, found


async def _asked(search: Search, name: str, q: str | None, wanted: EntryFilter) -> dict[str, Any]:
    took: list[float] = []
    for _ in range(TIMES):
        began = time.perf_counter()
        page = await search.page(q, wanted, HeadFilter(), None, 20)
        took.append((time.perf_counter() - began) * 1000)
    return {
        "query": name,
        "hits": f"{len(page.hits)}{'+' if page.next_cursor else ''}",
        "p50 ms": percentile(took, 50),
        "first ms": took[0],
        "most ms": max(took),
    }


class _Text:
    """Generated messages: the same for the same numbers."""

    def __init__(self, words: int) -> None:
        self._chance = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._chance.choices(letters, k=self._chance.randint(3, 10))) for _ in range(WORDS)]
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, WORDS + 1)))
        self._length = words

    def queries(self) -> dict[str, tuple[str | None, EntryFilter]]:
        """Name, text and fields."""
        often, some, seldom = self._words[0], self._words[300], self._words[-1]
        anything = EntryFilter()
        return {
            "the most frequent word": (often, anything),
            "a word of every 80th message": (some, anything),
            "a rare word": (seldom, anything),
            "a word of one session": ("session7x", anything),
            "a word that is nowhere": ("nowhereatall", anything),
            "two words": (f"{some} {self._words[200]}", anything),
            "a phrase": (f'"{often} {self._words[1]}"', anything),
            "one of two, without a third": (f"{some} OR {seldom} -{self._words[3]}", anything),
            "a word in tool results": (some, EntryFilter(role="tool")),
            "calls of a tool": (None, EntryFilter(tool="browse", role="assistant")),
        }

    def sessions(self, count: int, turns: int) -> Iterator[tuple[str, Sequence[StoredTurn]]]:
        """Each begins with a turn that names it; the others come from the pool."""
        pool = [self._turn(number) for number in range(min(POOL, count * turns))]
        for number in range(count):
            first = self._turn(number, f"session{number}x ")
            yield f"filled-{number}", [first, *self._chance.choices(pool, k=turns - 1)]

    def _turn(self, number: int, name: str = "") -> StoredTurn:
        tool = TOOLS[number % len(TOOLS)]
        question = {"role": "user", "content": name + self._said()}
        if not name:
            question = {"role": "tool", "name": tool, "tool_call_id": "c", "content": self._said()}
        call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": '{"path": "a.py"}'}}
        answer = msgspec.json.encode({"role": "assistant", "content": self._said(), "tool_calls": [call]})
        reply = b'{"choices":[{"message":' + answer + b"}]}"
        facts = Facts(bytes(4 * 100), bytes(4 * 60), bytes(8 * 60))
        return StoredTurn.of(facts, Wire([msgspec.json.encode(question)], answer, reply, []))

    def _said(self) -> str:
        return " ".join(self._chance.choices(self._words, cum_weights=self._weights, k=self._length))


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
