"""The calculator of docs/scale.md: round numbers in, sums that can be done by hand out."""

from __future__ import annotations

import pytest

from ops.bench.weights import TableBytes, Weights
from ops.scale import PAGE_BYTES, PAGES_A_SESSION, Fleet, Machine, demand, lines, most_turns_s

WEIGHTS = Weights(
    context_tokens=1000,
    new_tokens=60.0,
    output_tokens=40.0,
    turns=10,
    tables=[TableBytes("turns", rows=100.0, toast=700.0, indexes=100.0), TableBytes("events", 80.0, 0.0, 20.0)],
    logprob_bytes=0.0,
    wal_bytes=1500.0,
    commits=2.0,
    database_ms=1.0,
    server_ms=3.0,
    raw_bytes=768.0,
    replay_bytes=10.0,
    replay_wal_bytes=12.0,
    free_wal_bytes=14.0,
)
"""Ten turns of 100 tokens fill a context; a turn stores 1000 bytes."""

FLEET = Fleet(sessions=3600, turns_per_hour=10.0, kept_days=2.0, replay_kept_h=12.0, checkpoint_min=15.0)
"""Ten turns a second."""

DAY_TURNS = 864_000


def test_a_fleet_asks_what_its_turns_add_up_to() -> None:
    asked = demand(WEIGHTS, FLEET)
    assert (asked.turns_s, asked.tokens_s, asked.sessions_day) == (10, 1000, DAY_TURNS / 10)
    assert (asked.stored_day, asked.index_day, asked.wal_day) == (
        DAY_TURNS * 1000,
        DAY_TURNS * 120,
        DAY_TURNS * 1500,
    )
    assert asked.live == 3600 * 10_000 / 2
    assert asked.kept == pytest.approx(2 * asked.stored_day)
    assert (asked.database_cores, asked.server_cores) == (0.01, 0.03)


def test_a_payload_is_kept_until_its_time_and_dies_whole() -> None:
    asked = demand(WEIGHTS, FLEET)
    assert asked.live_replay == 3600 * 1000 * 10 / 2
    assert asked.replay_dead_day == DAY_TURNS * 100 * 10
    assert asked.kept_replay == asked.replay_dead_day / 2
    assert asked.replay_wal_day == DAY_TURNS * 100 * 12
    assert asked.replay_free_wal_day == DAY_TURNS * 100 * 14


def test_no_page_is_written_whole_more_often_than_it_is_touched() -> None:
    """A session without a turn between two checkpoints has no page in the WAL."""
    busy = demand(WEIGHTS, FLEET)
    assert busy.full_pages_day == 96 * 3600 * PAGES_A_SESSION * PAGE_BYTES
    idle = demand(WEIGHTS, Fleet(3600, 1.0, 2.0, 12.0, 15.0))
    assert idle.full_pages_day == 96 * 900 * PAGES_A_SESSION * PAGE_BYTES


def test_the_resource_that_ends_first_is_named() -> None:
    machine = Machine(cores=4.0, share=0.5, disk_mib_s=10.0)
    ends = most_turns_s(WEIGHTS, machine, replay=False)
    assert ends == {"CPU": 2000.0, "disk": pytest.approx(5 * 2**20 / 2500)}
    with_payloads = most_turns_s(WEIGHTS, machine, replay=True)
    assert with_payloads["disk"] == pytest.approx(5 * 2**20 / (2500 + 100 * (12 + 14 + 20)))
    assert lines(WEIGHTS, FLEET, machine, replay=True)[-1][1].endswith("(disk ends first)")
