"""Where a request joins a session, by example and against an oracle over plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Book, assistant, user

from app.domain.events import Matcher
from app.domain.rules import Plan
from app.errors import AppError, HistoryMismatch, RollbackTooDeep

A, B, C, D = user("a"), user("b"), user("c"), user("d")
X, Y, Z, W = assistant("x"), assistant("y"), assistant("z"), assistant("w")


def three_turns(window: int = 1, on_divergence: Literal["reject", "segment"] = "reject") -> Book:
    book = Book(window, on_divergence)
    book.turn([A], X)
    book.turn([A, X, B], Y)
    book.turn([A, X, B, Y, C], Z)
    return book


JOINS: list[tuple[str, int, list[dict[str, Any]], Plan]] = [
    ("extension", 0, [A, X, B, Y, C, Z, D], Plan(3, 6)),
    ("extension by tool results", 0, [A, X, B, Y, C, Z, {"role": "tool", "content": "7"}, D], Plan(3, 6)),
    ("extension with the client's own assistant message", 0, [A, X, B, Y, C, Z, W, D], Plan(3, 6)),
    ("nothing new", 0, [A, X, B, Y, C, Z], Plan(3, 6)),
    ("retry of the last turn", 1, [A, X, B, Y, C], Plan(2, 4, (3,))),
    ("new input instead of the last turn", 1, [A, X, B, Y, D], Plan(2, 4, (3,))),
    ("dropped assistant with a user error", 1, [A, X, B, Y, C, user("invalid tool call")], Plan(2, 4, (3,))),
    ("all of it again", 3, [A], Plan(0, 0, (1, 2, 3))),
    ("back two turns", 3, [A, X, D], Plan(1, 2, (2, 3))),
    ("back two turns, to a reply", 3, [A, X], Plan(1, 2, (2, 3))),
]


@pytest.mark.parametrize(("window", "messages", "plan"), [j[1:] for j in JOINS], ids=[j[0] for j in JOINS])
def test_a_request_joins(window: int, messages: list[dict[str, Any]], plan: Plan) -> None:
    assert three_turns(window).plan(messages) == plan
    if len(plan.discarded) > 0:
        with pytest.raises(RollbackTooDeep):
            three_turns(len(plan.discarded) - 1).plan(messages)


SYSTEM = {"role": "system", "content": "s"}

BEGINNINGS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("a system message in common", [SYSTEM, A], [SYSTEM, D]),
    ("a system message and the task in common", [SYSTEM, A], [SYSTEM, A, D]),
    ("a part of the input", [SYSTEM, A], [SYSTEM]),
    ("the client's own assistant message in common", [A, W, B], [A, W, D]),
    ("the client's own assistant message and nothing new", [A, W, B], [A, W]),
    ("a tool's result in common", [{"role": "tool", "content": "7"}, A], [{"role": "tool", "content": "7"}, D]),
]


@pytest.mark.parametrize("matcher", ["tolerant", "strict", "role_content_only"])
@pytest.mark.parametrize(("first", "messages"), [b[1:] for b in BEGINNINGS], ids=[b[0] for b in BEGINNINGS])
def test_a_request_with_nothing_sampled_in_common_is_never_a_rollback(
    first: list[dict[str, Any]], messages: list[dict[str, Any]], matcher: Matcher
) -> None:
    """What both have in common came from the client: it proves nothing about the turns that would be discarded."""
    refusing, keeping = Book(3, matcher=matcher), Book(3, "segment", matcher)
    for book in (refusing, keeping):
        book.turn(first, X)
        book.turn([*first, X, C], Y)
    with pytest.raises(HistoryMismatch):
        refusing.plan(messages)
    assert keeping.plan(messages) == Plan(2, 0)
    for book in (refusing, keeping):
        assert book.plan(first) == Plan(0, 0, (1, 2)), "an input that is repeated"
        assert book.plan([*first, X, D]) == Plan(1, len(first) + 1, (2,)), "a sampled message in common"


REFUSED: list[tuple[str, int, list[dict[str, Any]], type[AppError]]] = [
    ("retry, window 0", 0, [A, X, B, Y, C], RollbackTooDeep),
    ("back two turns, window 1", 1, [A, X, D], RollbackTooDeep),
    ("the first turn's input, window 2", 2, [A], RollbackTooDeep),
    ("another conversation", 3, [D], HistoryMismatch),
    ("another conversation, window 0", 0, [D], HistoryMismatch),
    ("the first turn's input and more", 3, [A, D], HistoryMismatch),
    ("edited assistant", 3, [A, X, B, W, C, Z, D], HistoryMismatch),
    ("edited last assistant", 3, [A, X, B, Y, C, W, D], HistoryMismatch),
    ("dropped user message", 3, [A, X, Y, C, Z, D], HistoryMismatch),
    ("edited user message before replies", 3, [A, X, D, Y, C, Z], HistoryMismatch),
    ("a history that is not ours", 3, [D, X, B], HistoryMismatch),
    ("deep and with a foreign assistant", 0, [D, W, B], HistoryMismatch),
]


@pytest.mark.parametrize(("window", "messages", "error"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_request_is_refused(window: int, messages: list[dict[str, Any]], error: type[AppError]) -> None:
    with pytest.raises(error, match=r'Create the session with .*history="tree"'):
        three_turns(window).plan(messages)
    assert three_turns(window, "segment").plan(messages) == Plan(3, 0), "a segment, where the session asks for it"


def test_a_refusal_tells_no_content() -> None:
    book = Book(0)
    book.turn([user("sesame")], assistant("secret"))
    for messages in ([user("sesame")], [user("open"), assistant("hidden"), user("door")]):
        with pytest.raises((RollbackTooDeep, HistoryMismatch)) as caught:
            book.plan(messages)
        assert not any(word in str(caught.value) for word in ("sesame", "secret", "open", "hidden", "door"))


class Oracle:
    """The same rule over plain lists: (turn number, whole history after it) of the newest segment's turns."""

    def __init__(self, window: int, on_divergence: str) -> None:
        self.window, self.on_divergence = window, on_divergence
        self.count = 0
        self.segments: list[list[tuple[int, list[dict[str, Any]]]]] = []

    def plan(self, messages: Sequence[dict[str, Any]]) -> Plan | str:
        if not self.segments:
            return Plan(0, 0)
        turns = self.segments[-1]
        leaf, history = turns[-1]
        if list(messages[: len(history)]) == history:
            return Plan(leaf, len(history))
        kept = [turn for turn in turns if list(messages[: len(turn[1])]) == turn[1]]
        lost = tuple(number for number, _ in turns[len(kept) :])
        equal = 0
        while equal < min(len(messages), len(history)) and messages[equal] == history[equal]:
            equal += 1
        refusal = None
        if any(message["role"] == "assistant" for message in messages[equal:]) or (
            not kept and list(messages) != turns[0][1][:-1]
        ):
            refusal = "mismatch"
        elif len(lost) > self.window:
            refusal = "deep"
        if refusal is not None:
            return Plan(leaf, 0) if self.on_divergence == "segment" else refusal
        if kept:
            return Plan(kept[-1][0], len(kept[-1][1]), lost)
        before = self.segments[-2][-1][0] if len(self.segments) > 1 else 0
        return Plan(before, 0, lost)

    def commit(self, plan: Plan, history: list[dict[str, Any]]) -> None:
        self.count += 1
        if self.segments:
            self.segments[-1] = [turn for turn in self.segments[-1] if turn[0] not in plan.discarded]
        if plan.base_messages == 0:
            self.segments = [segment for segment in self.segments if segment] + [[]]
        self.segments[-1].append((self.count, history))


def respelled(message: dict[str, Any], how: int) -> dict[str, Any]:
    """Another spelling that the tolerant matcher takes for the same message."""
    text = message["content"]
    return [
        message,
        {**message, "reasoning_content": "hm", "tool_calls": []},
        {"content": f" {text}\n", "role": message["role"]},
        {**message, "content": [{"type": "text", "text": text}]},
    ][how]


@settings(max_examples=cases(300), deadline=None)
@given(st.data(), st.sampled_from([0, 1, 3]), st.sampled_from(["reject", "segment"]))
def test_match_agrees_with_an_oracle(
    data: st.DataObject, window: int, on_divergence: Literal["reject", "segment"]
) -> None:
    book, oracle = Book(window, on_divergence), Oracle(window, on_divergence)
    texts, roles = st.sampled_from("abc"), st.sampled_from(["user", "user", "user", "assistant"])
    for _ in range(data.draw(st.integers(1, 7))):
        histories = [history for segment in oracle.segments for _, history in segment] or [[]]
        base = data.draw(st.sampled_from([*histories[-2:], histories[-1]]))
        cut = data.draw(st.sampled_from([len(base), len(base), len(base) - 1, len(base) - 2, len(base) // 2, 0]))
        new = data.draw(st.lists(st.tuples(roles, texts), max_size=2))
        messages = [*base[: max(cut, 0)], *({"role": role, "content": text} for role, text in new)] or [A]
        sent = [respelled(message, data.draw(st.integers(0, 3))) for message in messages]
        expected = oracle.plan(messages)
        if isinstance(expected, str):
            with pytest.raises(HistoryMismatch if expected == "mismatch" else RollbackTooDeep):
                book.plan(sent)
            continue
        assert book.plan(sent) == expected
        reply = assistant(data.draw(texts))
        book.turn(sent, reply)
        oracle.commit(expected, [*messages, reply])
        live = tuple(number for segment in oracle.segments for number, _ in segment)
        assert book.session.path == live
