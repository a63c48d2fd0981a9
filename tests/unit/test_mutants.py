"""The tool that makes faults: what each pattern makes of a small file, and that the list's faults are still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.mutants.edits import mutants_of
from tests.tools.mutants.listed import find, read_list

ROOT = Path(__file__).resolve().parents[2]

SMALL = '''
"""A file."""

_TEXT = """
UPDATE things SET version = version + 1, kind = ?3
WHERE name = ?1 AND version < ?2 -- AND not this
"""
held = select(things.c.id).where(things.c.fence == given.fence, ~dead).order_by(things.c.id).with_for_update()


class Write:
    durable: ClassVar[bool] = True

    def apply(self, tx, most=1):
        """Write."""
        if self.known is None or not self.opened:
            raise ValueError(f"{self.known == 1} is not known")
        log.warning("it is %s", self.known == 2)
        tx.lock(held, {"sid": self.sid, "fence": self.fence})
        tx.run(held, Known(self.version))
        self.count = min(most, 2)
        return self.rows[0] if self.count < 3 else sorted(self.rows)
'''


def made(pattern: str) -> list[str]:
    return [f"{one.before} → {one.after}" for one in mutants_of("small.py", SMALL) if one.pattern == pattern]


@pytest.mark.parametrize(
    ("pattern", "faults"),
    [
        ("operand", ["self.known is None or not self.opened → not self.opened",
                     "self.known is None or not self.opened → self.known is None"]),
        ("where", ["where(things.c.fence == given.fence) → nothing", "where(~dead) → nothing"]),
        ("not", ["~dead → dead", "not self.opened → self.opened"]),
        ("order", ["order_by(things.c.id) → nothing", "sorted(self.rows) → list(self.rows)"]),
        ("lock", ["with_for_update() → nothing"]),
        ("constant", ["durable: ClassVar[bool] = True → False"]),
        ("default", ["most = 1 → 2"]),
        ("guard", ["if self.known is None or not self.opened: … raise ValueError → nothing"]),
        ("write", ["tx.lock(held, {'sid': self.sid, 'fence': self.fence}) → nothing",
                   "tx.run(held, Known(self.version)) → nothing"]),
        ("state", ["self.count = min(most, 2) → nothing"]),
        ("values", ["'sid': self.sid → nothing", "'fence': self.fence → nothing"]),
        ("field", ["Known(version: self.version) → 0"]),
        ("function", ["min(most, 2) → max(most, 2)"]),
        ("number", ["self.rows[0] → self.rows[1]", "self.count < 3 → self.count < 4"]),
        ("call", []),
    ],
)  # fmt: skip
def test_a_pattern_makes_these_faults(pattern: str, faults: list[str]) -> None:
    assert sorted(made(pattern)) == sorted(faults)


def test_the_lists_faults_are_still_there() -> None:
    """Of those that are not, `--run` names each; where code is rewritten the list is made anew, and compared."""
    listed = read_list()
    gone = [name for name, one in find(listed, ROOT).items() if one is None]
    assert len(listed) >= 150
    assert gone == []
