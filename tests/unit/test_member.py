"""When an engine counts as dead, when it is back, and when its weights went backwards."""

from __future__ import annotations

from app.fleet.member import Member, is_lower


def failing(member: Member, *times: float) -> Member:
    for at in times:
        member.failed("refused", at)
    return member


def test_three_failures_in_a_row_are_a_death() -> None:
    member = Member("http://a")
    member.succeeded("healthy", 100.0)
    failing(member, 101.0, 102.0)
    assert (member.health, member.since, member.last_error) == ("healthy", 100.0, "refused")
    failing(member, 103.0)
    assert (member.health, member.since) == ("dead", 103.0)


def test_a_sign_of_life_between_failures_starts_the_count_anew() -> None:
    member = Member("http://a")
    for at in (1.0, 2.0, 4.0, 5.0, 7.0, 8.0):
        failing(member, at)
        if at in (2.0, 5.0, 8.0):
            member.succeeded("busy", at + 1)
    assert (member.health, member.last_error) == ("busy", None)


def test_failures_of_one_moment_are_one() -> None:
    """Sixty-four turns may meet the same restart of an engine."""
    member = failing(Member("http://a"), *(10.0 + number / 1000 for number in range(64)))
    assert (member.health, member.failures) == ("unknown", 1)


def test_a_clock_that_is_set_back_does_not_keep_an_engine_alive() -> None:
    assert failing(Member("http://a"), 1000.0, 10.0, 11.0).health == "dead"


def test_a_dead_engine_is_back_after_two_signs_of_life() -> None:
    member = failing(Member("http://a"), 1.0, 2.0, 3.0)
    member.succeeded("healthy", 4.0)
    assert (member.health, member.last_error) == ("dead", "refused")
    failing(member, 5.0)
    member.succeeded("healthy", 6.0)
    assert member.health == "dead"
    member.succeeded("paused", 7.0)
    assert (member.health, member.since, member.last_error) == ("paused", 7.0, None)


def versions(*said: tuple[str, str | None]) -> Member:
    member = Member("http://a")
    for version, known in said:
        member.report_version(version, known)
    return member


def test_a_version_that_falls_is_remembered_until_it_is_reached_again() -> None:
    member = versions(("5", None), ("3", "5"), ("4", "3"))
    assert (member.weight_version, member.fell_from) == ("4", "5")
    member.report_version("5", "4")
    assert (member.weight_version, member.fell_from) == ("5", None)


def test_a_reply_that_was_asked_for_before_an_update_is_no_regression() -> None:
    """Long replies are read after short ones of newer weights."""
    member = versions(("5", None), ("6", "5"))
    member.report_version("5", "5")
    assert (member.weight_version, member.fell_from) == ("6", None)
    member.report_version("7", "5")
    assert member.weight_version == "7"


def test_names_have_no_order() -> None:
    member = versions(("step-9", None), ("step-10", "step-9"), ("default", "step-10"), ("3", "default"))
    assert (member.weight_version, member.fell_from) == ("3", None)
    assert not is_lower("3", "default")
    assert is_lower("9", "10")
    assert not is_lower("10", "10")


def test_a_name_ends_a_regression() -> None:
    member = versions(("5", None), ("3", "5"), ("default", "3"))
    assert (member.weight_version, member.fell_from) == ("default", None)
