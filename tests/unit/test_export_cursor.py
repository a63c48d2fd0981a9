"""Cursors: what an export gave is read back, anything else is refused; and how much of one is made at once."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import rows

from app.errors import InvalidRequest
from app.export.query import Cursor, decode_cursor
from app.export.writing import SLICE_BYTES, next_rows
from app.store.feed import Position

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
        st.none() | st.dictionaries(st.text("abc", max_size=3), st.integers(0, 2**62), max_size=3),
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


FORGED: list[dict[str, Any]] = rows("export_cursor_forged")


@pytest.mark.parametrize("change", FORGED, ids=str)
def test_numbers_that_no_database_holds_are_refused(change: dict[str, Any]) -> None:
    def text(fields: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    sound = {"epoch": "e", "low": [0, 0], "high": [1, 1]}
    assert decode_cursor(text(sound)) == Cursor("e", Position(0, 0), Position(1, 1))
    with pytest.raises(InvalidRequest):
        decode_cursor(text({**sound, **change}))


def test_rows_are_made_a_few_megabytes_at_a_time() -> None:
    made: list[int] = []

    def rows() -> Any:
        for number in itertools.count():
            made.append(number)
            yield {"number": number, "tokens": np.zeros(SLICE_BYTES // 4 // 8, np.int64)}

    source = rows()
    assert [row["number"] for row in next_rows(source)] == [0, 1, 2, 3]
    assert made == [0, 1, 2, 3], "no more is made than is written next"
    assert [row["number"] for row in next_rows(source, 1)] == [4]
    text = ({"messages": ["x" * (SLICE_BYTES // 4)] * 2} for _ in range(5))
    assert [len(next_rows(text)) for _ in range(4)] == [2, 2, 1, 0]
