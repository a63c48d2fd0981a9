"""Every column that can be derived from the log is, and says what the log says."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.log import committed, created, opened, rolled_back

from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    Event,
    Failure,
    Recorded,
    RewardAssigned,
    SessionClosed,
    SessionErased,
    TurnRejected,
)
from app.domain.session import fold
from app.sessions.event_log import described
from app.store.repair import HEAD, OPEN_TURN, FoldedLog
from app.store.schema import open_turns, sessions
from workers.reply import VersionSpan


def log_of(new: Sequence[Event]) -> FoldedLog:
    """The events at the times 10.0, 11.0, and so on."""
    recorded = [Recorded(seq, 9.0 + seq, event) for seq, event in enumerate(new, 1)]
    session = fold("s", recorded)
    assert session is not None
    return FoldedLog(session, recorded, None)


def head(*new: Event) -> dict[str, object]:
    log = log_of(new)
    return {name: derive(log) for name, derive in HEAD.items()}


def test_every_column_but_the_key_is_derived() -> None:
    assert set(HEAD) == set(sessions.c.keys()) - {"session_id"}
    assert set(OPEN_TURN) == set(open_turns.c.keys()) - {"session_id", "fence"}


def test_a_new_session() -> None:
    row = head(created(group_id="g"))
    assert row["version"] == 1
    assert (row["status"], row["turns"], row["open_turns"]) == ("open", 0, 0)
    assert (row["group_id"], row["reward"], row["closed_at"]) == ("g", None, None)
    assert (row["created_at"], row["updated_at"]) == (10.0, 10.0)


def test_the_weight_version_is_the_largest_number_of_any_turn() -> None:
    claimed = [created(attempt=3), opened(1, 0)]
    assert head(*claimed)["attempt"] == 3
    assert head(*claimed)["weight_version"] is None
    names = ("v7", "", "9" * 19, "٣")
    unnumbered = committed(1, 0, 2, weight_versions=tuple(VersionSpan(name, 0, 1) for name in names))
    assert head(*claimed, unnumbered)["weight_version"] is None
    numbered = committed(1, 0, 2, weight_versions=(VersionSpan("9", 0, 1), VersionSpan("10", 1, 2)))
    later = committed(2, 0, 4, weight_versions=(VersionSpan("4", 0, 2),))
    assert head(*claimed, numbered, opened(2, 1), rolled_back(0, 1), later)["weight_version"] == 10


def test_a_claim_is_no_change_but_its_end_is() -> None:
    claimed = [created(), opened(1, 0)]
    assert head(*claimed)["updated_at"] == 10.0
    assert head(*claimed, TurnRejected(1, 2, "upstream_error", 500))["updated_at"] == 12.0


def test_an_open_turn_stands_as_it_was_claimed() -> None:
    log = log_of([created(), opened(1, 0), committed(1, 0, 2), opened(2, 1, 7, retry_key="key")])
    held = log.session.open_turn
    assert held is not None
    row = {name: derive(log, held) for name, derive in OPEN_TURN.items()}
    assert held.fence == 4
    assert (row["turn"], row["parent_turn"], row["incarnation"], row["retry_key"]) == (2, 1, 7, "key")
    assert row["opened_at"] == 13.0


def test_the_reward_of_a_turn_is_not_that_of_the_session() -> None:
    turn = [created(), opened(1, 0), committed(1, 0, 2)]
    assert head(*turn, RewardAssigned(0.5, {}, 1))["reward"] is None
    assert head(*turn, RewardAssigned(0.5, {}, None), SessionClosed())["reward"] == 0.5


def test_a_failure_stands_until_a_reward_comes() -> None:
    failed = SessionClosed(failed=Failure("sandbox", "no space"))
    for events, kind in (
        ([failed], "sandbox"),
        ([RewardAssigned(0.5), failed], "sandbox"),
        ([failed, RewardAssigned(0.5, turn=1)], "sandbox"),
        ([failed, RewardAssigned(0.5, restored=True)], "sandbox"),
        ([failed, RewardAssigned(0.5)], None),
        ([failed, RewardAssigned(0.5, of_root=True)], None),
        ([RewardAssigned(0.5, of_root=True), failed, RewardAssigned(1.0)], "sandbox"),
        ([failed, SessionErased()], "sandbox"),
    ):
        turn = [created(), opened(1, 0), committed(1, 0, 2)]
        assert head(*turn, *events)["failed"] == kind, events
    assert log_of([created(), failed, SessionErased()]).session.failed == Failure("sandbox", erased=True)


def test_closed_at_is_the_close_whatever_follows() -> None:
    row = head(created(), SessionClosed(), RewardAssigned(1.0, {}, None))
    assert (row["status"], row["closed_at"], row["updated_at"]) == ("closed", 11.0, 12.0)


def test_a_described_state_says_which_turns_are_live() -> None:
    log = log_of([created(), opened(1, 0), committed(1, 0, 2, finish_reason=None), opened(2, 1)])
    state = described(log.session)
    assert [(turn["turn"], turn["live"], turn["tokens"], turn["finish_reason"]) for turn in state["turns"]] == [
        (1, True, 3, None)
    ]
    assert state["open_turn"] == {"turn": 2, "parent": 1, "fence": 4, "incarnation": 1, "adapter": None}
    assert state["affinity"] is None


def test_a_described_state_says_which_engine_it_is_bound_to() -> None:
    bound = [created(), opened(1, 0), AffinityBound("http://a"), committed(1, 0, 2)]
    assert described(log_of(bound).session)["affinity"] == {"engine": "http://a", "control": None}
    again = [*bound, AffinityBound("http://b", "control", "c-1")]
    assert described(log_of(again).session)["affinity"] == {"engine": "http://b", "control": "c-1"}
    assert described(log_of([*again, AffinityReleased()]).session)["affinity"] is None
