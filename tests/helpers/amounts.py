"""How many generated cases a test tries."""

from __future__ import annotations

import os

IN_FULL = bool(os.environ.get("TESTS_IN_FULL"))
"""`TESTS_IN_FULL=1 pytest …` tries all generated cases; without it a test tries an eighth of them, always the same."""


def cases(count: int) -> int:
    return count if IN_FULL else max(count // 8, 1)
