"""Commands: events, or an error that changes nothing."""

from __future__ import annotations

import math

import pytest
from making import SESSION, Book, assistant, user

from app.domain.decide import assign_reward, open_turn, token_parent
from app.domain.events import RewardAssigned, RolledBack, SessionClosed, SessionErased, TurnCommitted
from app.domain.rules import Plan
from app.errors import InvalidRequest, SessionNotFound
from app.errors import SessionClosed as Closed
from app.sessions.cache import CacheEntry, require_open


def one_turn() -> Book:
    book = Book()
    book.turn([user("a")], assistant("x"), prompt=[1, 2], output=[3])
    return book


def test_only_an_open_session_takes_a_turn() -> None:
    book = one_turn()
    entry = CacheEntry(book.session)
    assert require_open(entry, SESSION) is entry
    with pytest.raises(SessionNotFound):
        require_open(None, SESSION)
    for event in (SessionClosed(), SessionErased()):
        book.add(event)
        with pytest.raises(Closed):
            require_open(CacheEntry(book.session), SESSION)


def test_a_turn_gets_the_next_number_also_after_a_rollback() -> None:
    book = one_turn()
    opened = open_turn(book.session, Plan(0, 0, (1,)), incarnation=7, body_hash="ff", retry_key="k")
    assert (opened.turn, opened.parent, opened.incarnation, opened.retry_key) == (2, 0, 7, "k")


def test_a_replacing_turn_rolls_back_in_its_own_commit() -> None:
    book = one_turn()
    book.turn([user("a")], assistant("y"), prompt=[5], output=[6])
    assert [event.event for event in book.events if isinstance(event.event, RolledBack)] == [RolledBack(0, (1,))]
    assert isinstance(book.events[-2].event, RolledBack)
    committed = book.events[-1].event
    assert isinstance(committed, TurnCommitted)
    assert (committed.segment, committed.segment_cause, committed.parent, committed.fence) == (0, None, 0, 4)


def test_only_a_continued_history_continues_tokens() -> None:
    book = one_turn()
    assert token_parent(book.session, Plan(1, 2)) == book.session.turn(1)
    assert token_parent(book.session, Plan(1, 0)) is None
    assert token_parent(book.session, Plan(0, 0)) is None


def test_rewards() -> None:
    session = one_turn().session
    assert assign_reward(session, SESSION, 1.0, {"a": 2.0}, 1) == RewardAssigned(1.0, {"a": 2.0}, 1)
    for reward, components, turn in [
        (math.nan, {}, None),
        (math.inf, {}, None),
        (1.0, {"a": math.nan}, None),
        (1.0, {}, 0),
        (1.0, {}, 2),
        (1.0, {}, -1),
    ]:
        with pytest.raises(InvalidRequest):
            assign_reward(session, SESSION, reward, components, turn)


def test_a_closed_session_takes_rewards_and_an_erased_one_does_not() -> None:
    book = one_turn()
    book.add(SessionClosed())
    assert assign_reward(book.session, SESSION, 1.0, {}, None) == RewardAssigned(1.0)
    book.add(SessionErased())
    with pytest.raises(Closed):
        assign_reward(book.session, SESSION, 1.0, {}, None)
    with pytest.raises(SessionNotFound):
        assign_reward(None, SESSION, 1.0, {}, None)
