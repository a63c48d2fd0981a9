"""Frames, and the prompt ids that are cut out of a reply and written again to the byte."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc

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


@pytest.mark.parametrize("frame", [None, b"", b"x", pack(EXCHANGE), pack(LARGE), pack(TOKENS)])
def test_tokens_that_are_not_where_they_belong(frame: bytes | None) -> None:
    with pytest.raises(CorruptContent):
        unpack_tokens(None, frame)


def test_a_reply_that_is_packed_apart_is_not_looked_at_for_what_was_said() -> None:
    frame = pack(LARGE)
    assert unpack_messages(frame[: len(frame) // 2]) == Messages(LARGE.messages, LARGE.message)
    with pytest.raises(CorruptContent):
        unpack(frame[: len(frame) // 2], Exchange)


def test_a_frame_whose_messages_unpack_to_more_than_they_say() -> None:
    body = compress(b"\0" * (64 << 20))
    frame = struct.pack("<cIII", APART, len(body), 10, 0) + body
    tracemalloc.start()
    try:
        with pytest.raises(CorruptContent):
            unpack_messages(frame)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_flipped_bit_in_what_was_said_is_found_without_the_rest() -> None:
    said = Messages([RANDOM_JSON], LARGE.message)
    frame = pack(msgspec.structs.replace(LARGE, messages=said.messages))
    silent = 0
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            silent += unpack_messages(bytes(damaged)) != said
        except CorruptContent:
            continue
    assert silent == 0


def test_no_damage_of_a_packed_wire_is_more_than_corrupt() -> None:
    frame = pack(LARGE)
    for at in range(min(len(frame), 64)):
        for damaged in (frame[:at], frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]):
            for read in (unpack_messages, lambda data: unpack(data, Exchange)):
                with contextlib.suppress(CorruptContent):
                    read(damaged)


def test_every_flipped_bit_of_a_frame_is_found() -> None:
    frame = pack(TOKENS)
    for at in range(len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 0x10
        try:
            found = unpack(bytes(damaged), StoredTokens)
        except CorruptContent:
            continue
        assert found == TOKENS, f"byte {at}: other content was read"


@pytest.mark.parametrize("frame", [None, b"", b"x", b"not a frame at all", pack(TOKENS)[:-1], pack(TOKENS)[:9]])
def test_a_damaged_frame(frame: bytes | None) -> None:
    with pytest.raises(CorruptContent):
        unpack(frame, StoredTokens)


def test_a_frame_that_declares_too_much_is_not_unpacked() -> None:
    bomb = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(b"\0" * 100_000))
    size = zstandard.frame_content_size(bytes(bomb)).to_bytes(4, "little")
    at = bytes(bomb).index(size)
    bomb[at : at + 4] = (MAX_RAW + 1).to_bytes(4, "little")
    with pytest.raises(CorruptContent, match=str(MAX_RAW + 1)):
        decompress(bytes(bomb))


def test_a_frame_without_a_size_is_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(CorruptContent):
        decompress(unsized)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"\x90", b'{"suffix_ids": ""}'])
def test_content_of_another_kind(raw: bytes) -> None:
    with pytest.raises(CorruptContent):
        unpack(compress(raw), StoredTokens)


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
