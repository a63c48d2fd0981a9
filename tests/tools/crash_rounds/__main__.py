"""The command: its arguments, its table, its verdict."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.measure import table
from tests.tools.crash_rounds.clients import Round
from tests.tools.crash_rounds.rounds import run


def summed(rounds: list[Round]) -> dict[str, int]:
    """The counts of all rounds together."""
    rows = [msgspec.structs.asdict(one) for one in rounds]
    return {name: sum(row[name] for row in rows) for name in rows[0] if not name.endswith("_s") and name != "number"}


def _print(rounds: list[Round], least: int) -> bool:
    """The table and the verdict; True where nothing was violated."""
    rows: list[dict[str, Any]] = [msgspec.structs.asdict(one) for one in rounds]
    counts = summed(rounds)
    slowest = {name: max(row[name] for row in rows) for name in ("up_after_s", "first_s", "slowest_s")}
    table([*rows, {**dict.fromkeys(rows[0], ""), "number": "all", **slowest, **counts}])
    enough = counts["acknowledged"] >= least
    violations = sum(one.violations for one in rounds)
    print(
        f"{counts['acknowledged']} turns acknowledged{'' if enough else f', fewer than {least}'}; "
        f"{counts['lost']} lost, {counts['twice']} keys committed twice, {counts['busy']} first retries answered "
        f"session_busy, {counts['stuck']} sessions that cannot go on, {counts['problems']} problems found by verify; "
        f"{counts['interrupted']} turns broken off and acknowledged after all, the slowest "
        f"{slowest['slowest_s']:.2f} s after the kill"
    )
    return enough and not violations


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill servers, lose nothing.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2000, help="acknowledged turns without which nothing is shown")
    parser.add_argument("--folder", type=Path, help="where the database is put")
    parser.add_argument("--database-url", help="a PostgreSQL database, which must be empty; default: a new SQLite file")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL server of this run's own")
    parser.add_argument("--processes", type=int, default=1, help="servers on the PostgreSQL database")
    parser.add_argument("--payloads", help="as TURNLOG_PAYLOADS: turns have replay payloads, which lie there")
    arguments = parser.parse_args()
    if arguments.processes > 1 and not (arguments.postgres or arguments.database_url):
        parser.error("several processes need --postgres or --database-url")
    with contextlib.ExitStack() as stack:
        url = arguments.database_url
        if arguments.postgres:
            from ops.bench.primary import primary  # needs a package of the tests

            url = stack.enter_context(primary(arguments.folder)).new_database().url
        rounds = asyncio.run(
            run(
                rounds=arguments.rounds,
                clients=arguments.clients,
                seed=arguments.seed,
                folder=arguments.folder,
                database_url=url,
                processes=arguments.processes,
                payloads=arguments.payloads,
            )
        )
    return 0 if _print(rounds, arguments.least) else 1


if __name__ == "__main__":
    sys.exit(main())
