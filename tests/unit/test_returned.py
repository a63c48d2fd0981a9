"""Replies that a client returns in another spelling, or leaves out: reasoning in the text, and empty replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from making import SESSION, Book, assistant, user
from tables import rows

from app.domain.canonical import REASONING_TAGS, without_reasoning
from app.domain.events import History, Matcher
from app.domain.rules import Plan, TreeIndex
from app.domain.session import fold
from app.errors import HistoryMismatch

Message = dict[str, Any]

A, B, C = user("a"), user("b"), user("c")
HI = assistant("Hi")
ONE, TWO = assistant("<think>1</think>Hi"), assistant("<think>2</think>Hi")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "22"}


TEXTS: list[tuple[str, Any, Any]] = [
    *rows("returned_texts"),
    *((f"{opening} {closing}", f"{opening}hm{closing}Hi", "Hi") for opening, closing in REASONING_TAGS),
    *((f"{closing} alone", f"hm{closing}Hi", "Hi") for _, closing in REASONING_TAGS),
]


@pytest.mark.parametrize(("content", "bare"), [t[1:] for t in TEXTS], ids=[t[0] for t in TEXTS])
def test_leading_reasoning_is_left_out_of_content(content: Any, bare: Any) -> None:
    assert without_reasoning({"role": "assistant", "content": content})["content"] == bare


RETURNS: list[tuple[str, Message, Message]] = rows("returned_returns")
IDS = [r[0] for r in RETURNS]
HISTORIES: tuple[History, ...] = ("linear", "tree")


def reloaded(book: Book) -> Book:
    """The same session as another process reads it."""
    session = fold(SESSION, book.events)
    assert session is not None
    book._session, book.index = session, TreeIndex(session.turns)
    return book


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("reply", "returned"), [r[1:] for r in RETURNS], ids=IDS)
def test_reasoning_may_be_moved_or_left_out(history: History, reply: Message, returned: Message) -> None:
    book = Book(history=history)
    book.turn([A], reply)
    assert reloaded(book).plan([A, returned, B]) == Plan(1, 2)
    book.turn([A, returned, B], reply)
    for first in (returned, reply):
        for second in (returned, reply):
            assert reloaded(book).plan([A, first, B, second, C]) == Plan(2, 4)
    assert {turn.branch for turn in book.session.turns} == {0}


@pytest.mark.parametrize("matcher", ["strict", "role_content_only"])
@pytest.mark.parametrize(("reply", "returned"), [r[1:] for r in RETURNS if r[1]["content"] != r[2]["content"]])
def test_other_matchers_compare_all_of_the_text(matcher: Matcher, reply: Message, returned: Message) -> None:
    book = Book(matcher=matcher)
    book.turn([A], reply)
    with pytest.raises(HistoryMismatch):
        book.plan([A, returned, B])


def test_a_reply_that_is_carried_elsewhere_may_be_respelled_there() -> None:
    book = Book(history="tree")
    book.turn([A], ONE)
    for spelling in (ONE, HI, TWO):
        assert book.plan([B, spelling, C]) == Plan(0, 0), "it was sampled behind another message"
    assert book.turn([B, HI, C], assistant("on")).branch_cause == "compaction"
    assert book.session.turn(2).carries == 1
    for spelling in (ONE, HI, TWO):
        assert book.plan([B, spelling, C, assistant("on"), A]) == Plan(2, 4)


def siblings(*replies: tuple[Message, str | None]) -> Book:
    book = Book(history="tree")
    for reply, agent_id in replies:
        book.turn([A], reply, agent_id=agent_id)
    return book


def test_an_exact_spelling_wins() -> None:
    book = siblings((ONE, None), (HI, None), (TWO, None))
    assert book.plan([A, HI, B]) == Plan(2, 2)
    assert book.plan([A, ONE, B]) == Plan(1, 2)


def test_of_several_the_agents_own_is_meant_or_none() -> None:
    book = siblings((ONE, "k"), (TWO, "m"))
    assert [book.plan([A, HI, B], agent).parent for agent in ("k", "m", None)] == [1, 2, 0]
    book = siblings((ONE, None), (TWO, None))
    assert book.plan([A, HI, B]) == Plan(0, 0)
    assert siblings((ONE, None), (ONE, None)).plan([A, HI, B]) == Plan(2, 2), "the same text twice"


def test_of_several_the_one_that_was_continued_so_is_meant() -> None:
    calls = [{**one, "tool_calls": [CALL]} for one in (ONE, TWO)]
    book = siblings((calls[0], None), (calls[1], None))
    bare = {**HI, "tool_calls": [CALL]}
    assert book.plan([A, bare, TOOL]) == Plan(0, 0)
    book.turn([A, calls[0], TOOL], assistant("22"))
    assert book.plan([A, bare, TOOL]) == Plan(1, 2)
    assert book.plan([A, bare, TOOL, assistant("22"), B]) == Plan(3, 4)
    assert book.plan([A, bare, {**TOOL, "content": "7"}]) == Plan(0, 0)
    book = siblings((ONE, None))
    book.turn([A, HI, B], assistant("on"))
    book.turn([A], TWO)
    assert book.plan([A, assistant("Hi "), B, assistant("on"), C]) == Plan(2, 4)


def test_a_linear_session_looks_at_its_live_path() -> None:
    book = Book(1)
    book.turn([A], ONE)
    book.turn([A], TWO)
    assert book.plan([A, HI, B]) == Plan(2, 2)
    book.turn([A, HI, B], HI)
    book.turn([A, HI, C], HI)
    assert book.session.path == (2, 4)
    assert book.plan([A, HI, B]) == Plan(2, 2, (4,))


def test_a_superseded_turns_request_tells_what_its_messages_are() -> None:
    """Its bytes begin the request further than those of any live turn."""
    book = Book(2)
    book.turn([A], ONE)
    book.turn([A, HI, B], ONE)
    book.turn([A, HI, B, HI, C], ONE)
    book.turn([A, HI, B, HI, user("d")], ONE)
    assert book.session.path == (1, 2, 4)
    assert book.plan([A, HI, B, HI, C, user("e")]) == Plan(2, 4, (4,))


EMPTY = assistant("")
EMPTIES = [EMPTY, {"role": "assistant", "content": None, "reasoning_content": "hm"}, assistant("<think>hm</think>\n")]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("empty", EMPTIES)
def test_an_empty_reply_that_was_left_out_counts_as_sent(history: History, empty: Message) -> None:
    book = Book(history=history)
    book.turn([A], empty)
    assert reloaded(book).plan([A, B]) == Plan(1, 2)
    first = book.turn([A, B], HI)
    assert (first.base_messages, first.new_messages, len(first.message_hashes)) == (2, 1, 2)
    assert reloaded(book).plan([A, B, HI, C]) == Plan(2, 4)
    assert book.plan([A, EMPTY, B, HI, C]) == Plan(2, 4), "it may as well be sent"
    book.turn([A, B, HI, C], empty)
    assert reloaded(book).plan([A, B, HI, C, A, B]) == Plan(3, 6)
    book.turn([A, B, HI, C, A, B], HI)
    assert reloaded(book).plan([A, B, HI, C, A, B, HI, A]) == Plan(4, 9)
    assert {turn.branch for turn in book.session.turns} == {0}


@pytest.mark.parametrize("history", HISTORIES)
def test_an_equal_request_is_a_retry(history: History) -> None:
    book = Book(history=history)
    book.turn([A], EMPTY)
    assert book.plan([A]).base_messages == 0
    book.turn([A, B], HI)
    assert (book.plan([A, B]).parent, book.plan([A, B]).base_messages) == (1, 2)
    assert book.incoming([A, B]).whole_hash == book.incoming([A, EMPTY, B]).whole_hash


def test_only_the_newest_childless_reply_is_taken_as_left_out() -> None:
    assert siblings((EMPTY, None), (HI, None)).plan([A, B]) == Plan(0, 0)
    assert siblings((HI, None), (EMPTY, None)).plan([A, B]) == Plan(2, 2)
    assert siblings((EMPTY, "k"), (HI, "m")).plan([A, B], "k") == Plan(1, 2)
    assert siblings((EMPTY, "k")).plan([A, B], "m") == Plan(0, 0)
    assert siblings((EMPTY, None)).plan([A, HI, B]) == Plan(0, 0), "a reply of its own"
    book = siblings((EMPTY, None))
    book.turn([A, B], HI)
    assert book.plan([A, C]) == Plan(0, 0)
    book = siblings((EMPTY, None), (EMPTY, None))
    book.turn([A, B], HI)
    assert book.session.turn(3).parent == 2
    assert book.plan([A, B]) == Plan(1, 2)
    assert book.plan([A, B, HI, C]) == Plan(3, 4)


def test_a_deeper_turn_wins_over_an_empty_reply() -> None:
    book = Book(history="tree")
    book.turn([A, B], HI)
    book.turn([A], EMPTY)
    assert book.plan([A, B, HI, C]) == Plan(1, 3)
    assert book.plan([A, B]) == Plan(0, 0)


def test_a_segment_begins_with_what_the_client_sent() -> None:
    book = Book(1, on_divergence="segment")
    book.turn([A], EMPTY)
    book.turn([A, B], HI)
    sent = [A, B, assistant("never"), C]
    request = book.incoming(sent)
    plan = request.join(book.session, book.index, None)
    assert (plan, len(request.new(plan))) == (Plan(2, 0), 4)
    assert book.turn(sent, HI).new_messages == 4
    assert book.plan([*sent, HI, A]) == Plan(3, 5)


REPLIES: Sequence[Message] = (
    HI,
    assistant("<think>hm</think>Hi"),
    assistant("hm</think>\n\nHi"),
    {**HI, "reasoning_content": "hm"},
    {**assistant("[THINK]hm[/THINK]"), "tool_calls": [CALL]},
    *EMPTIES,
)
MANNERS: Sequence[Callable[[Message], list[Message]]] = (
    lambda reply: [reply],
    lambda reply: [{**without_reasoning(reply), "reasoning_content": "hm"}],
    lambda reply: [{**reply, "content": f"<think>\n\nhm\n\n</think>{without_reasoning(reply)['content'] or ''}"}],
    lambda reply: (
        [] if not (reply.get("tool_calls") or str(without_reasoning(reply)["content"] or "").strip()) else [reply]
    ),
)


@settings(max_examples=cases(300), deadline=None)
@given(st.data(), st.sampled_from(HISTORIES))
def test_a_conversation_stays_one_branch_however_its_replies_come_back(data: st.DataObject, history: History) -> None:
    book = Book(history=history)
    manner = st.sampled_from(MANNERS)
    sent: list[Message] = []
    replies: list[Message] = []
    news: list[list[Message]] = []
    for number in range(1, data.draw(st.integers(2, 6)) + 1):
        is_fixed = data.draw(st.booleans())
        if not is_fixed:
            sent = [
                message
                for new, reply in zip(news, replies, strict=True)
                for message in (*new, *data.draw(manner)(reply))
            ]
        elif replies:
            sent = [*sent, *data.draw(manner)(replies[-1])]
        called = replies and replies[-1].get("tool_calls")
        news.append([TOOL] if called else [user(data.draw(st.sampled_from("ab")))])
        sent = [*sent, *news[-1]]
        assert book.plan(sent).parent == number - 1
        replies.append(data.draw(st.sampled_from(REPLIES)))
        book.turn(sent, replies[-1])
        turn = book.session.turn(number)
        assert (turn.parent, turn.branch, turn.message_count) == (number - 1, 0, sum(map(len, news)) + number)
        if data.draw(st.booleans()):
            reloaded(book)
