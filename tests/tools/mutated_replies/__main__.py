"""`python -m tests.tools.mutated_replies`: mutated engine replies through the real server.

Each must be answered 502, or be committed as what it says; never a 500, a stored value that is another, or a
claim that is left behind. A reply depends on the seed and its number: `--only <session>` repeats one session.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.mutated_replies.run import Plan, run


def main() -> int:
    """Run, print the table; 1 where something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="replies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--only", type=int, help="the one session of this index, as a failure names it")
    parser.add_argument("--folder", type=Path, help="where the bytes of failing replies are written")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="mutated-replies-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tally = asyncio.run(run(Plan(given.count, given.seed, folder, given.clients, given.only)))
    seconds = time.monotonic() - began
    print("\n".join(tally.lines()))
    print(
        f"{tally.total.replies} replies of seed {given.seed} in {tally.sessions} sessions, {seconds:.0f} s; "
        f"{tally.good_after} sound turns right behind a refusal; {len(tally.failures)} failures, "
        f"{len(tally.problems)} problems"
    )
    if not any(folder.iterdir()):
        folder.rmdir()
    else:
        print(f"replies to look at: {folder}")
    return 0 if tally.sound else 1


if __name__ == "__main__":
    sys.exit(main())
