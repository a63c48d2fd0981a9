"""Weight versions: spans of joined replies, the flag of a version that went backwards, and staleness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from making import Book, assistant, samples, user

from app.domain.events import TurnCommitted
from app.domain.samples import Sample, TurnTokens
from app.export.parts import session_excluded
from app.export.query import ExportQuery
from app.export.rows import Known
from workers.reply import Part, VersionSpan

Spans = Sequence[tuple[str, int, int]]


def book_of(*turns: Spans) -> Book:
    """A session with a turn for each, whose output has as many tokens as its spans say."""
    book = Book()
    history: list[dict[str, Any]] = []
    for number, spans in enumerate(turns, 1):
        history = [*history, user(f"question {number}")]
        reply = assistant(f"answer {number}")
        output = list(range(100 * number, 100 * number + (spans[-1][2] if spans else 0)))
        book.turn(history, reply, output=output, versions=spans)
        history.append(reply)
    return book


def sample_of(book: Book, **changes: Any) -> Sample:
    """The sample, the last turn's event changed."""
    last = max(book.content)
    content: TurnTokens = book.content[last]
    event = msgspec.structs.replace(content.event, **changes)
    (found,) = samples(book.session, {**book.content, last: msgspec.structs.replace(content, event=event)})
    return found


@pytest.mark.parametrize(
    ("turns", "regressed"),
    [
        ([[("1", 0, 2)], [("2", 0, 1)]], False),
        ([[("1", 0, 2)], [("1", 0, 1)]], False),
        ([[("2", 0, 2)], [("1", 0, 1)]], True),
        ([[("9", 0, 2)], [("10", 0, 1)]], False),
        ([[("1", 0, 1), ("3", 1, 2), ("2", 2, 4)]], True),
        ([[("3", 0, 2)], [("hotfix", 0, 1)], [("2", 0, 1)]], True),
        ([[("b", 0, 2)], [("a", 0, 1)]], False),
        ([[("3", 0, 2)], [], [("2", 0, 1)]], True),
        ([[]], False),
    ],
)
def test_a_version_that_goes_backwards_is_flagged(turns: Sequence[Spans], regressed: bool) -> None:
    assert sample_of(book_of(*turns)).regressed is regressed


def test_a_discarded_turn_is_no_regress() -> None:
    book = book_of([("1", 0, 1)], [("5", 0, 1)])
    book.turn([*book.made[1].history, user("again")], assistant("instead"), versions=[("4", 0, 1)])
    assert not sample_of(book).regressed


def test_parts_of_a_joined_reply_stand_in_the_samples_places() -> None:
    parts = (Part("http://a", 0, 5), Part("http://b", 5, 9))
    spans = (VersionSpan("6", 0, 5), VersionSpan("7", 5, 9))
    book = book_of([("5", 0, 2)], [("6", 0, 9)])
    sample = sample_of(book, parts=parts, weight_versions=spans, engine="http://b", dispatched="6", adapter="math")
    first, last = sample.turns
    assert (first.parts, first.dispatched, first.adapter, first.engine) == ([], None, None, "http://engine")
    at = last.output_start
    assert last.parts == [Part("http://a", at, at + 5), Part("http://b", at + 5, at + 9)]
    assert (last.dispatched, last.adapter, last.engine) == ("6", "math", "http://b")
    assert sample.weight_versions[at:].tolist() == [6] * 5 + [7] * 4
    assert not sample.regressed


def test_what_is_trimmed_of_a_turn_is_trimmed_of_its_parts() -> None:
    book = book_of([("5", 0, 3)])
    tokens = book.made[1].prompt + book.made[1].output
    question = [*book.made[1].history, user("more")]
    book.turn(question, assistant("x"), prompt=[*tokens[:-1], 9], versions=[("5", 0, 1)], trimmed=1)
    first = book.content[1]
    event = msgspec.structs.replace(first.event, parts=(Part("http://a", 0, 2), Part("http://b", 2, 3)))
    (sample,) = samples(book.session, {**book.content, 1: msgspec.structs.replace(first, event=event)})
    assert sample.turns[0].parts == [Part("http://a", 1, 3)]
    assert sample.turns[0].end == 3


def known(book: Book) -> Known:
    events = {turn.event.turn: turn.event for turn in book.content.values()}
    assert all(isinstance(event, TurnCommitted) for event in events.values())
    return Known(book.session, events, dict.fromkeys(events, 0.0))


@pytest.mark.parametrize(
    ("turns", "current", "reason"),
    [
        ([[("5", 0, 2)], [("7", 0, 1)]], 7, None),
        ([[("4", 0, 2)], [("7", 0, 1)]], 7, "stale: 3 weight versions behind, max_staleness is 2"),
        ([[("9", 0, 2)]], 7, None),
        ([[("base", 0, 2)]], 7, "staleness unknown: no weight version is a number"),
        ([[("7", 0, 2)]], None, "staleness unknown: no weight version is a number"),
        ([[("base", 0, 2)], [("6", 0, 1)]], 7, "staleness unknown: a weight version is not a number"),
        ([[("base", 0, 0), ("6", 0, 1)]], 7, None),
        ([[]], None, None),
        ([[("4", 0, 0), ("6", 0, 1)]], 7, None),
    ],
)
def test_a_session_is_judged_by_its_oldest_sampled_token(
    turns: Sequence[Spans], current: int | None, reason: str | None
) -> None:
    found = known(book_of(*turns))
    assert session_excluded(found, ExportQuery(max_staleness=2), current) == reason
    assert session_excluded(found, ExportQuery(), current) is None
