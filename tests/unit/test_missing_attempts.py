"""Which attempts of a group are missing, where nobody says from which number they are counted."""

from __future__ import annotations

import pytest

from app.sessions.groups import MAX_MISSING, missing_attempts


@pytest.mark.parametrize(
    ("attempts", "missing"),
    [
        ([], []),
        ([0], []),
        ([1], []),
        ([3, 0, 1], [2]),
        ([1, 2, 4], [3]),
        ([2], [1]),
        ([0, 2**31 - 1], list(range(1, MAX_MISSING + 1))),
        ([1, 1, 3, 3], [2]),
    ],
)
def test_the_numbers_between_the_first_and_the_last(attempts: list[int], missing: list[int]) -> None:
    assert missing_attempts(attempts) == missing
