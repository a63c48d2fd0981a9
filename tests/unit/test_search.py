"""What is searched of a message, what a query means, and where it is in a text."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from app.errors import InvalidRequest, PositionGone
from app.features.search import follower
from app.features.search.text import MAX_NAME, MAX_TEXT, MAX_TOOLS, Query, parse, read_message, snippet, words_of

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls -l"}'}}
USE = {"type": "tool_use", "id": "c2", "name": "read", "input": {"path": "/etc/hosts", "lines": 3}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("message", "tools", "words"),
    [
        ({"role": "user", "content": "Hello, World"}, (), "hello world"),
        ({"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE]}, (), "look"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ("bash",), "bash cmd ls l"),
        ({"role": "assistant", "content": [USE]}, ("read",), "read path etc hosts lines 3"),
        ({"role": "assistant", "reasoning_content": "First", "content": "Then"}, (), "first then"),
        ({"role": "tool", "tool_call_id": "c1", "content": "no file"}, ("bash",), "no file"),
        ({"role": "tool", "name": "own", "tool_call_id": "c1", "content": "x"}, ("own",), "x"),
        ({"role": "tool", "tool_call_id": "unknown", "content": "x"}, (), "x"),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}]},
            ("bash",),
            "done",
        ),
        ({"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}}, ("old",), "old"),
        ({"role": 7, "content": {"a": [True, None, 1.5]}}, (), "a 1 5"),
        ({"role": "user", "content": "a\0b"}, (), "a b"),
    ],
)
def test_the_words_of_a_message(message: dict[str, Any], tools: tuple[str, ...], words: str) -> None:
    found, _ = read_message(json.dumps(message).encode(), {"c1": "bash"})
    assert (found.tools, words_of(found.text)) == (tools, words)
    assert "\0" not in found.text


def test_calls_are_known_to_the_results_behind_them() -> None:
    raw = json.dumps({"role": "assistant", "content": [USE], "tool_calls": [CALL]}).encode()
    assert read_message(raw, {})[1] == {"c1": "bash", "c2": "read"}


@pytest.mark.parametrize("raw", [b"not json", b'"text"', b"[1]", b"\xff", b'{"content": "\\ud800"}'])
def test_no_message_is_a_fault(raw: bytes) -> None:
    read_message(raw, {})[0].text.encode()


def test_names_are_what_both_databases_hold() -> None:
    """No NUL, and no line feed, which stands between the names; short and few, so that they fit PostgreSQL's index."""
    calls = [{"id": str(n), "function": {"name": f"{n} {'x' * MAX_NAME}", "arguments": ""}} for n in range(MAX_TOOLS)]
    odd = {"id": "odd", "function": {"name": "a\0b\nc", "arguments": "{}"}}
    found, made = read_message(json.dumps({"role": "u\0" * MAX_NAME, "tool_calls": [odd, *calls]}).encode(), {})
    assert (found.role, found.tools[0], made["odd"]) == ("u " * (MAX_NAME // 2), "a b c", "a\0b\nc")
    assert (len(found.tools), max(map(len, found.tools))) == (MAX_TOOLS, MAX_NAME)


def test_a_long_message_is_cut() -> None:
    raw = json.dumps({"role": "user", "content": "x" * (2 * MAX_TEXT)}).encode()
    assert len(read_message(raw, {})[0].text) == MAX_TEXT


@pytest.mark.parametrize(
    ("text", "needed", "excluded"),
    [
        ("Error 500", (("error",), ("500",)), ()),
        ('"Connection refused" -timeout', (("connection refused",),), ("timeout",)),
        ('-"no such file" open', (("open",),), ("no such file",)),
        ("a OR b c", (("a", "b"), ("c",)), ()),
        ("OR a OR", (("a",),), ()),
        ("foo_bar.py", (("foo bar py",),), ()),
        ('"unclosed phrase', (("unclosed phrase",),), ()),
        ("a - b", (("a",), ("b",)), ()),
    ],
)
def test_a_query(text: str, needed: tuple[tuple[str, ...], ...], excluded: tuple[str, ...]) -> None:
    assert parse(text) == Query(needed, excluded)


@pytest.mark.parametrize("text", ["", " ", "-a", '""', "OR", "a " * 33])
def test_a_query_that_is_none(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


def test_a_snippet_shows_the_first_match_and_marks_all_in_it() -> None:
    text = "x" * 500 + " The Error was: error_500, errors. " + "y" * 500
    found = snippet(text, parse('error OR "error 500"'))
    assert [found.text[start:end] for start, end in found.marks] == ["Error", "error_500"]
    assert found.text.startswith("… ")
    assert found.text.endswith(" …")
    assert len(found.text) < 170
    assert snippet("Short", None).text == "Short"


@pytest.mark.anyio
async def test_an_outdated_index_is_cleared_though_that_fails_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "RETRY_S", 0.0)
    index, is_clear = AsyncMock(), asyncio.Event()
    index.position.side_effect = PositionGone("a restore has raised the epoch")
    index.clear.side_effect = [OSError("the file is in use"), None]

    async def take_lease() -> int | None:
        if index.clear.await_count < 2:
            return 1
        is_clear.set()
        return None

    index.take_lease = take_lease
    following = follower.Follower(Mock(), Mock(), Mock(), index, Mock())
    following.start()
    async with asyncio.timeout(10):
        await is_clear.wait()
    await following.stop()
