"""`kill -9` at random moments under load, seen by many clients at once: `tests.tools.crash_rounds` as a test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from fault.table import Tally
from tests.tools.crash_rounds.rounds import run


class Kills(NamedTuple):
    """So many kills under clients of a mode, of the only process on SQLite or of one of several on PostgreSQL; `told`
    is a line of the tool that shows that kills met what the mode is about."""

    mode: str
    kills: int
    clients: int
    processes: int = 1
    told: str = ""


TABLE = (
    Kills("plain", 3, 16),
    Kills("plain", 2, 24, processes=3),
    Kills("payloads", 3, 8),
    Kills("tokens", 3, 8),
    Kills("mid-stream", 3, 12, told="streams that were cut behind their first bytes"),
    Kills("staging", 3, 12, told="turns that were staged"),
)


@pytest.mark.fault(1, "kill -9 at random under load")
@pytest.mark.parametrize(
    "kills",
    [TABLE[0], *(pytest.param(one, marks=pytest.mark.long) for one in TABLE[1:])],
    ids=lambda one: f"{one.mode}-{one.processes}",
)
def test_no_turn_is_lost_or_taken_twice(
    kills: Kills,
    tally: Tally,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url: str | None = request.getfixturevalue("postgres_url") if kills.processes > 1 else None
    work = run(
        rounds=kills.kills,
        clients=kills.clients,
        seed=3,
        folder=tmp_path,
        database_url=url,
        processes=kills.processes,
        mode=kills.mode,
    )
    *rounds, last = asyncio.run(work)
    tally.tried += len(rounds)
    for one in (*rounds, last):
        tally.acknowledged += one.acknowledged
        tally.lost += one.lost
        tally.doubled += one.twice
        if one.interrupted:
            tally.recovered(one.slowest_s)
    assert [(one.busy, one.stuck, one.problems) for one in (*rounds, last)] == [(0, 0, 0)] * (len(rounds) + 1)
    assert last.acknowledged > 0
    assert sum(one.interrupted for one in rounds) > 0, "no turn was in flight at any kill"
    assert kills.told in capsys.readouterr().out
