"""Does a server keep only what it must? Memory, bytes written a turn and the database's size over long sessions.

A turn adds 10 KiB of routing payload to a reply that repeats all earlier rows: the profile of 1,000 tokens a turn
and 1 KiB a token at 1 %, as 16 tokens of 640 bytes, since a turn's template alone takes 10 tokens. `--full` is one
session at its real size, whose last reply has 50 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from ops.bench.client import Connection
from ops.bench.growth import stored_bytes
from ops.bench.latency import timed
from ops.bench.load import Conversation, Script, opening_messages, reply_message
from ops.bench.measure import report, table
from ops.bench.replies import add_place_arguments
from ops.bench.sampler import Sampler, Samples, family_pss, family_written
from ops.bench.sizes import KIB, MIB, Payload, script
from ops.bench.stand import Stand, stand
from ops.bench.targets import replay_environment

WARM_UP_TURNS = 5
WINDOW = 10
"""Turns around a place; what they write stands for it. A checkpoint writes for about as many."""

PLACES = (5, 25, 50, 100, 200)


USAGE_WITHIN = 4096
_TOTAL = re.compile(rb'"total_tokens": ?(\d+)')


class Profile(NamedTuple):
    """What a turn adds: so many tokens of output, and a question."""

    sessions: int
    payload: Payload
    completion_tokens: int
    question: bytes
    scale: str


def profile(arguments: argparse.Namespace) -> Profile:
    """At 1 %, or whole."""
    payload = Payload(asked=False)
    if arguments.full:
        return Profile(1, payload, 400, opening_messages(2950, seed=1)[0], "whole")
    small = msgspec.structs.replace(payload, layers=30)
    return Profile(arguments.sessions, small, 6, b'{"role":"user","content":"on"}', "1 %")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--full", action="store_true", help="one session at full size: the last reply has 50 MiB")
    add_place_arguments(parser)


async def main(arguments: argparse.Namespace) -> int:
    chosen = profile(arguments)
    environment = replay_environment()
    with stand(arguments.folder, environment=environment, dialect=arguments.dialect, spread=arguments.spread) as made:
        figures = await _measured(made, chosen, arguments.turns)
    figures["replay setting"] = environment.get("TURNLOG_REPLAY", "unknown to this server")
    table(figures["windows"])
    report("memory-full" if arguments.full else "memory", figures, hidden=("windows", "written by turn"))
    return 0


async def _measured(made: Stand, chosen: Profile, turns: int) -> dict[str, Any]:
    said = script(40, chosen.completion_tokens, chosen.payload)
    await _warm_up(made, said, chosen.question)
    async with contextlib.AsyncExitStack() as stack:
        lanes = [
            _Lane(
                await stack.enter_async_context(await Connection.connect(made.server.base_url)), f"lane-{number}", said
            )
            for number in range(chosen.sessions)
        ]
        for lane in lanes:
            await lane.create()
        pid = made.server.pid
        at_first, written, payloads = family_pss(pid), [family_written(pid)], list[float]()
        with Sampler(pid) as sampler:
            for _ in range(turns):
                await asyncio.gather(*(lane.turn(chosen.question) for lane in lanes))
                written.append(family_written(pid))
                payloads.append(sum((lane.tokens - 1) * chosen.payload.token_bytes for lane in lanes))
            samples = sampler.samples()
        at_last = family_pss(pid)
    return {
        "written by turn": [after - before for before, after in pairwise(written)],
        "windows": _windows(written, payloads, chosen.sessions),
        "scale": chosen.scale,
        "sessions": chosen.sessions,
        "turns a session": turns,
        "tokens of a session": lanes[0].tokens,
        **_memory(at_first, at_last, samples),
        **_disk(made, payloads),
    }


class _Lane:
    """One session; all take a turn at a time, so that what a turn writes can be told from the next."""

    def __init__(self, connection: Connection, name: str, said: Script) -> None:
        self._connection = connection
        self._name = name
        self._conversation: Conversation = said.begin()
        self.tokens = 0

    async def create(self) -> None:
        """Raises Broken."""
        await self._connection.json("POST", "/sessions", {"session_id": self._name})

    async def turn(self, question: bytes) -> None:
        """Raises Broken for anything but a 200."""
        path = f"/sessions/{self._name}/v1/chat/completions"
        reply, _ = await timed(self._connection, path, self._conversation.body())
        self._conversation.answered(reply_message(reply), question)
        self.tokens = total_tokens(reply)


def total_tokens(reply: bytes) -> int:
    """Tokens of prompt and output, from the `usage` at a reply's end."""
    found = _TOTAL.findall(reply, len(reply) - USAGE_WITHIN if len(reply) > USAGE_WITHIN else 0)
    return int(found[-1])


async def _warm_up(made: Stand, said: Script, question: bytes) -> None:
    """Some turns of another session: the process's own first-time costs are not what is measured."""
    async with await Connection.connect(made.server.base_url) as connection:
        lane = _Lane(connection, "warm", said)
        await lane.create()
        for _ in range(WARM_UP_TURNS):
            await lane.turn(question)


def _windows(written: list[int], payloads: list[float], sessions: int) -> list[dict[str, Any]]:
    """`written`: the counter before the first turn and after each."""
    turns = len(written) - 1
    rows = []
    for place in (place for place in PLACES if place <= turns):
        first = max(1, min(place - WINDOW // 2 + 1, turns - WINDOW + 1))
        last = min(first + WINDOW - 1, turns)
        share = (last - first + 1) * sessions
        rows.append(
            {
                "turns": f"{first}-{last}",
                "payload KiB a reply": sum(payloads[first - 1 : last]) / share / KIB,
                "written KiB a turn": (written[last] - written[first - 1]) / share / KIB,
            }
        )
    return rows


def _memory(before: int, after: int, samples: Samples) -> dict[str, float]:
    """`kept` is exact, `peak` by counters; both are growth since the warm-up."""
    return {
        "memory before MiB (PSS)": before / MIB,
        "memory kept MiB (PSS growth)": (after - before) / MIB,
        "memory peak MiB (growth, counters)": (samples.peak.total - samples.first.total) / MIB,
    }


def _disk(made: Stand, payloads: list[float]) -> dict[str, float]:
    """The database file as it is and with what the log file held; payloads as base64."""
    as_it_is = sum(path.stat().st_size for path in made.folder.glob("turnlog.db*"))
    stored = stored_bytes(made)
    return {
        "database MiB": stored / MIB,
        "database and log file MiB": as_it_is / MIB,
        "last turns' payloads MiB": payloads[-1] / MIB,
        "database / last payloads": stored / payloads[-1],
        "all turns' payloads MiB": sum(payloads) / MIB,
    }
