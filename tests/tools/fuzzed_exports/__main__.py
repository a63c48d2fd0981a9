"""`python -m tests.tools.fuzzed_exports`: odd requests, labels and rewards, and every export of them.

Every other group of sessions is plain. Each export must end properly, with a row of each plain session, and with
`explain` a row or a reason of each other one; the training feed must hand out each plain group.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.fuzzed_exports.run import Plan, run


def main() -> int:
    """Run, print the numbers; 1 where an export was not whole."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzzed-exports-") as folder:
        result = run(Plan(given.sessions, given.seed), Path(folder))
    statuses = ", ".join(f"{count} × {status}" for status, count in sorted(result.requests.items()))
    print("\n".join(result.broken[:50]))
    print(
        f"seed {given.seed}: {result.sessions} sessions from requests answered {statuses}; {result.damaged} stored "
        f"parameters changed; {result.exports} exports and {result.feeds} feeds with {result.rows} rows and "
        f"{result.excluded} reasons, {time.monotonic() - began:.0f} s"
    )
    print(f"exports that were not whole: {len(result.broken)}")
    return 1 if result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
