"""The command; see `ops.keeping` for its exit codes."""

from __future__ import annotations

import asyncio
import sys

from ops.keeping import DONE, NOT_ALL_WELL, Progress, parser, run, settings_for
from ops.verify import verify_url


def main() -> int:
    arguments = parser("verify", "Check a store against its own log.").parse_args()
    return run("verify", lambda: _verify(arguments.database_url), interrupted="nothing was changed")


def _verify(database_url: str | None) -> int:
    report = asyncio.run(verify_url(settings_for(database_url).database_url, Progress("verify")))
    for problem in report.problems:
        print(f"{problem.session_id}: {problem.what}")
    print(report.summary())
    return NOT_ALL_WELL if report.problems else DONE


if __name__ == "__main__":
    sys.exit(main())
