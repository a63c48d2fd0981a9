"""Where a completion's prompt joins its session: by example, and against an oracle over plain text and lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from helpers.log import committed, created, digest, opened
from hypothesis import given
from hypothesis import strategies as st
from making import validated

from app.domain.completion import RequestPrompt
from app.domain.decide import TurnBlobs, commit_turn, open_turn
from app.domain.events import Event, Recorded, SessionConfig, SessionCreated, TurnCommitted
from app.domain.rules import Plan, TreeIndex
from app.domain.session import Session, fold
from app.errors import AppError, HistoryMismatch, RollbackTooDeep
from app.protocols.completions import parse_completion
from workers.parse import token_text

Prompt = str | list[int]


def incoming(prompt: Prompt) -> RequestPrompt:
    return RequestPrompt(parse_completion(json.dumps({"prompt": prompt}).encode()))


class Story:
    """A session of completions, as the service writes it; every turn answers with the same two ids."""

    def __init__(self, window: int = 1, on_divergence: Literal["reject", "segment"] = "reject") -> None:
        self._events: list[Recorded] = []
        self.said: dict[int, tuple[Prompt, Prompt]] = {}
        self._add(SessionCreated(SessionConfig(rollback_window=window, on_divergence=on_divergence), body_hash="00"))

    @property
    def session(self) -> Session:
        found = fold("s", self._events)
        assert found is not None
        return found

    def _add(self, *events: Event) -> None:
        self._events += [Recorded(seq, 0.0, event) for seq, event in enumerate(events, len(self._events) + 1)]

    def plan(self, prompt: Prompt) -> Plan:
        return incoming(prompt).join(self.session, TreeIndex(self.session.turns), None)

    def turn(self, prompt: Prompt, answer: str = "x", ids: Sequence[int] = (8, 9)) -> Plan:
        arrived = incoming(prompt)
        plan = arrived.join(self.session, TreeIndex(self.session.turns), None)
        claim = open_turn(self.session, plan, incarnation=1, body_hash="00", retry_key=None, protocol="completions")
        self._add(claim)
        before = self.session.turn(plan.parent).token_count if plan.base_messages else 0
        tokens = [*(prompt if isinstance(prompt, list) else [1] * (before + 1)), *ids]
        reply = validated(tokens, before, len(ids), arrived.reply_hashes(json.dumps(answer).encode())[0])
        session = self.session
        index = TreeIndex(session.turns)
        events = commit_turn(session, index, claim, session.version, plan, arrived, reply, blobs=TurnBlobs(0))
        self._add(*events)
        said: Prompt = [*prompt, *ids] if isinstance(prompt, list) else prompt + answer
        self.said[claim.turn] = (prompt, said)
        return plan


def told(window: int = 1, on_divergence: Literal["reject", "segment"] = "reject") -> Story:
    """ "a" -> "ax", "axb" -> "axby", "axbyc" -> "axbycz"."""
    story = Story(window, on_divergence)
    for prompt, answer in (("a", "x"), ("axb", "y"), ("axbyc", "z")):
        story.turn(prompt, answer)
    return story


JOINS: list[tuple[str, int, Plan]] = [
    ("axbyczd", 0, Plan(3, 6)),
    ("axbycz", 0, Plan(3, 6)),
    ("axbyc", 1, Plan(2, 4, (3,))),
    ("axbyd", 1, Plan(2, 4, (3,))),
    ("axby", 1, Plan(2, 4, (3,))),
    ("axb", 2, Plan(1, 2, (2, 3))),
    ("axd", 2, Plan(1, 2, (2, 3))),
    ("a", 3, Plan(0, 0, (1, 2, 3))),
]


@pytest.mark.parametrize(("prompt", "window", "plan"), JOINS, ids=[join[0] for join in JOINS])
def test_a_prompt_joins_within_the_window_and_no_further(prompt: str, window: int, plan: Plan) -> None:
    assert told(window).plan(prompt) == plan
    if plan.discarded:
        with pytest.raises(RollbackTooDeep):
            told(window - 1).plan(prompt)
        assert told(window - 1, "segment").plan(prompt) == Plan(3, 0)


@pytest.mark.parametrize("prompt", ["", "b", "A", "xa", "á", [1, 9], [5]])
def test_another_prompt_is_a_mismatch_or_a_segment(prompt: Prompt) -> None:
    with pytest.raises(HistoryMismatch):
        told(9).plan(prompt)
    assert told(9, "segment").plan(prompt) == Plan(3, 0)


@pytest.mark.parametrize(
    ("first", "ids", "second", "other"),
    [("a", [], "ab", "ad"), ("a", [9], "ab", "ad"), ([1], [], [1, 2], [1, 3])],
    ids=["text", "text that shows no end token", "ids"],
)
def test_an_output_of_nothing_is_nothing_in_common(
    first: Prompt, ids: list[int], second: Prompt, other: Prompt
) -> None:
    """What is left in common is a prompt, as with a chat that shares a system message alone."""
    story = Story(9)
    story.turn(first, "", ids)
    story.turn(second, "c", [8])
    with pytest.raises(HistoryMismatch):
        story.plan(other)
    assert story.plan(first) == Plan(0, 0, (1, 2)), "a turn's own prompt"
    said = "abc" if isinstance(second, str) else [1, 2, 8]
    story.turn(said, "d", [7])
    assert story.plan(said) == Plan(2, story.session.turn(2).message_count, (3,)), "an output in common"


def test_ids_continue_what_was_text_by_its_tokens() -> None:
    story = Story()
    story.turn("a", ids=[8, 9])
    assert story.plan([1, 8, 9, 4]) == Plan(1, 2)
    with pytest.raises(HistoryMismatch):
        story.plan([1, 8, 4])


def test_text_does_not_continue_what_was_ids() -> None:
    story = Story()
    story.turn([1, 2])
    with pytest.raises(HistoryMismatch):
        story.plan("1,2,8,9,")


def test_new_text_is_one_message_and_new_ids_none() -> None:
    story = told()
    for prompt, new in (("axbyczd", [b'"d"']), ("axbycz", []), ("axby“ü”", ['"“ü”"'.encode()])):
        arrived = incoming(prompt)
        assert arrived.new(arrived.join(story.session, TreeIndex(), None)) == new
        assert len(arrived) == arrived.join(story.session, TreeIndex(), None).base_messages + len(new)
    ids = Story()
    ids.turn([1, 2])
    arrived = incoming([1, 2, 8, 9, 3])
    assert arrived.new(arrived.join(ids.session, TreeIndex(), None)) == []


def expected(story: Story, prompt: Prompt, window: int) -> Plan | type[AppError]:
    """By plain comparison of all that was said, from the newest turn on."""
    path = story.session.path
    for place in range(len(path) - 1, -1, -1):
        turn = story.session.turn(path[place])
        asked, said = story.said[turn.number]
        if type(said) is type(prompt) and prompt[: len(said)] == said:
            gone = path[place + 1 :]
            plan = Plan(turn.number, turn.message_count, gone)
        elif type(asked) is type(prompt) and prompt == asked:
            gone = path[place:]
            plan = Plan(turn.parent, turn.base_messages, gone)
        else:
            continue
        return plan if len(gone) <= window else RollbackTooDeep
    return HistoryMismatch if path else Plan(0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), max_size=2)), max_size=8),
    st.integers(0, 3),
    st.booleans(),
)
def test_against_plain_comparison(steps: list[tuple[int, list[int]]], window: int, as_ids: bool) -> None:
    story = Story(window)
    for back, new in steps:
        old = [prompt for pair in story.said.values() for prompt in pair]
        begin: Any = old[-1 - back] if back < len(old) else ([7] if as_ids else "q")
        prompt: Prompt = [*begin, *new] if as_ids else begin + "".join("ab"[one] for one in new)
        wanted = expected(story, prompt, window)
        if isinstance(wanted, Plan):
            assert story.turn(prompt, "xy"[len(new) % 2], [8, len(new)]) == wanted
            continue
        with pytest.raises(wanted):
            story.plan(prompt)


def done(
    number: int, before: int, tokens: Sequence[int], *, text: str | None = None, prompt: str | list[int] = ""
) -> TurnCommitted:
    """Turn `number` after `before` messages; `text` is all that was said by its end, None where it came as ids."""
    sequence = token_text(tokens)
    said = (digest("reply"),) if text is None else (digest("new"), f"{len(text)}:{digest(text)}")
    return committed(
        number,
        number - 1,
        2 * number,
        protocol="completions",
        base_messages=before,
        new_messages=len(said) - 1,
        message_hashes=said,
        client_hash=incoming(prompt).client_hash,
        tokens_hash=hashlib.sha256(sequence).hexdigest(),
        tokens_text_bytes=len(sequence),
    )


def session_of(*turns: TurnCommitted) -> Session:
    events = [created(), *(event for turn in turns for event in (opened(turn.turn, turn.parent), turn))]
    found = fold("s", [Recorded(seq, 0.0, event) for seq, event in enumerate(events, 1)])
    assert found is not None
    return found


def test_text_behind_a_turn_that_came_as_ids_discards_nothing() -> None:
    """What the newest turn said is not known as text, so nobody can tell that this prompt leaves it out."""
    session = session_of(done(1, 0, [1, 2], text="abc"), done(2, 2, [1, 2, 3, 4]))
    for prompt in ("abcde and more", "abc", "ab"):
        with pytest.raises(HistoryMismatch):
            incoming(prompt).join(session, TreeIndex(), None)
    assert incoming([1, 2, 3, 4, 5]).join(session, TreeIndex(), None) == Plan(2, 3)
    assert incoming([1, 2, 5]).join(session, TreeIndex(), None) == Plan(1, 2, (2,))


@pytest.mark.parametrize("new", [0, 3, 90])
def test_ids_continue_the_leaf_though_an_earlier_turn_had_more_of_them(new: int) -> None:
    long, short = list(range(100, 140)), list(range(500, 510))
    session = session_of(done(1, 0, long, text="abc"), done(2, 2, short, text="abcdef"))
    assert incoming([*short, *[7] * new]).join(session, TreeIndex(), None) == Plan(2, 4)
    assert incoming([*long, *[7] * new]).join(session, TreeIndex(), None) == Plan(1, 2, (2,))


def test_text_that_spells_ids_is_not_those_ids() -> None:
    session = session_of(done(1, 0, [1, 2, 3, 8], prompt=[1, 2, 3]))
    for text in ("1,2,3,", "1,2,3", "ids:1,2,3"):
        assert incoming(text).client_hash != incoming([1, 2, 3]).client_hash
        with pytest.raises(HistoryMismatch):
            incoming(text).join(session, TreeIndex(), None)
    assert incoming([1, 2, 3]).join(session, TreeIndex(), None) == Plan(0, 0, (1,))
