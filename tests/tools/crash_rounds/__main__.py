"""The command: its arguments, its verdict."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from tests.tools.crash_rounds.rounds import run


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill servers, lose nothing.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the database is put")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL server of this run's own")
    parser.add_argument("--processes", type=int, default=1, help="servers on the PostgreSQL database")
    parser.add_argument("--payloads", help="as TURNLOG_PAYLOADS: turns have replay payloads, which lie there")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--mid-stream", dest="mode", action="store_const", const="mid-stream", help="live streams are cut")
    of.add_argument("--tokens", dest="mode", action="store_const", const="tokens", help="clients of /generate, by keys")
    of.add_argument("--staging", dest="mode", action="store_const", const="staging", help="generations are staged")
    given = parser.parse_args()
    if given.processes > 1 and not given.postgres:
        parser.error("several processes need --postgres")
    with contextlib.ExitStack() as stack:
        url = None
        if given.postgres:
            from ops.bench.primary import primary  # needs a package of the tests

            url = stack.enter_context(primary(given.folder)).new_database().url
        rounds = asyncio.run(
            run(
                rounds=given.rounds,
                clients=given.clients,
                seed=given.seed,
                folder=given.folder,
                database_url=url,
                processes=given.processes,
                payloads=given.payloads,
                mode=given.mode or "plain",
            )
        )
    for one in rounds:
        print(one)
    print(
        f"{sum(one.acknowledged for one in rounds)} turns acknowledged, {sum(one.interrupted for one in rounds)} of "
        f"them after they were broken off, the slowest {max(one.slowest_s for one in rounds):.2f} s after the kill; "
        f"{sum(one.lost for one in rounds)} lost, {sum(one.twice for one in rounds)} doubled, "
        f"{sum(one.violations for one in rounds)} violations"
    )
    return 1 if any(one.violations for one in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
