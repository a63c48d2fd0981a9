"""What a reply's reader must not be led into: depth, numbers and bytes anywhere, and the known part of a prompt."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from replies import DEEP, body_of, literal, put

from workers.parse import MAX_TOKEN_ID, KnownTokens, Rejected, parse_reply, token_text

META = "choices.0.meta_info"
TRIPLES = f"{META}.output_token_logprobs"
CONTENT = "choices.0.logprobs.content"
MESSAGE = "choices.0.message"
PROMPT = {"sglang": "choices.0.prompt_token_ids", "vllm": "prompt_token_ids"}
NUMBERS = {"sglang": f"{TRIPLES}.0.0", "vllm": f"{CONTENT}.0.logprob"}
COUNT = {"sglang": f"{META}.completion_tokens", "vllm": "usage.completion_tokens"}
BOTH = ["sglang", "vllm"]
BAD_IDS = ["null", "true", '"7"', "7.0", "7e0", "-1", "-0", str(MAX_TOKEN_ID + 1), str(2**70), "1e999", "[]"]


def known_as(ids: list[int]) -> KnownTokens:
    text = token_text(ids)
    return KnownTokens(len(ids), len(text), hashlib.sha256(text).hexdigest())


def rejected(body: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        parse_reply(body, "auto")
    return str(caught.value)


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("at", ["id", f"{MESSAGE}.content", "choices.0.finish_reason"])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_not_utf8_wherever_it_stands(shape: str, at: str, bad: bytes) -> None:
    rejected(body_of(shape, put(at, "@here@")).replace(b"@here@", bad))


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("at", ["extra", "choices.0.extra", "metadata", f"{MESSAGE}.extra", "usage.extra"])
def test_depth_of_what_is_not_read(shape: str, at: str) -> None:
    for deep in (DEEP, '{"a":' * 150 + "1" + "}" * 150, "[" * 5000 + "]" * 5000):
        assert "100" in rejected(literal(shape, at, deep))


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ("sglang", f"{META}.extra"),
        ("sglang", f"{TRIPLES}.0.2"),
        ("vllm", f"{CONTENT}.0.top_logprobs"),
        ("vllm", f"{CONTENT}.1.bytes"),
    ],
)
def test_depth_inside_what_is_read(shape: str, at: str) -> None:
    assert "100" in rejected(literal(shape, at, DEEP))


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("at", ["created", "choices.0.extra", f"{MESSAGE}.extra", "usage.extra"])
@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "9" * 5000], ids=["inf", "-inf", "nan", "long"])
def test_numbers_no_reader_can_hold_are_rejected(shape: str, at: str, value: str) -> None:
    rejected(literal(shape, at, value))


@pytest.mark.parametrize("shape", BOTH)
def test_a_count_of_five_thousand_digits(shape: str) -> None:
    rejected(literal(shape, COUNT[shape], "9" * 5000))


def test_a_number_out_of_range_does_not_hide_depth() -> None:
    rejected(literal("sglang", "extra", f"[1e999, {DEEP}]"))


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("value", ["0", "-0.0", "-9998.999", "-1e-320", "-0.1234567890123456789", "-2.5E+1", "-12"])
def test_logprobs_are_kept_exactly(shape: str, value: str) -> None:
    parsed = parse_reply(literal(shape, NUMBERS[shape], value), "auto")
    assert array("d", parsed.logprobs).tolist()[0].hex() == float(value).hex()


SPELLINGS = [(",", ""), (", ", ""), (",\n", " "), (",\t", ""), (",\r", ""), (" ,\r\n", "\t")]


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize(("comma", "padding"), SPELLINGS)
@pytest.mark.parametrize(
    ("known", "prompt", "base"),
    [
        ([], [1, 2], 0),
        ([1], [1, 2], 1),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2], 0),
        ([1, 2], [1, 23], 0),
        ([1, 23], [1, 2, 3], 0),
        ([2], [1, 2], 0),
        ([1, 2], [], 0),
        ([0, 0, MAX_TOKEN_ID], [0, 0, MAX_TOKEN_ID, 7, 8], 3),
    ],
)
def test_what_is_known_of_a_prompt(
    shape: str, comma: str, padding: str, known: list[int], prompt: list[int], base: int
) -> None:
    text = f"[{padding}{comma.join(map(str, prompt))}{padding}]"
    parsed = parse_reply(literal(shape, PROMPT[shape], text), "auto", known_as(known))
    assert parsed.base == base
    assert array("i", parsed.suffix_ids).tolist() == prompt[base:]
    assert parsed.sequence == known_as([*prompt, 10, 11])
    assert parsed.prompt_text == text.encode()


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("value", BAD_IDS)
def test_bad_ids_behind_what_is_known(shape: str, value: str) -> None:
    with pytest.raises(Rejected):
        parse_reply(literal(shape, PROMPT[shape], f"[1, 2, {value}]"), "auto", known_as([1, 2]))
