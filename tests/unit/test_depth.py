"""`too_deep` against the obvious recursion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.parse_json import MAX_DEPTH, too_deep


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value, "b": 2}
    return value


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[1,{"b":'])
def test_the_limit_itself(opening: bytes) -> None:
    closing = opening.translate(bytes.maketrans(b"[{", b"]}"), b'1,"ab:')[::-1]
    each = len(closing)
    at_limit = opening * (MAX_DEPTH // each) + b"1" + closing * (MAX_DEPTH // each)
    assert not too_deep(at_limit)
    assert too_deep(b"[" + at_limit + b"]")
    assert too_deep(b'{"x":' + at_limit + b"}")


@pytest.mark.parametrize(
    ("text", "is_deep"),
    [
        *((b"[" * levels + b"]" * levels, True) for levels in (500, 10_000, 1_000_000)),
        *((text, False) for text in (b"", b"{", b"[" * 100)),
        *((text, True) for text in (b"[" * 200, b"[" * 101 + b"]" * 100, b"\xff" + b"[" * 200, b'"' + b"[" * 200)),
        *((json.dumps(value).encode(), False) for value in ("[{" * 500, [[]] * 500, {"[" * 300: {"{": 1}})),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_decoded_cannot_be_shown_to_be_shallow(text: bytes, is_deep: bool) -> None:
    """Few brackets are never deep, and neither those in strings nor those side by side."""
    assert too_deep(text) is is_deep


JSON = st.recursive(
    st.none() | st.integers() | st.text("[]{}a", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("[{b", max_size=2), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=cases(600), deadline=None)
@given(JSON, st.integers(0, 6), st.integers(0, 12))
def test_it_agrees_with_a_recursion(value: Any, levels: int, limit: int) -> None:
    value = [value, nested(levels)]
    assert too_deep(json.dumps(value).encode(), limit) == (depth(value) > limit)
