"""Cursors: what an export gave is read back, anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.service.export import Cursor, decode_cursor
from app.store.reads import Position

PLACE = st.builds(Position, st.integers(0, 2**62), st.integers(0, 2**62))


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Cursor,
        st.text("0123456789abcdef", max_size=8),
        PLACE,
        st.none() | PLACE,
        st.none() | PLACE,
        st.none() | st.integers(1, 9),
    )
)
def test_a_cursor_survives_a_url(cursor: Cursor) -> None:
    text = cursor.encode()
    assert text.replace("-", "").replace("_", "").isalnum()
    assert decode_cursor(text) == cursor


@pytest.mark.parametrize("text", ["", "x", "é", "e30", "bnVsbA", "W10", "/", "=", "\0", "e30" * 5000])
def test_a_foreign_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_cursor(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_no_cursor(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_cursor(text)
