"""What many sessions cost one PostgreSQL and one server: `python -m ops.scale --sessions 100000 --turns 20`.

Bytes are added up from what rows, indexes and the write-ahead log take (`Costs`, measured with `ops.bench sessions` at
two sizes of turns). Times depend on the machine. `--beside FILE` takes them from the small samples of a run of
`ops.bench sessions`, and prints the prediction beside what the run measured.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ops.bench.measure import table

KIB = 1024
MIB = 1 << 20
PAGE_KIB = 8

MISSED = "missing the cache: "
"""Before the names of a sample's figures of turns that all miss the cache."""

RARE = 0.01
"""If fewer turns than this miss the cache, the 99th percentile is that of a turn that does not."""


class Fleet(msgspec.Struct, frozen=True):
    """Live sessions, the turns of each, and a turn's tokens.

    `payload_bytes` are a token's bytes in the bucket, 0 without replay payloads. `cache_bytes` is the memory of the
    session caches of all processes together (`TURNLOG_CACHE_BYTES` of each). `load_turns` are further turns, right
    after a checkpoint: for the write-ahead log of a turn, and in the export. PostgreSQL made `checkpoints` while the
    sessions were filled in.
    """

    sessions: int
    turns: float
    new_tokens: float
    output_tokens: float
    payload_bytes: float = 0.0
    cache_bytes: float = 256.0 * MIB
    load_turns: int = 2000
    checkpoints: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of all sessions."""
        return self.sessions * self.turns * (self.new_tokens + self.output_tokens)

    @property
    def exported_tokens(self) -> float:
        return self.tokens + self.load_turns * (self.new_tokens + self.output_tokens)


class Costs(msgspec.Struct, frozen=True):
    """Bytes in PostgreSQL, and times of the machine on which `ops.bench sessions` ran (two shared cores).

    `content` is what a turn's frames take: a little, and something for each new token of the prompt (its id, its text)
    and of the output (its id, logprob, text, and its part of the reply as it was sent). TOAST adds to that. A row of
    `events` has two thirds of a kilobyte on the average, a turn two of them.
    """

    session_rows: float = 1164.0
    """`sessions` (half-empty pages), `blobs`, and the events of its creation and of its engine."""
    session_indexes: float = 624.0
    turn_rows: float = 1425.0
    turn_indexes: float = 353.0
    chunk_rows: float = 200.0
    chunk_indexes: float = 115.0
    chunk_in_object: float = 85.0
    """Of each turn, beside its payload: the head of a zstd frame, and its name."""
    content: float = 400.0
    content_new_token: float = 12.0
    content_output_token: float = 37.0
    toast: float = 1.12

    wal_session: float = 1120.0
    wal_turn: float = 3700.0
    wal_content: float = 1.08
    pages_a_turn: float = 3.0
    """Pages that a turn of a random session changes, each in the log as a whole the first time after a checkpoint: the
    leaves of the indexes of `events`, `turns` and `chunks`, and the session's head with its indexes."""

    cached_session: float = 2048.0
    """In the session cache: an entry, without its turns."""
    cached_turn: float = 1270.0
    """A turn, what names its payload's chunks, and the JSON around its messages."""
    cached_token: float = 4.5
    """Its text in the messages. With a tokenizer its id as text comes to that, of about 6 bytes."""

    export_bytes_a_token: float = 26.0
    fill_server_ms: float = 1.8
    fill_database_ms: float = 0.36
    server_ms: float = 2.2
    database_ms: float = 0.53
    p99_ms: float = 180.0
    miss_server_ms: float = 0.6
    """What a turn costs in addition, if its session is not in the cache and is read from the database."""
    miss_database_ms: float = 0.4
    miss_p99_ms: float = 220.0
    """As `p99_ms`, where no turn's session is in the cache."""
    export_base_s: float = 0.3
    """Of an export of one row; a new export waits for the transactions that run."""
    export_mib_s: float = 0.036
    idle_base_ms: float = 0.5
    idle_session_us: float = 0.18
    closed_a_second: float = 33.0
    restart_s: float = 3.0
    restart_mib: float = 128.0

    def with_times(self, samples: Sequence[Mapping[str, Any]]) -> Costs:
        """The times of this machine, from small samples that were measured before and after."""

        def mean(name: str) -> float:
            return fmean(sample[name] for sample in samples)

        server, database = "server CPU ms a turn", "database CPU ms a turn"
        base = mean("export of one s")
        return msgspec.structs.replace(
            self,
            fill_server_ms=mean(f"filling: {server}"),
            fill_database_ms=mean(f"filling: {database}"),
            server_ms=mean(server),
            database_ms=mean(database),
            p99_ms=mean("p99 ms"),
            miss_server_ms=max(mean(f"{MISSED}{server}") - mean(server), 0.0),
            miss_database_ms=max(mean(f"{MISSED}{database}") - mean(database), 0.0),
            miss_p99_ms=mean(f"{MISSED}p99 ms"),
            export_base_s=base,
            export_mib_s=max(mean("export s") - base, 0.0) / mean("export MiB"),
            idle_base_ms=mean("janitor: no idle session, ms"),
            closed_a_second=mean("janitor: sessions closed a second"),
            restart_s=mean("restart until /health s"),
            restart_mib=mean("memory after a restart MiB"),
        )


def predict(fleet: Fleet, costs: Costs) -> dict[str, float]:
    """The figures of `ops.bench sessions`, by their names.

    While sessions are filled in, half of the pages that there are in the end are in the log once for each checkpoint.
    Turns are of random sessions: as many of them miss the cache as there are sessions that it has no room for.
    """
    turns = fleet.sessions * fleet.turns
    content = costs.content
    content += fleet.new_tokens * costs.content_new_token + fleet.output_tokens * costs.content_output_token
    has_payloads = fleet.payload_bytes > 0
    rows = fleet.sessions * costs.session_rows + turns * (
        costs.turn_rows + has_payloads * costs.chunk_rows + content * costs.toast
    )
    indexes = fleet.sessions * costs.session_indexes + turns * (costs.turn_indexes + has_payloads * costs.chunk_indexes)
    wal_turn = (costs.wal_turn + costs.wal_content * content) / KIB
    pages = indexes / KIB / PAGE_KIB + fleet.sessions * costs.session_rows / 3 / KIB / PAGE_KIB
    cached = costs.cached_session + fleet.turns * costs.cached_turn + fleet.tokens / fleet.sessions * costs.cached_token
    misses = max(0.0, 1 - fleet.cache_bytes / (fleet.sessions * cached))
    export_mib = fleet.exported_tokens * costs.export_bytes_a_token / MIB
    return {
        "database MiB": (rows + indexes) / MIB,
        "of it indexes MiB": indexes / MIB,
        "bucket MiB": (fleet.tokens * fleet.payload_bytes + has_payloads * turns * costs.chunk_in_object) / MIB,
        "filling: WAL KiB a turn": wal_turn
        + costs.wal_session / fleet.turns / KIB
        + PAGE_KIB * fleet.checkpoints * pages / 2 / turns,
        "WAL KiB a turn": wal_turn + PAGE_KIB * touched(pages, costs.pages_a_turn, fleet.load_turns),
        "filling: server CPU ms a turn": costs.fill_server_ms,
        "filling: database CPU ms a turn": costs.fill_database_ms,
        "cache: KiB a session": cached / KIB,
        "turns that miss the cache": misses,
        "server CPU ms a turn": costs.server_ms + misses * costs.miss_server_ms,
        "database CPU ms a turn": costs.database_ms + misses * costs.miss_database_ms,
        "p99 ms": costs.miss_p99_ms if misses > RARE else costs.p99_ms,
        "export s": costs.export_base_s + export_mib * costs.export_mib_s,
        "export MiB": export_mib,
        "janitor: no idle session, ms": costs.idle_base_ms + fleet.sessions * costs.idle_session_us / 1000,
        "janitor: sessions closed a second": costs.closed_a_second,
        "restart until /health s": costs.restart_s,
        "memory after a restart MiB": costs.restart_mib,
    }


def touched(pages: float, each: float, turns: int) -> float:
    """Whole pages in the log for a turn, of so many turns since a checkpoint that touch `each` of `pages` at random."""
    return pages * (1 - math.exp(-each * turns / pages)) / turns


def beside(predicted: Mapping[str, float], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table of both."""
    return [
        {
            "figure": name,
            "predicted": value,
            "measured": measured[name],
            "ratio": measured[name] / value if value else None,
        }
        for name, value in predicted.items()
    ]


class Run(msgspec.Struct):
    """What `ops.bench sessions` saves: the fleet that it filled, its small samples, and what it measured."""

    fleet: Fleet
    samples: list[dict[str, Any]]
    whole: dict[str, Any]

    def compared(self) -> list[dict[str, Any]]:
        return beside(predict(self.fleet, Costs().with_times(self.samples)), self.whole)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.scale", description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000, help="live at a time")
    parser.add_argument("--turns", type=float, default=20.0, help="of each session so far")
    parser.add_argument("--new-tokens", type=float, default=300.0, help="of a turn's prompt")
    parser.add_argument("--output-tokens", type=float, default=400.0, help="of a turn")
    parser.add_argument("--payload-bytes", type=float, default=0.0, help="of a token, as stored in the bucket")
    parser.add_argument("--cache-mib", type=float, default=256.0, help="session caches of all processes, in MiB")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="a result of ops.bench sessions, instead of these")
    arguments = parser.parse_args(given)
    if arguments.beside is not None:
        table(msgspec.json.decode(arguments.beside.read_bytes(), type=Run).compared())
        return 0
    fleet = Fleet(
        arguments.sessions,
        arguments.turns,
        arguments.new_tokens,
        arguments.output_tokens,
        arguments.payload_bytes,
        arguments.cache_mib * MIB,
    )
    table([{"figure": name, "predicted": value} for name, value in predict(fleet, Costs()).items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
