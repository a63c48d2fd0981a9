"""What one PostgreSQL has to carry for a fleet of sessions: `python -m ops.scale --sessions 10000 …`.

What a turn weighs is measured first, at the fleet's own size of turns and contexts (`ops.bench weights`, some minutes);
`--weights FILE` takes a measurement from before. Everything else is arithmetic, and every input is an option.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from ops.bench import weights
from ops.bench.weights import Weights

GIB = 1 << 30
DAY_S = 86400
PAGE_BYTES = 8192
PAGES_A_SESSION = 4
"""Pages that only this session's turns touch: the leaves of the indexes of `events` and `turns`, and its head with its
index's leaf. PostgreSQL writes each whole into the WAL the first time after a checkpoint."""


class Fleet(msgspec.Struct, frozen=True):
    """`turns_per_hour` is of each live session; closed sessions stay `kept_days`, their payloads `replay_kept_h`."""

    sessions: int
    turns_per_hour: float
    kept_days: float
    replay_kept_h: float
    checkpoint_min: float


class Machine(msgspec.Struct, frozen=True):
    """The database's: cores that it may use at most, and what its disk takes of WAL and pages together."""

    cores: float
    share: float
    disk_mib_s: float


class Demand(msgspec.Struct, frozen=True):
    """What a fleet asks of its database. Bytes, seconds, cores."""

    turns_s: float
    tokens_s: float
    sessions_day: float
    stored_day: float
    index_day: float
    wal_day: float
    full_pages_day: float
    live: float
    kept: float
    live_replay: float
    kept_replay: float
    replay_wal_day: float
    replay_free_wal_day: float
    replay_dead_day: float
    database_cores: float
    server_cores: float


def demand(weights: Weights, fleet: Fleet) -> Demand:
    """A live session is half-way through its context on the average; a finished one has the whole."""
    tokens = weights.new_tokens + weights.output_tokens
    turns_s = fleet.sessions * fleet.turns_per_hour / 3600
    turns_a_session = weights.context_tokens / tokens
    sessions_day = turns_s * DAY_S / turns_a_session
    checkpoints = DAY_S / (fleet.checkpoint_min * 60)
    touched = min(fleet.sessions, turns_s * fleet.checkpoint_min * 60)
    a_session = turns_a_session * weights.stored_bytes
    replay_a_session = weights.context_tokens * weights.replay_bytes
    return Demand(
        turns_s=turns_s,
        tokens_s=turns_s * tokens,
        sessions_day=sessions_day,
        stored_day=turns_s * DAY_S * weights.stored_bytes,
        index_day=turns_s * DAY_S * weights.index_bytes,
        wal_day=turns_s * DAY_S * weights.wal_bytes,
        full_pages_day=checkpoints * touched * PAGES_A_SESSION * PAGE_BYTES,
        live=fleet.sessions * a_session / 2,
        kept=sessions_day * fleet.kept_days * a_session,
        live_replay=fleet.sessions * replay_a_session / 2,
        kept_replay=sessions_day * fleet.replay_kept_h / 24 * replay_a_session,
        replay_wal_day=turns_s * DAY_S * tokens * weights.replay_wal_bytes,
        replay_free_wal_day=sessions_day * weights.context_tokens * weights.free_wal_bytes,
        replay_dead_day=sessions_day * replay_a_session,
        database_cores=turns_s * weights.database_ms / 1000,
        server_cores=turns_s * weights.server_ms / 1000,
    )


def most_turns_s(weights: Weights, machine: Machine, *, replay: bool) -> dict[str, float]:
    """Turns a second at which each of the machine's resources is at `share`; the smallest is where one database ends.

    What goes to the disk goes there twice: into the WAL, and with a checkpoint into the table. A payload's pages go
    there once more when it is freed.
    """
    tokens = weights.new_tokens + weights.output_tokens
    written = weights.wal_bytes + weights.stored_bytes
    if replay:
        written += tokens * (weights.replay_wal_bytes + weights.free_wal_bytes + 2 * weights.replay_bytes)
    return {
        "CPU": machine.cores * machine.share * 1000 / weights.database_ms,
        "disk": machine.disk_mib_s * machine.share * (1 << 20) / written,
    }


def lines(weights: Weights, fleet: Fleet, machine: Machine, *, replay: bool) -> list[tuple[str, str]]:
    """The calculation, as names and values."""
    asked = demand(weights, fleet)
    said = [
        ("turns a second", f"{asked.turns_s:.0f}"),
        ("tokens a second", f"{asked.tokens_s:,.0f}"),
        ("sessions finished a day", f"{asked.sessions_day:,.0f}"),
        ("stored a turn", f"{weights.stored_bytes / 1024:.1f} KiB, of which indexes {weights.index_bytes:.0f} bytes"),
        ("stored a day", _gib(asked.stored_day)),
        ("of which indexes", _gib(asked.index_day)),
        ("live sessions hold", _gib(asked.live)),
        (f"closed sessions of {fleet.kept_days:g} days hold", _gib(asked.kept)),
        ("WAL a day", _gib(asked.wal_day)),
        (f"full pages in it, checkpoints {fleet.checkpoint_min:g} min apart, at most", _gib(asked.full_pages_day)),
        ("WAL a second", f"{(asked.wal_day + asked.full_pages_day) / DAY_S / (1 << 20):.1f} MiB"),
        ("database CPU", f"{asked.database_cores:.1f} cores"),
        ("API processes' CPU", f"{asked.server_cores:.1f} cores"),
    ]
    if replay:
        said += [
            ("replay payloads of live sessions", _gib(asked.live_replay)),
            (f"those of sessions closed {fleet.replay_kept_h:g} h or less", _gib(asked.kept_replay)),
            ("WAL for payloads a day", _gib(asked.replay_wal_day)),
            ("WAL to free them again a day", _gib(asked.replay_free_wal_day)),
            ("payload bytes that die a day, for vacuum", _gib(asked.replay_dead_day)),
        ]
    ends = most_turns_s(weights, machine, replay=replay)
    first = min(ends, key=lambda name: ends[name])
    said += [(f"one database ends, by its {name}, at", f"{ends[name]:,.0f} turns/s") for name in ends]
    ratio = ends[first] / asked.turns_s
    said.append(("the fleet takes of that", f"{1 / ratio:.0%} ({first} ends first)"))
    return said


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.scale", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="live at a time")
    parser.add_argument("--turns-per-hour", type=float, default=60.0, help="of each live session")
    parser.add_argument("--kept-days", type=float, default=7.0, help="until closed sessions are erased")
    parser.add_argument("--replay", action="store_true", help="engines return routing payloads, about 1 KB a token")
    parser.add_argument("--replay-kept-hours", type=float, default=24.0, help="TURNLOG_CLOSED_REPLAY_TTL_S")
    parser.add_argument("--checkpoint-minutes", type=float, default=15.0)
    parser.add_argument("--cores", type=float, default=16.0, help="of the database's machine")
    parser.add_argument("--disk-mib-s", type=float, default=500.0, help="that its disk writes all day")
    parser.add_argument("--share", type=float, default=0.5, help="of cores and disk that turns may take")
    parser.add_argument("--weights", type=Path, help="a measurement of `ops.bench weights`, instead of a new one")
    weights.add_arguments(parser)
    wanted = parser.parse_args()
    if wanted.weights is not None:
        found = msgspec.json.decode(wanted.weights.read_bytes(), type=Weights)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(weights.measured(wanted))
    weights.show(found)
    fleet = Fleet(
        wanted.sessions, wanted.turns_per_hour, wanted.kept_days, wanted.replay_kept_hours, wanted.checkpoint_minutes
    )
    said = lines(found, fleet, Machine(wanted.cores, wanted.share, wanted.disk_mib_s), replay=wanted.replay)
    print(f"\n{wanted.sessions} live sessions, {wanted.turns_per_hour:g} turns an hour each")
    width = max(len(name) for name, _ in said)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
