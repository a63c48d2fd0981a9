"""The format `messages`."""

from __future__ import annotations

import tables
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Given, lists, rows

from app.export.shapes.turnlog import MESSAGES_COLUMNS, messages

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_a_conversation() -> None:
    turns = [
        Given([1], [2], [-1.0], message={"role": "assistant", "content": "one"}),
        Given([3], [4], [-1.0], messages=({"role": "user", "content": "\u2028 two"},), tools=TOOLS),
    ]
    found = lists(messages(rows(turns, metadata={"task": 17}, attempt=None)[0]))
    assert found == tables.shape("messages")
    assert set(found) == set(MESSAGES_COLUMNS)


def test_a_later_segment_begins_with_the_conversation_before_it() -> None:
    first, second = (lists(messages(row)) for row in rows(TWO_SEGMENTS, reward=None))
    assert [len(found["messages"]) for found in (first, second)] == [2, 4]
    assert (first["final"], second["final"], second["status"]) == (False, True, "aborted")
    assert [found["segment"] for found in (first, second)] == [0, 1]
    assert (second["reward"], second["reward_components"]) == (None, {})


def test_a_cut_conversation_ends_with_its_last_turn() -> None:
    (row,) = rows(TWO_TURNS, max_seq_len=4)
    found = lists(messages(row))
    assert (len(found["messages"]), found["status"], found["tools"]) == (2, "truncated", None)
