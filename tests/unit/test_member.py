"""When an engine counts as dead, when it is back, and when its weights went backwards."""

from __future__ import annotations

import pytest

from app.fleet.member import Member, is_lower


@pytest.mark.parametrize(
    ("times", "health", "since"),
    [
        ([-100.0, 101.0, 102.0], "healthy", 100.0),
        ([-100.0, 101.0, 102.0, 103.0], "dead", 103.0),
        ([1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0, 8.0, -9.0], "healthy", 3.0),
        # Sixty-four turns may meet the same restart of an engine: failures of one moment are one.
        ([10.0 + number / 1000 for number in range(64)], "unknown", None),
        # A clock that is set back does not keep an engine alive.
        ([1000.0, 10.0, 11.0], "dead", 11.0),
        ([1.0, 2.0, 3.0, -4.0], "dead", 3.0),
        ([1.0, 2.0, 3.0, -4.0, 5.0, -6.0], "dead", 3.0),
        ([1.0, 2.0, 3.0, -4.0, 5.0, -6.0, -7.0], "healthy", 7.0),
    ],
)
def test_three_failures_in_a_row_are_a_death_and_two_signs_of_life_its_end(
    times: list[float], health: str, since: float | None
) -> None:
    """A negative time is that of a sign of life."""
    member = Member("http://a")
    for at in times:
        if at < 0:
            member.succeeded("healthy", -at)
        else:
            member.failed("refused", at)
    assert member.health == health
    assert since is None or member.since == since
    assert member.last_error == (None if times[-1] < 0 and health != "dead" else "refused")


@pytest.mark.parametrize(
    ("said", "version", "fell_from"),
    [
        ([("5", None), ("3", "5"), ("4", "3")], "4", "5"),
        ([("5", None), ("3", "5"), ("4", "3"), ("5", "4")], "5", None),
        # Long replies are read after short ones of newer weights: what was asked for before is no regression.
        ([("5", None), ("6", "5"), ("5", "5")], "6", None),
        ([("5", None), ("6", "5"), ("5", "5"), ("7", "5")], "7", None),
        # Names have no order, and end a regression.
        ([("step-9", None), ("step-10", "step-9"), ("default", "step-10"), ("3", "default")], "3", None),
        ([("5", None), ("3", "5"), ("default", "3")], "default", None),
    ],
)
def test_a_version_that_falls_is_remembered_until_it_is_reached_again(
    said: list[tuple[str, str | None]], version: str, fell_from: str | None
) -> None:
    member = Member("http://a")
    for one, known in said:
        member.report_version(one, known)
    assert (member.weight_version, member.fell_from) == (version, fell_from)


def test_versions_are_compared_as_numbers() -> None:
    assert [is_lower(*pair) for pair in (("9", "10"), ("10", "10"), ("3", "default"))] == [True, False, False]
