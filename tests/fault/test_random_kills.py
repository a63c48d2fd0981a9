"""`kill -9` at random moments under load, seen by many clients at once: `tests.tools.crash_rounds` as a test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fault.table import Tally
from tests.tools.crash_rounds.clients import Round
from tests.tools.crash_rounds.rounds import run

TITLE = "kill -9 at random under load"


def count(rounds: list[Round], tally: Tally) -> None:
    """What the rounds found, in the tally; what is neither a loss nor a double is asserted here."""
    *kills, last = rounds
    tally.tried += len(kills)
    for one in rounds:
        tally.acknowledged += one.acknowledged
        tally.lost += one.lost
        tally.doubled += one.twice
        if one.interrupted:
            tally.recovered(one.slowest_s)
    assert [(one.busy, one.stuck, one.problems) for one in rounds] == [(0, 0, 0)] * len(rounds)
    assert last.acknowledged > 0
    assert sum(one.interrupted for one in kills) > 0, "no turn was in flight at any kill"


@pytest.mark.fault(1, TITLE)
def test_the_only_process_many_times(tally: Tally, tmp_path: Path) -> None:
    count(asyncio.run(run(rounds=3, clients=16, seed=3, folder=tmp_path)), tally)


@pytest.mark.long
@pytest.mark.fault(1, TITLE)
def test_clients_of_token_ids(tally: Tally, tmp_path: Path) -> None:
    count(asyncio.run(run(rounds=3, clients=8, seed=5, folder=tmp_path, mode="tokens")), tally)


@pytest.mark.long
@pytest.mark.fault(1, TITLE)
def test_one_of_several_processes_many_times(tally: Tally, tmp_path: Path, postgres_url: str) -> None:
    rounds = run(rounds=2, clients=24, seed=4, folder=tmp_path, database_url=postgres_url, processes=3)
    count(asyncio.run(rounds), tally)
