"""Half of a surrogate pair is U+FFFD and a byte order mark is skipped; what else a decoder refuses stays refused."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from app.domain.surrogates import mended

MARK = b"\xef\xbb\xbf"

BODIES = [
    (r'{"messages":[1,{"content":"a\ud83d b"}]}', ["messages[1]"]),
    (r'{"messages":[{"content":["\ud83d"]},{"\uDE00":"\ud83d"}],"model":"m"}', ["messages[0]", "messages[1]"]),
    (r'{"input":"\ud83d\ud83d\ude00"}', ["input"]),
    (r'{"input":[{"a":{"b":"\ude00\ud83d"}}],"tools":[{"name":"\ud83dA"}]}', ["input[0]", "tools[0]"]),
    (r'{"system":"\\\ud83d","prompt":"\ud83d\\ude00"}', ["system", "prompt"]),
    (r'{"secret":"\ud83d","\udfff":1}', ["body"]),
]
"""Bodies with halves, and where they are told to be."""

WHOLE = [r'{"a":"\ud83d\ude00 \\ud83d \\\\ude00"}', '{"a":"😀"}', r'{"a":"\ufffd\u0041"}', "{", r'{"a":"\ud8"}']


@pytest.mark.parametrize(("text", "places"), BODIES)
@pytest.mark.parametrize("mark", [b"", MARK])
def test_halves_are_replaced_and_told_by_their_places(text: str, places: list[str], mark: bytes) -> None:
    read = mended(mark + text.encode())
    assert read is not None
    assert json.loads(read.body) == json.loads(text, object_pairs_hook=lambda pairs: dict(map(_whole, pairs)))
    assert read.left_out() == [f"surrogate:{place}" for place in places]


def _whole(value: Any) -> Any:
    """As JavaScript's `toWellFormed` has it."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return type(value)(map(_whole, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("text", WHOLE)
def test_what_has_no_half_is_as_it_was(text: str) -> None:
    assert mended(text.encode()) is None
    marked = mended(MARK + text.encode())
    assert marked is not None
    assert (marked.body, marked.left_out()) == (text.encode(), [])


def test_any_escapes_in_any_order() -> None:
    chance = Random(5)
    parts = [r"\ud83d", r"\uDE00", r"\\", r"\"", "u", "d83d", r"\n", "😀", r"A", r"\uD83D\uDE00"]
    for _ in range(300):
        text = '"' + "".join(chance.choices(parts, k=8)) + '"'
        read = mended(text.encode())
        assert json.loads(text.encode() if read is None else read.body) == _whole(json.loads(text)), text
