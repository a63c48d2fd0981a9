"""What a session's staying with its engine is worth: hits in the engines' prefix caches, and the prefill they spare.

Agents of a few tasks, several attempts each, talk through one server to several simulated engines, whose caches hold
some more than the engines' shares of all sessions. Without affinity every turn is placed anew: the binding lasts no
time (`TURNLOG_AFFINITY_TTL_S`). In the third run an engine is killed when half of the turns are done. An agent whose
turn an engine's death has cut off sends it again, marked as a retry.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ops.bench.client import Broken, Connection
from ops.bench.load import Conversation, error_code, opening_messages, reply_message
from ops.bench.measure import keep, percentile, table
from ops.bench.stand import folder_for_bench
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

ATTEMPTS = 8
"""Sessions of one task, which begin with the same prompt."""

RULES_BYTES = 2048
"""Of the messages that all sessions begin with."""

TASK_BYTES = 1024
RESULT_BYTES = 512
"""Of what an agent adds in a turn, a tool's result say."""

SIM = b'{"completion_tokens":60,"tool_calls":false,"reasoning":false}'
AT_ONCE = 64
"""Turns in flight: the others' agents wait for their tools."""

AGAIN_S = 0.2
TRIES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--room", type=float, default=1.25, help="what the caches hold, by the sessions' tokens")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="of a generation without its prefill")
    parser.add_argument("--prefill-us-per-token", type=float, default=50.0)
    parser.add_argument("--quick", action="store_true", help="a fifth of the sessions, half of the turns")


class _Scenario(NamedTuple):
    name: str
    environment: dict[str, str]
    is_one_lost: bool = False


SCENARIOS = (
    _Scenario("with affinity", {}),
    _Scenario("without", {"TURNLOG_AFFINITY_TTL_S": "0.000001"}),
    _Scenario("with, one engine lost", {}, is_one_lost=True),
)


async def main(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        arguments.sessions, arguments.turns = arguments.sessions // 5, arguments.turns // 2
    rows = [await _measured(scenario, arguments) for scenario in SCENARIOS]
    table(rows)
    print(f"written to {keep('prefix', rows)}")
    return 1 if any(row["turns"] != arguments.sessions * arguments.turns for row in rows) else 0


async def _measured(scenario: _Scenario, arguments: argparse.Namespace) -> dict[str, Any]:
    with _stand(scenario, arguments) as (server, engines):
        crowd = _Crowd(server.base_url, arguments)
        await crowd.create()
        half = await crowd.upto(arguments.turns // 2)
        if scenario.is_one_lost:
            killed = asyncio.get_running_loop().call_later(half / 4, engines[0].kill)
            await crowd.upto(arguments.turns)
            assert killed.when() < asyncio.get_running_loop().time()
        else:
            await crowd.upto(arguments.turns)
        placed = await crowd.engines()
    turns = [turn for one in crowd.done for turn in one]
    later = [turn for one in crowd.done for turn in one[arguments.turns // 2 :]]
    return {
        "engines": scenario.name,
        "turns": len(turns),
        "tokens a prompt": sum(turn.prompt for turn in turns) / len(turns),
        "prefilled": sum(turn.prompt - turn.cached for turn in turns) / len(turns),
        "hit rate": _rate(turns),
        "hit rate, 2nd half": _rate(later),
        "engines a session": sum(len(set(one)) for one in placed) / len(placed),
        "moves a session": sum(len(one) - 1 for one in placed) / len(placed),
        "p50 ms": percentile([turn.seconds for turn in turns], 50) * 1000,
        "sent again": crowd.sent_again,
    }


def _rate(turns: list[_Turn]) -> float:
    return sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)


@contextlib.contextmanager
def _stand(
    scenario: _Scenario, arguments: argparse.Namespace
) -> Iterator[tuple[ServerProcess, list[SimulatorProcess]]]:
    tokens = arguments.sessions * _session_tokens(arguments.turns)
    options = {
        "--cache-tokens": int(tokens * arguments.room / arguments.engines),
        "--latency-ms": arguments.latency_ms,
        "--prefill-us-per-token": arguments.prefill_us_per_token,
        "--reasoning": 0,
    }
    with folder_for_bench() as folder, contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(SimulatorProcess(*(str(part) for pair in options.items() for part in pair)))
            for _ in range(arguments.engines)
        ]
        server = ServerProcess(
            folder, upstreams=[engine.base_url for engine in engines], environment=scenario.environment
        )
        yield stack.enter_context(server), engines


BYTES_A_TOKEN = 5.2
"""Of the words in the messages, with the space between them."""


def _session_tokens(turns: int) -> int:
    """About how many tokens a session has at its end that no other has."""
    return int((TASK_BYTES / ATTEMPTS + turns * RESULT_BYTES) / BYTES_A_TOKEN) + turns * 70


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details


class _Reply(msgspec.Struct):
    usage: _Usage


class _Event(msgspec.Struct):
    type: str
    engine: str = ""


_decode_events = msgspec.json.Decoder(_Event).decode_lines


class _Turn(NamedTuple):
    prompt: int
    cached: int
    seconds: float


class _Crowd:
    """The agents. `done` has each one's turns."""

    def __init__(self, base_url: str, arguments: argparse.Namespace) -> None:
        self.done: list[list[_Turn]] = [[] for _ in range(arguments.sessions)]
        self.sent_again = 0
        self._base_url = base_url
        self._run = os.urandom(4).hex()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._rng = random.Random(1)
        rules = opening_messages(RULES_BYTES)
        self._agents = [
            Conversation([*rules, *opening_messages(TASK_BYTES, seed=number // ATTEMPTS + 1)], SIM)
            for number in range(arguments.sessions)
        ]

    def _name(self, number: int) -> str:
        return f"prefix-{self._run}-{number}"

    async def create(self) -> None:
        async with await Connection.connect(self._base_url) as connection:
            for number in range(len(self._agents)):
                await connection.json("POST", "/sessions", {"session_id": self._name(number)})

    async def upto(self, turns: int) -> float:
        """Every agent until it has so many turns, each in its own time; the seconds that took."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._agents)):
                group.create_task(self._agent(number, turns))
        return asyncio.get_running_loop().time() - began

    async def _agent(self, number: int, turns: int) -> None:
        async with await Connection.connect(self._base_url) as connection:
            while len(self.done[number]) < turns:
                async with self._at_once:
                    await self._turn(connection, number)
                await asyncio.sleep(self._rng.uniform(0.0, 0.1))

    async def _turn(self, connection: Connection, number: int) -> None:
        agent = self._agents[number]
        began = time.perf_counter()
        reply = await self._reply(connection, self._name(number), agent)
        seconds = time.perf_counter() - began
        usage = msgspec.json.decode(reply, type=_Reply).usage
        self.done[number].append(_Turn(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, seconds))
        result = opening_messages(RESULT_BYTES, seed=self._rng.getrandbits(32))
        agent.answered(reply_message(reply), result[0])

    async def _reply(self, connection: Connection, name: str, agent: Conversation) -> bytes:
        """Raises Broken where the turn fails again and again."""
        key = f"idempotency-key: {name}-{agent.turns}\r\n"
        for _ in range(TRIES):
            response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", agent.body(), key)
            if response.status == 200:
                return response.body
            self.sent_again += 1
            await asyncio.sleep(AGAIN_S)
        raise Broken(f"{name} answered {response.status} ({error_code(response.body)}) {TRIES} times")

    async def engines(self) -> list[list[str]]:
        """The engines that each session has been bound to, in order."""
        found = []
        async with aiohttp.ClientSession(self._base_url, raise_for_status=True) as http:
            for number in range(len(self._agents)):
                async with http.get(f"/sessions/{self._name(number)}/events") as response:
                    events = _decode_events(await response.read())
                found.append([event.engine for event in events if event.type == "AffinityBound"])
        return found
