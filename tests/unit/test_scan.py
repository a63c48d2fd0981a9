"""`workers.scan` and `app.domain.split` against a decoder, with slices and parts so small that texts cross them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain import split
from workers import parse_json, scan
from workers.scan import HEAVY, Extent, extent, may_exceed

TEXT = st.text('a,[]{}:"\\é', max_size=4)
VALUES = st.recursive(
    st.none() | st.integers(0, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def weight(value: Any) -> int:
    if isinstance(value, dict):
        return HEAVY + HEAVY * len(value) + weight_of(list(value.values()))
    return HEAVY + weight_of(value) if isinstance(value, list) else 0


def weight_of(values: list[Any]) -> int:
    return sum(map(weight, values)) + max(0, len(values) - 1)


def starts(value: Any) -> int:
    """The commas and opening brackets of its text that are in no string."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(0, len(value) - 1) + sum(map(starts, value)) if isinstance(value, list) else 0


def levels(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=cases(600), deadline=None)
@given(value=st.lists(VALUES, min_size=1, max_size=5), size=st.integers(1, 9), spaced=st.booleans())
def test_an_extent_is_what_a_decoder_finds(value: list[Any], size: int, spaced: bool) -> None:
    text = json.dumps(value, separators=None if spaced else (",", ":"), ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SLICE", size)
        found = extent(text, len(text))
        assert found == Extent(len(value), weight(value), found.largest, levels(value))
        heaviest = max(map(weight, value))
        assert heaviest <= found.largest <= heaviest + HEAVY + 1
        assert list(map(json.loads, scan.members(text))) == value
        assert b",".join(scan.members(text, 3)) == text[1:-1]
        assert may_exceed(text, 0) == (b"[" in text)
        patch.setattr(scan, "SPARSE", 1 << 20)
        assert scan.count_values(text) == starts(value)
        patch.setattr(scan, "SPLIT", 0)
        assert scan.count_values(text) == starts(value)


def test_it_stops_where_there_are_too_many() -> None:
    assert 1000 < extent(b"[" + b"1," * 5_000_000 + b"1]", 1000).members < 1_000_000


DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([*b',[]{}":\\1 ', None])), max_size=2)


@settings(max_examples=cases(1200), deadline=None)
@given(
    value=st.lists(VALUES, max_size=6) | st.dictionaries(TEXT, VALUES, max_size=5),
    damage=DAMAGE,
    size=st.integers(1, 40),
)
def test_a_long_body_is_split_as_a_decoder_does_or_refused_as_by_one(value: Any, damage: Any, size: int) -> None:
    text = bytearray(json.dumps(value).encode())
    for where, byte in damage:
        at = int(where * (len(text) - 1))
        if byte is None:
            del text[at]
        else:
            text[at : at + 1] = bytes((byte,)) if where < 0.5 else bytes((text[at], byte))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SLICE", size)
        for name, small in (("LONG", 20), ("AT_ONCE", 6), ("FEW", 2)):
            patch.setattr(split, name, small)
        for mine, decoder in ((all_fields, FIELDS), (split.items, ITEMS)):
            assert outcome(mine, bytes(text)) == outcome(decoder.decode, bytes(text))


def all_fields(text: bytes) -> dict[str, msgspec.Raw]:
    return split.fields(text, lambda name, raw: None)


def test_a_long_text_is_quoted_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'a"\\\n\u2028😀é' * 20
    monkeypatch.setattr(split, "LONG", 7)
    assert split.quoted(text) == msgspec.json.encode(text)


def outcome(read: Callable[[bytes], Any], text: bytes) -> Any:
    try:
        found = read(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "refused"
    if isinstance(found, dict):
        return {name: bytes(raw).strip() for name, raw in found.items()}
    return [bytes(raw).strip() for raw in found]


@pytest.mark.parametrize("text", [b"[" + b"[],[]," * 20_000 + b"[[]]]", b'["' + b"\\\\[[" * 40_000 + b'",[[]]]'])
def test_a_long_text_is_as_deep_as_a_short_one(text: bytes) -> None:
    assert len(text) > parse_json.LONG
    assert parse_json.too_deep(text, 2)
    assert not parse_json.too_deep(text, 3)
