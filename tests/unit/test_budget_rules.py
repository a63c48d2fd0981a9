"""The arithmetic of limits, for any order of claims, commits and ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.events import Limits
from app.features.budgets.rules import NoneLeft, Used, allowance, left, wanted_tokens

COUNTS = st.one_of(st.none(), st.integers(1, 50))
STEP = st.tuples(
    st.sampled_from(("claim", "commit", "end")), st.integers(0, 9), st.one_of(st.none(), st.integers(1, 30))
)


@given(st.lists(st.builds(Limits, turns=COUNTS, tokens=COUNTS), min_size=1, max_size=2), st.lists(STEP, max_size=60))
def test_no_more_is_used_than_there_is(budgets: list[Limits], steps: list[tuple[str, int, int | None]]) -> None:
    turns = tokens = 0
    in_flight: list[int] = []
    for what, place, number in steps:
        used = Used(turns, tokens, len(in_flight), sum(in_flight))
        if what == "claim":
            reserved = allowance([(limits, used) for limits in budgets], number)
            if isinstance(reserved, int):
                in_flight.append(reserved)
                assert number is None or reserved <= number
                assert (reserved > 0) == any(limits.tokens is not None for limits in budgets)
            else:
                mosts = [getattr(limits, reserved.limit) for limits in budgets]
                spent = turns if reserved.limit == "turns" else tokens
                assert reserved.is_reserved == all(most is None or spent < most for most in mosts)
        elif in_flight:
            reserved = in_flight.pop(place % len(in_flight))
            if what == "commit":
                turns, tokens = turns + 1, tokens + min(number or 0, reserved)
        for limits in budgets:
            now = Used(turns, tokens, len(in_flight), sum(in_flight))
            assert limits.turns is None or turns + len(in_flight) <= limits.turns
            assert limits.tokens is None or tokens + sum(in_flight) <= limits.tokens
            assert all(rest >= 0 for rest in left(limits, now, 0.0).values())


def test_all_that_is_left_is_given() -> None:
    """Nothing is held back: one turn may have the rest, and after it there is nothing."""
    limits = Limits(tokens=10)
    assert allowance([(limits, Used(1, 4, 1, 3))], None) == 3
    assert allowance([(limits, Used(1, 4, 2, 6))], None) == NoneLeft("tokens", is_reserved=True)
    assert allowance([(limits, Used(3, 10, 0, 0))], 1) == NoneLeft("tokens", is_reserved=False)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "5", True, [1], 2**63])
def test_what_an_engine_might_take_for_more_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        wanted_tokens([None, bad])
    assert wanted_tokens([7, 9]) == 9
    assert wanted_tokens([None, None]) is None
