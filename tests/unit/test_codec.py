"""Frames, and the prompt ids that are cut out of a reply and written again to the byte."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
import zstandard
from helpers.amounts import cases
from helpers.log import int32
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import scan
from workers.codec import (
    APART,
    APART_BYTES,
    MAX_RAW,
    CorruptContent,
    Exchange,
    Messages,
    StoredTokens,
    compress,
    decompress,
    pack,
    pack_turn,
    paste,
    unpack,
    unpack_messages,
    unpack_tokens,
)

TOKENS = StoredTokens(b"abcd" * 50, b"efgh", b"12345678")
EXCHANGE = Exchange(
    [b'{"role":"user"}'], b"{}", b'{"a":1}', [("content-type", "application/json")], 200, 3, ", ", "rid"
)


def without_ids(reply: bytes, text: bytes, count: int) -> Exchange:
    """The reply stored as a job does it, its prompt's ids cut out where they can be written again."""
    found = scan.bare_ids(text[1:-1]) if count > 1 else None
    if found is None:
        return Exchange([], b"", reply, [])
    at = reply.index(text)
    return Exchange([], b"", reply[:at] + reply[at + len(text) :], [], prompt_ids_at=at, separator=found.separator)


def test_content_survives() -> None:
    assert unpack(pack(TOKENS), StoredTokens) == TOKENS
    assert unpack(pack(EXCHANGE), Exchange) == EXCHANGE
    assert decompress(compress(b"")) == b""


LARGE = msgspec.structs.replace(EXCHANGE, reply=b'{"text":"' + bytes(range(32, 34)) * APART_BYTES + b'"}')


RANDOM_JSON = b'"' + random.Random(1).randbytes(200).hex().encode() + b'"'
"""Text that zstd stores nearly as it is: a flipped bit in it unpacks."""


@pytest.mark.parametrize("exchange", [EXCHANGE, LARGE])
def test_a_small_turn_has_one_frame(exchange: Exchange) -> None:
    tokens, frame = pack_turn(msgspec.structs.replace(exchange, tokens=TOKENS))
    assert (tokens is None) == (exchange is EXCHANGE)
    assert unpack_tokens(tokens, frame) == TOKENS
    assert msgspec.structs.replace(unpack(frame, Exchange), tokens=None) == exchange
    assert unpack_messages(frame) == Messages(exchange.messages, exchange.message)


def test_a_reply_that_is_packed_apart_is_not_looked_at_for_what_was_said() -> None:
    frame = pack(LARGE)
    assert (frame[:1] == APART, pack(EXCHANGE)[:1] == APART) == (True, False)
    assert unpack_messages(frame[: len(frame) // 2]) == Messages(LARGE.messages, LARGE.message)
    with pytest.raises(CorruptContent):
        unpack(frame[: len(frame) // 2], Exchange)


SAID = msgspec.structs.replace(LARGE, messages=[RANDOM_JSON])


@pytest.mark.parametrize(
    ("frame", "read", "whole"),
    [
        (pack(TOKENS), lambda frame: unpack(frame, StoredTokens), TOKENS),
        (pack(SAID), unpack_messages, Messages(SAID.messages, SAID.message)),
        (pack(SAID)[:64], lambda frame: unpack(frame, Exchange), None),
    ],
    ids=["tokens", "what was said, without the rest", "a beginning"],
)
def test_every_flipped_bit_of_a_frame_is_found(frame: bytes, read: Callable[[bytes], object], whole: object) -> None:
    """And every cut, of which a reply that is packed apart may lose its end."""
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        for text in (bytes(damaged), frame[: bit // 8]):
            with contextlib.suppress(CorruptContent):
                assert read(text) == whole, bit


UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
OF_ANOTHER_KIND = [compress(raw) for raw in (b"", b"\xc1", b"\x80", b"\x90", b'{"suffix_ids": ""}')]
DAMAGED = [None, b"", b"x", b"not a frame at all", pack(TOKENS)[:-1], pack(TOKENS)[:9], UNSIZED, *OF_ANOTHER_KIND]


@pytest.mark.parametrize("frame", DAMAGED)
def test_a_damaged_frame(frame: bytes | None) -> None:
    with pytest.raises(CorruptContent):
        unpack(frame, StoredTokens)


@pytest.mark.parametrize("frame", [None, b"", b"x", pack(EXCHANGE), pack(LARGE), pack(TOKENS)])
def test_tokens_that_are_not_where_they_belong(frame: bytes | None) -> None:
    with pytest.raises(CorruptContent):
        unpack_tokens(None, frame)


def test_what_unpacks_to_more_than_it_says_is_not_unpacked() -> None:
    bomb = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(b"\0" * 100_000))
    size = zstandard.frame_content_size(bytes(bomb)).to_bytes(4, "little")
    at = bytes(bomb).index(size)
    bomb[at : at + 4] = (MAX_RAW + 1).to_bytes(4, "little")
    with pytest.raises(CorruptContent, match=str(MAX_RAW + 1)):
        decompress(bytes(bomb))
    body = compress(b"\0" * (64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptContent):
            unpack_messages(struct.pack("<cIII", APART, len(body), 10, 0) + body)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


SPACE = st.sampled_from(["", "", "", " ", "  ", "\n", "\t"])


@st.composite
def spelled(draw: st.DrawFn) -> tuple[list[int], bytes]:
    ids = draw(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=5))
    one = draw(st.sampled_from([",", ", ", None]))
    parts = [one if one is not None else f"{draw(SPACE)},{draw(SPACE)}" for _ in ids[1:]]
    inner = "".join(part for pair in zip([*map(str, ids)], [*parts, ""], strict=True) for part in pair) if ids else ""
    return ids, f"[{draw(SPACE)}{inner}{draw(SPACE)}]".encode()


@settings(max_examples=cases(600), deadline=None)
@given(spelled(), st.binary(max_size=12), st.binary(max_size=12), st.booleans())
def test_cut_and_paste_to_the_byte(ids: tuple[list[int], bytes], before: bytes, after: bytes, twice: bool) -> None:
    numbers, text = ids
    body = before + text + after + (text if twice else b"")
    exchange = unpack(pack(without_ids(body, text, len(numbers))), Exchange)
    assert paste(exchange, memoryview(int32(numbers)).cast("i"), {}) == body
