"""Rows of each shape come out of each container as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.reading import CONTAINERS, differences, read
from shape_rows import Given, conversations, expected, experts, rows

from app.export import formats, jsontext
from app.export.row import Fields, Unfit

NAMES = ("trl", "tinker", "areal", "prime-rl", "atropos")


def made(name: str, conversation: list[Given], advantage: float | None) -> Fields:
    """Raises Unfit."""
    routing = experts(len(expected(conversation).tokens))
    found = rows(conversation, advantage=advantage, routing=routing, metadata={"env_name": "math"})
    return formats.of_group(name, found) if formats.takes_groups(name) else formats.of_row("ndjson", name, found[0])


def written(format: str, name: str, fields: Fields) -> bytes:
    writer = formats.open_writer(format, name, explain=False)
    try:
        return b"".join([*writer.write([fields]), *writer.finish()])
    finally:
        writer.close()


@pytest.mark.parametrize("format", CONTAINERS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(conversations(), st.none() | st.floats(-2, 2))
def test_a_row_comes_out_as_it_went_in(
    format: str, name: str, conversation: list[Given], advantage: float | None
) -> None:
    try:
        fields = made(name, conversation, advantage)
    except Unfit:
        return
    expected_row = json.loads(jsontext.encode(fields))
    assert differences([expected_row], read(format, written(format, name, fields))) == []
