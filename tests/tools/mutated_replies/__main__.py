"""`python -m tests.tools.mutated_replies`: mutated engine replies through the real server.

Each must be answered 502, or be committed as what it says; never a 500, a stored value that is another, or a
claim that is left behind. A reply depends on the seed and its number: `--only <session>` repeats one session.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.tools.mutated_replies.run import Plan, run


def main() -> int:
    """Run, print what happened; 1 where something did that must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="replies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--only", type=int, help="the one session of this index, as a failure names it")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mutated-replies-"))  # the bytes of failing replies
    tally = asyncio.run(run(Plan(given.count, given.seed, folder, given.clients, given.only)))
    print("\n".join(tally.lines()))
    return 1 if tally.failures or tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
