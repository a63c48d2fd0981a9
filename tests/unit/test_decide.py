"""Commands: events, or an error that changes nothing."""

from __future__ import annotations

import math

import pytest
from making import SESSION, Book, assistant, user

from app.domain.decide import assign_reward, token_parent
from app.domain.events import RewardAssigned, SessionClosed, SessionErased
from app.domain.rules import Plan
from app.errors import InvalidRequest, SessionNotFound
from app.errors import SessionClosed as Closed


def one_turn() -> Book:
    book = Book()
    book.turn([user("a")], assistant("x"), prompt=[1, 2], output=[3])
    return book


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
