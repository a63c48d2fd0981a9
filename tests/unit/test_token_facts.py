"""The stored form of a turn's ids and logprobs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from workers import codec, token_facts
from workers.codec import CorruptContent, Facts

EXACT = [-0.06151268, -13.25, 0.0, -0.0, float("-inf"), float("nan")]
"""Rounded to float32 below."""


def facts(suffix: list[int], output: list[int], logprobs: list[float], *, is_float32: bool = True) -> Facts:
    scores = np.array(logprobs, "<f4" if is_float32 else "<f8").astype("<f8")
    return Facts(np.array(suffix, "<i4").tobytes(), np.array(output, "<i4").tobytes(), scores.tobytes())


LOGS = facts([5, 70_000, 6, 7] * 4000, [1, 2], [-0.5, -0.25])
NOISE = facts(np.random.default_rng(1).integers(0, 60_000, 9000).tolist(), [1, 2], [-0.5, -0.25])

CASES = {
    "empty": (facts([], [], []), token_facts.START),
    "two bytes an id, four a logprob": (facts([0, 65_535], [1], EXACT), token_facts.START + 3 * 2 + 6 * 4),
    "three bytes an id": (facts([65_536], [(1 << 24) - 1, 0], EXACT), token_facts.START + 3 * 3 + 6 * 4),
    "four bytes an id": (facts([1 << 24], [(1 << 31) - 1], EXACT), token_facts.START + 2 * 4 + 6 * 4),
    "float64": (facts([1], [2, 3], [-0.1, -1e300], is_float32=False), token_facts.START + 3 * 2 + 2 * 8),
    "long, without repetitions": (NOISE, token_facts.START + 9002 * 2 + 2 * 4),
}


@pytest.mark.parametrize(("content", "size"), CASES.values(), ids=CASES)
def test_facts_are_as_long_as_their_numbers(content: Facts, size: int) -> None:
    frame = codec.pack(content)
    assert codec.unpack(frame, Facts) == content == codec.unpack_checked(frame)
    assert (frame[:1], len(frame)) == (token_facts.PLAIN, size)


def test_a_long_prompt_that_repeats_itself_is_compressed() -> None:
    frame = codec.pack(LOGS)
    assert codec.unpack(frame, Facts) == LOGS == codec.unpack_checked(frame)
    assert frame[:1] == token_facts.COMPRESSED
    assert len(frame) < 1000


@pytest.mark.parametrize("content", [facts([-1], [1], [0.0]), Facts(b"abc", b"", b""), Facts(b"", b"", b"1234567")])
def test_other_content_is_a_frame_as_in_earlier_versions(content: Facts) -> None:
    frame = codec.pack(content)
    assert frame == codec.compress(msgspec.msgpack.encode(content))
    assert codec.unpack(frame, Facts) == content == codec.unpack_checked(frame)


@pytest.mark.parametrize("content", [CASES["three bytes an id"][0], LOGS])
def test_every_flipped_bit_and_every_cut_is_found(content: Facts) -> None:
    frame = codec.pack(content)
    for at in range(min(len(frame), 200)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptContent):
                codec.unpack(bytes(damaged), Facts)
        with pytest.raises(CorruptContent):
            codec.unpack(frame[:at], Facts)


@pytest.mark.parametrize("at", range(1, 15))
def test_sizes_that_do_not_fit_are_found_without_the_checksum(at: int) -> None:
    frame = bytearray(codec.pack(CASES["two bytes an id, four a logprob"][0]))
    frame[at] ^= 0x40
    with pytest.raises(CorruptContent):
        codec.unpack_checked(bytes(frame))
