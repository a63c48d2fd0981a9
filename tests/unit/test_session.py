"""The fold: deterministic, the same from any point, refusing what does not follow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import SESSION, Book, assistant, user

from app.domain.events import (
    BlobRef,
    Event,
    Recorded,
    RewardAssigned,
    RolledBack,
    SessionClosed,
    SessionErased,
    TurnAbandoned,
    TurnCommitted,
    UnknownEvent,
)
from app.domain.rules import rolled_back
from app.domain.session import RECENT_BLOBS, OpenTurn, apply, decode_session, encode_session, fold


def two_turns() -> Book:
    book = Book(window=1)
    book.turn([user("a")], assistant("x"), retry_key="k1")
    book.turn([user("a"), assistant("x"), user("b")], assistant("y"), output=[4, 5])
    return book


def test_an_empty_log_is_no_session() -> None:
    assert fold(SESSION, []) is None


def test_an_open_turn_carries_its_fence_and_ends_in_each_way() -> None:
    book = two_turns()
    messages = [*book.made[2].history, user("c")]
    fence = book.open(book.plan(messages), retry_key="k")
    assert book.session.open_turn == OpenTurn(3, 2, fence, 1, "00", "k")
    for end in (TurnAbandoned(3, fence, "owner_dead"), SessionClosed(), SessionErased()):
        after = apply(book.session, Recorded(fence + 1, 9.0, end), SESSION)
        assert (after.open_turn, after.path, after.version) == (None, (1, 2), fence + 1)
    book.add(TurnAbandoned(3, fence, "shutdown"))
    book.reject(messages)
    assert (book.session.open_turn, len(book.session.turns)) == (None, 2)


def test_blobs_are_numbered_for_good_and_only_the_newest_are_compared() -> None:
    book = Book()
    book.turn([user("a")], assistant("x"))
    committed = book.events[-1].event
    for number in range(RECENT_BLOBS + 3):
        state = book.session
        event = msgspec.structs.replace(
            committed, turn=len(state.turns) + 1, new_blobs=(BlobRef(number, "params", 2, f"{number:02x}"),)
        )
        book.add(event)
    assert book.session.blob_count == RECENT_BLOBS + 3
    assert [ref.number for ref in book.session.blobs] == list(range(3, RECENT_BLOBS + 3))


def test_a_gap_a_repeat_and_a_foreign_beginning_are_refused() -> None:
    events = two_turns().events
    for bad in (events[1:], [events[0], *events[2:]], [*events[:3], events[2]], [events[0], *events]):
        with pytest.raises(UnknownEvent):
            fold(SESSION, bad)
    with pytest.raises(UnknownEvent):
        fold(SESSION, [Recorded(1, 0.0, SessionClosed())])
    with pytest.raises(UnknownEvent):
        fold(SESSION, [events[0], Recorded(2, 0.0, events[0].event)])


def test_a_long_session_folds_in_linear_size() -> None:
    """The state of a turn does not grow with the prompt: ids and counts, never content."""
    book = Book()
    history: list[dict[str, Any]] = []
    sizes = []
    for number in range(60):
        history = [*history, user(f"question {number} " * 50)]
        book.turn(history, assistant("answer " * 50), output=list(range(50)))
        history = book.made[number + 1].history
        sizes.append(len(encode_session(book.session)))
    steps = [after - before for before, after in pairwise(sizes)]
    assert max(steps) - min(steps) < 40
    assert max(steps) < 768


STEPS: dict[str, Callable[[Book], None]] = {
    "extend": lambda book: _turn(book, _history(book), user("n")),
    "retry": lambda book: _retry(book, _history(book)),
    "reject": lambda book: book.reject([*_history(book), user("q")]),
    "abandon": lambda book: book.add(_abandoned(book)),
    "reward": lambda book: book.add(RewardAssigned(0.5, {"a": 1.0}, 1 if book.session.turns else None)),
}


def _history(book: Book) -> list[dict[str, Any]]:
    return book.made[book.session.path[-1]].history if book.session.path else []


def _turn(book: Book, base: list[dict[str, Any]], new: dict[str, Any]) -> None:
    book.turn([*base, new], assistant(str(len(book.events))), finish_reason=None)


def _retry(book: Book, history: list[dict[str, Any]]) -> None:
    """Another input in place of the last turn's; of the first turn the same: another would be another conversation."""
    if len(history) > 2:
        _turn(book, history[:-2], user("m"))
    else:
        _turn(book, [], history[0] if history else user("m"))


def _abandoned(book: Book) -> Event:
    fence = book.open(book.plan([*_history(book), user("z")]))
    return TurnAbandoned(book.session.last_turn, fence, "disconnect")


LOGS = st.lists(st.sampled_from(sorted(STEPS)), max_size=8)


def log_of(steps: list[str]) -> Book:
    book = Book(window=3)
    for step in steps:
        STEPS[step](book)
    return book


@settings(max_examples=60, deadline=None)
@given(LOGS)
def test_the_fold_is_the_same_from_any_snapshot(steps: list[str]) -> None:
    book = log_of(steps)
    whole = fold(SESSION, book.events)
    assert whole == book.session
    assert whole is not None
    assert whole.version == len(book.events)
    for cut in range(1, len(book.events) + 1):
        before = fold(SESSION, book.events[:cut])
        assert before is not None
        snapshot = decode_session(encode_session(before))
        assert snapshot == before
        assert fold(SESSION, book.events[cut:], snapshot) == whole


@settings(max_examples=60, deadline=None)
@given(LOGS)
def test_what_every_log_keeps(steps: list[str]) -> None:
    book = log_of(steps)
    session = book.session
    committed = [recorded for recorded in book.events if isinstance(recorded.event, TurnCommitted)]
    assert [turn.number for turn in session.turns] == [recorded.event.turn for recorded in committed]
    assert [turn.seq for turn in session.turns] == [recorded.seq for recorded in committed]
    assert list(session.path) == sorted(set(session.path))
    parents = [session.turn(number).parent for number in session.path]
    assert parents == [0, *session.path][: len(parents)]
    assert session.open_turn is None
    rolled = {
        two.seq: len(one.event.discarded) for one, two in pairwise(book.events) if isinstance(one.event, RolledBack)
    }
    assert [rolled_back(session, turn.number) for turn in session.turns] == [
        rolled.get(turn.seq, 0) for turn in session.turns
    ]
