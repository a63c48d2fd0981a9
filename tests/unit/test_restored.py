"""A restore is the fold up to an earlier event, with what the log has given out since; also of restores."""

from __future__ import annotations

import pytest
from helpers.log import committed, created, opened
from hypothesis import given
from hypothesis import strategies as st

from app.domain.events import (
    AnnotationWritten,
    BlobsTombstoned,
    ChunkRef,
    Event,
    Failure,
    PayloadRef,
    Recorded,
    RewardAssigned,
    SessionClosed,
    SessionRestored,
    TurnCommitted,
    UnknownEvent,
)
from app.domain.restore import in_effect
from app.domain.session import Session, fold
from app.features.checkpoints.rules import restoring

STEPS = st.lists(
    st.tuples(st.sampled_from(["turn", "drop", "reward", "note", "restore"]), st.integers(0, 99)), max_size=25
)


def recorded(events: list[Event]) -> list[Recorded]:
    return [Recorded(seq, float(seq), event) for seq, event in enumerate(events, 1)]


def folded(events: list[Event]) -> Session:
    session = fold("s", recorded(events))
    assert session is not None
    return session


def turn(events: list[Event]) -> list[Event]:
    """A turn with a payload of its own, after the leaf."""
    session, fence = folded(events), len(events) + 1
    number = session.last_turn + 1
    parent = 0 if session.leaf is None else session.leaf.number
    payload = PayloadRef("routed_experts", 0, 1, 0, (1,), (ChunkRef(fence, 0, 0, 1, "uint8", 1, "0"),))
    return [opened(number, parent), committed(number, parent, fence, payloads=(payload,))]


def grown(steps: list[tuple[str, int]]) -> list[Event]:
    events: list[Event] = [created()]
    for kind, number in steps:
        session = folded(events)
        match kind:
            case "turn" if session.status == "open":
                events += turn(events)
            case "drop" if session.every_payload:
                events.append(
                    BlobsTombstoned((sorted(session.every_payload)[number % len(session.every_payload)],), ())
                )
            case "reward" if session.status == "open":
                events.append(RewardAssigned(float(number)))
            case "note" if session.status == "open":
                events.append(AnnotationWritten("note", value=f"note {number}", size=9))
            case "restore":
                seq = number % len(events)
                events += restoring(folded(events[:seq]) if seq else None, "checkpoint")
    return events


@given(STEPS)
def test_after_a_restore_the_session_is_what_it_was_and_no_number_is_given_twice(steps: list[tuple[str, int]]) -> None:
    events = grown(steps)
    for place, event in enumerate(events, 1):
        if not isinstance(event, SessionRestored):
            continue
        before, after = folded(events[: place - 1]), folded(events[:place])
        every = {one.turn for one in events[:place] if isinstance(one, TurnCommitted)}
        dropped = {number for one in events[:place] if isinstance(one, BlobsTombstoned) for number in one.turns}
        assert {one.number for one in (*after.turns, *after.undone)} == every
        assert after.every_payload.keys() == every - dropped
        assert after.payloads.keys() <= {one.number for one in after.turns}
        assert (after.last_turn, after.branches) == (before.last_turn, before.branches)
        if not event.to_seq:
            assert (after.status, list(after.turns), after.reward) == ("undone", [], None)
            continue
        then = folded(events[: event.to_seq])
        assert (after.turns, after.status, after.reward, after.note, after.annotations) == (
            then.turns,
            then.status,
            then.reward,
            then.note,
            then.annotations,
        )
    effective = [one.event.turn for one in in_effect(recorded(events)) if isinstance(one.event, TurnCommitted)]
    assert effective == [one.number for one in folded(events).turns]


def test_a_restore_gives_back_what_an_earlier_one_has_undone() -> None:
    events: list[Event] = [created()]
    for _ in range(2):
        events += turn(events)
    whole = folded(events)
    events += restoring(folded(events[:3]), "first")
    events += [*turn(events), SessionClosed()]
    undone = folded(events)
    assert ([one.number for one in undone.turns], [one.number for one in undone.undone]) == ([1, 3], [2])
    events += restoring(whole, "before")
    session = folded(events)
    assert (session.turns, session.payloads, session.status) == (whole.turns, whole.payloads, "open")
    assert [one.number for one in session.undone] == [3]


@pytest.mark.parametrize("reward", [None, 0.5])
def test_a_restore_gives_back_a_failure_with_its_reward(reward: float | None) -> None:
    given = [] if reward is None else [RewardAssigned(reward)]
    failed = SessionClosed(failed=Failure("engine", "it went away"))
    events: list[Event] = [created(), *given, failed]
    then = folded(events)
    events += [RewardAssigned(1.0), *restoring(then, "before")]
    session = folded(events)
    assert session.failed == failed.failed
    assert (session.reward and session.reward.reward) == reward
    opened = folded([*events, *restoring(folded(events[:1]), "first")])
    assert (opened.status, opened.failed) == ("open", None)


def test_a_restore_is_not_folded_from_a_later_state_than_it_goes_back_to() -> None:
    log = recorded([*grown([("turn", 0), ("turn", 0)]), SessionRestored("checkpoint", 3)])
    with pytest.raises(UnknownEvent, match="before what is known"):
        fold("s", log[5:], fold("s", log[:5]))
