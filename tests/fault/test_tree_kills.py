"""64 turns of one session in flight at once on two processes and PostgreSQL, one of which is killed meanwhile."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from integration.stand import until

from fault.agents import Agent, Body
from fault.processes import Processes, serving
from fault.table import Tally
from fault.test_several_processes import query
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "64 turns of one session at once on two processes, one of which is killed"
SESSION = "tree"
AT_ONCE = 64
WAVES = 4
START_S = 180


class Grower(Agent):
    """Goes on from any history that some client knows; a connection that breaks is asked for again."""

    def grow(self, histories: list[list[Body]]) -> None:
        self.session_id = SESSION
        self.messages = self.rng.choice(histories)
        self.say(f"{self.name} {self.requests}", sim={"completion_tokens": 4})

    def _ask(self, method: str, path: str, **fields: object) -> httpx.Response:
        try:
            return super()._ask(method, path, **fields)
        except httpx.TransportError:
            return httpx.Response(503)


class Wave:
    """Turns of all clients at once; `rest` waits for them."""

    def __init__(self, threads: ThreadPoolExecutor, growers: list[Grower], histories: list[list[Body]]) -> None:
        self._growers = growers
        self._histories = histories
        self._calls: list[Future[None]] = [threads.submit(one.grow, list(histories)) for one in growers]

    @property
    def answered(self) -> int:
        return sum(call.done() for call in self._calls)

    def rest(self) -> None:
        wait(self._calls)
        for call in self._calls:
            call.result()
        self._histories += [grower.messages for grower in self._growers]


@pytest.mark.fault(1, TITLE)
def test_every_turn_is_there_once(engine: SimulatorProcess, postgres_url: str, tmp_path: Path, tally: Tally) -> None:
    """In every other wave no generation ends before the process is dead; in the others replies are leaving."""
    rng = random.Random(16)
    histories: list[list[Body]] = [[]]
    with (
        serving(tmp_path, 2, postgres_url, engine.base_url) as processes,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        growers = [Grower(processes.urls, f"grower{number}", 16) for number in range(AT_ONCE)]
        growers[0].insist("POST", "/sessions", json={"session_id": SESSION, "history": "tree"})
        for grower in growers:
            grower.committed[SESSION] = set()
        for number in range(WAVES):
            httpx.post(f"{engine.base_url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
            try:
                wave = Wave(threads, growers, histories)
                until(lambda: query(postgres_url, "SELECT count(*) FROM open_turns") == AT_ONCE, START_S)
                if number % 2 == 0:
                    kill(processes, rng)
            finally:
                httpx.post(f"{engine.base_url}/continue_generation", json={}).raise_for_status()
            if number % 2:
                some = rng.randrange(1, AT_ONCE // 2)
                until(lambda wave=wave, some=some: wave.answered >= some, START_S)  # type: ignore[misc]
                kill(processes, rng)
            tally.tried += 1
            wave.rest()
        told = [turn for grower in growers for turn in grower.acknowledged]
        assert len({turn.turn for turn in told}) == len(told) == WAVES * AT_ONCE
        lines = httpx.get(f"{processes.urls[0]}/sessions/{SESSION}/events").text.splitlines()
        committed = [event for event in map(json.loads, lines) if event["type"] == "TurnCommitted"]
        tally.doubled += len(committed) - len(told)
        assert owners(processes.urls[0]) == {event["turn"]: event["output_tokens"] for event in committed}
        for grower in growers:
            grower.close()
    verified(postgres_url, told, tally)


def kill(processes: Processes, rng: random.Random) -> None:
    server = rng.choice(processes.servers)
    server.kill()
    server.start()


def owners(url: str) -> dict[int, int]:
    """By turn how many tokens of it are in a loss, in the rows of all branches."""
    found: dict[int, int] = {}
    for row in map(json.loads, httpx.get(f"{url}/export", params={"branches": "all"}, timeout=60).text.splitlines()):
        for span in row["turns"]:
            in_loss = sum(row["loss_mask"][span["output_start"] : span["end"]])
            if in_loss:
                found[span["turn"]] = found.get(span["turn"], 0) + in_loss
    return found
