"""The calculator: round numbers in, sums that can be done by hand out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops import scale

MIB = 1 << 20
COSTS = scale.Costs(
    session_rows=1000.0,
    session_indexes=500.0,
    turn_rows=100.0,
    turn_indexes=50.0,
    chunk_rows=20.0,
    chunk_indexes=10.0,
    content=10.0,
    content_new_token=1.0,
    content_output_token=2.0,
    toast=1.5,
    wal_session=2048.0,
    wal_turn=1024.0,
    wal_content=2.0,
    chunk_in_object=4.0,
    export_bytes_a_token=16.0,
    cached_session=1000.0,
    cached_turn=100.0,
    cached_token=1.0,
    server_ms=2.0,
    miss_server_ms=4.0,
    database_ms=1.0,
    miss_database_ms=2.0,
    p99_ms=10.0,
    miss_p99_ms=30.0,
)
FLEET = scale.Fleet(sessions=1 << 20, turns=2, new_tokens=90, output_tokens=50, load_turns=0)
"""200 bytes of content a turn."""


def test_bytes_are_added_up() -> None:
    found = scale.predict(msgspec.structs.replace(FLEET, load_turns=1), COSTS)
    assert found["of it indexes MiB"] == 500 + 2 * 50
    assert found["database MiB"] == 1000 + 2 * (100 + 200 * 1.5) + 600
    assert found["filling: WAL KiB a turn"] == pytest.approx(1 + 1 + 400 / 1024)
    assert found["bucket MiB"] == 0


def test_payloads_have_rows_in_the_database_and_bytes_in_the_bucket() -> None:
    with_payloads = scale.Fleet(1 << 20, 2, 90, 50, payload_bytes=8, load_turns=1)
    found, without = (
        scale.predict(fleet, COSTS) for fleet in (with_payloads, scale.Fleet(1 << 20, 2, 90, 50, load_turns=1))
    )
    assert found["bucket MiB"] == 280 * 8 + 2 * 4
    assert found["database MiB"] - without["database MiB"] == 2 * (20 + 10)


def test_no_page_is_in_the_log_more_often_than_it_is_touched() -> None:
    assert scale.touched(1e9, 5, 100) == pytest.approx(5, rel=1e-3)
    assert scale.touched(1000, 5, 1_000_000) == 1000 / 1_000_000


@pytest.mark.parametrize(
    ("room_for", "misses", "server_ms", "database_ms", "p99_ms"),
    [(2000, 0.0, 2.0, 1.0, 10.0), (1000, 0.0, 2.0, 1.0, 10.0), (995, 0.005, 2.02, 1.01, 10.0), (250, 0.75, 5, 2.5, 30)],
)
def test_a_turn_of_a_session_that_the_cache_has_no_room_for_costs_a_load(
    room_for: int, misses: float, server_ms: float, database_ms: float, p99_ms: float
) -> None:
    fleet = scale.Fleet(sessions=1000, turns=2, new_tokens=90, output_tokens=50, cache_bytes=room_for * 1480.0)
    found = scale.predict(fleet, COSTS)
    assert found["cache: KiB a session"] == 1480 / 1024
    assert found["turns that miss the cache"] == pytest.approx(misses)
    assert found["server CPU ms a turn"] == pytest.approx(server_ms)
    assert found["database CPU ms a turn"] == pytest.approx(database_ms)
    assert found["p99 ms"] == p99_ms


def sample(**changed: float) -> dict[str, Any]:
    costs = {"server CPU ms a turn": 2.0, "database CPU ms a turn": 1.0}
    missed = {"server CPU ms a turn": 5.0, "database CPU ms a turn": 1.5, "p99 ms": 20.0}
    export = {"export of one s": 0.5, "export s": 2.5, "export MiB": 4.0}
    times = {"p99 ms": 10.0, "janitor: no idle session, ms": 1.0}
    others = {
        "janitor: sessions closed a second": 40.0,
        "restart until /health s": 3.0,
        "memory after a restart MiB": 9.0,
    }
    filling = {f"filling: {name}": cost for name, cost in costs.items()}
    missing = {f"{scale.MISSED}{name}": cost for name, cost in missed.items()}
    return {**costs, **filling, **missing, **export, **times, **others, **changed}


def test_a_run_is_compared_with_the_times_of_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {name: 2.0 * value for name, value in scale.predict(FLEET_OF_RUN, scale.Costs()).items()}
    whole["server CPU ms a turn"] = 3.0
    run = scale.Run(FLEET_OF_RUN, [sample(), sample(**{"server CPU ms a turn": 4.0})], whole)
    rows = {row["figure"]: row for row in run.compared()}
    assert rows["server CPU ms a turn"]["predicted"] == 3.0
    assert rows["server CPU ms a turn"]["ratio"] == 1.0
    assert rows["database MiB"]["ratio"] == pytest.approx(2.0)
    assert rows["export s"]["predicted"] == pytest.approx(0.5 + rows["export MiB"]["predicted"] * 2 / 4)
    (tmp_path / "run.json").write_text(json.dumps(msgspec.to_builtins(run)))
    assert scale.main(["--beside", str(tmp_path / "run.json")]) == 0
    assert "database MiB" in capsys.readouterr().out


FLEET_OF_RUN = scale.Fleet(sessions=1000, turns=2, new_tokens=100, output_tokens=50)
