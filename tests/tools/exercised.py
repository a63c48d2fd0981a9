"""`python -m tests.tools.exercised FILE`: what `.ci/run` must exercise and has not, by the tests that passed.

The list is the tables of tests/README.md: promises, pages, faults, threats and protocols. FILE has the ids of the tests
that passed, as `pytest --ran FILE` appends them. A row counts where a test that it names has passed; a database where
each folder that runs on both has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
SECTIONS = ("By promise", "By page", "By fault", "By threat", "By protocol")
DATABASES = ("sqlite", "postgresql")
ON_BOTH = ("contract", "fault", "integration")
"""Folders of which each database runs some."""


def rows(section: str) -> dict[str, list[str]]:
    """By each row's first cell, the tests that it names: a module, or `module::function`."""
    text = README.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: re.findall(r"test_\w+\.py(?:::\w+)?", row[-1]) for row in cells[2:]}


def missed(ran: Iterable[str]) -> Iterator[str]:
    """The rows of which none of these tests is one."""
    ids = set(ran)
    functions = {name.partition("[")[0].rpartition("/")[2] for name in ids}
    modules = {name.partition("::")[0] for name in functions}
    for section in SECTIONS:
        for row, tests in rows(section).items():
            if modules.union(functions).isdisjoint(tests):
                yield f"{section}: {row}"
    for folder in ON_BOTH:
        for database in DATABASES:
            if not any(name.startswith(f"tests/{folder}/") and database in name.partition("[")[2] for name in ids):
                yield f"tests/{folder} on {database}"


def main() -> int:
    found = list(missed(Path(sys.argv[1]).read_text().split("\n")))
    print("\n".join(f"not exercised: {one}" for one in found) or "everything on the list was exercised")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
