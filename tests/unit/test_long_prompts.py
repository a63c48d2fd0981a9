"""The ids of a long prompt are cut out of a reply, which is then judged as if the whole of it had been parsed."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from typing import Any

import msgspec
import pytest
from helpers.replies import GONE, SHAPES, Parsed, Text, body_of, known_as, parse_reply
from hypothesis import given
from hypothesis import strategies as st

from workers import codec, job, scan
from workers.codec import Exchange, StoredTokens
from workers.parse import MAX_TOKEN_ID, KnownTokens, Rejected, token_text
from workers.parse_prompt import KnownText
from workers.reply import Job, ValidatedReply

IDS = [place * 7919 % 50_000 for place in range(3000)]
TEXT = "[" + ",".join(map(str, IDS)) + "]"
OTHER = [*IDS[:-1], 50_001]
PROMPT = {shape: "prompt_token_ids" if shape == "vllm" else "choices.0.prompt_token_ids" for shape in SHAPES}
COUNTS = {
    shape: ["usage.prompt_tokens", *["choices.0.meta_info.prompt_tokens"] * (shape == "sglang")] for shape in SHAPES
}


def long_body(shape: str, text: str = TEXT, *changes: dict[str, Any]) -> bytes:
    return body_of(shape, dict.fromkeys(COUNTS[shape], len(IDS)), {PROMPT[shape]: Text(text)}, *changes)


def judged(body: bytes, shape: str, known: KnownTokens | None = None, sent: bytes = b"") -> ValidatedReply:
    """The same with the text of the known ids at hand, which are then compared instead of hashed."""
    protocol: Any = "completions" if "completion" in shape else "chat"
    asked = Job("auto", known, [], [], [], 200, "", b"", protocol, sent)
    if known is None or sent:
        return job.work(asked, memoryview(body))
    try:
        result = job.work(asked, memoryview(body))
    except Rejected as error:
        with pytest.raises(Rejected, match=f"^{re.escape(str(error))}$"):
            job.read(asked, body, text_of(known))
        raise
    assert job.read(asked, body, text_of(known))[0] == result
    return result


def text_of(known: KnownTokens) -> KnownText:
    """The text of known ids: of the prompt's first ones, or of others."""
    for ids in (IDS[: known.tokens], OTHER[: known.tokens], [*IDS, 1]):
        if known == known_as(ids):
            return KnownText(known, bytearray(token_text(ids)), hashlib.sha256(token_text(ids)))
    raise ValueError("unknown ids")


def parsed_whole(body: bytes, shape: str, known: KnownTokens | None = None, sent: bytes = b"") -> Parsed:
    protocol: Any = "completions" if "completion" in shape else "chat"
    return parse_reply(body, "auto", known, protocol, sent or None)


def require_same(body: bytes, shape: str, known: KnownTokens | None = None, sent: bytes = b"") -> Exchange:
    """The same result as of the whole body, which can be given again. Returns what is stored."""
    done, whole = judged(body, shape, known, sent), parsed_whole(body, shape, known, sent)
    tokens, exchange = codec.unpack_tokens(done.tokens, done.exchange), codec.unpack(done.exchange, Exchange)
    assert tokens == StoredTokens(whole.suffix_ids, whole.output_ids, whole.logprobs)
    assert (done.base, done.sequence, done.message) == (whole.base, whole.sequence, whole.message)
    assert (done.finish_reason, done.miscounted) == (whole.finish_reason, whole.miscounted)
    ids = array("i", IDS[: done.base]).tobytes() + tokens.suffix_ids
    assert codec.paste(exchange, memoryview(ids).cast("i"), {}) == body
    return exchange


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("known", [None, known_as(IDS[:2900]), known_as(IDS), known_as(OTHER), known_as([*IDS, 1])])
def test_a_long_prompt_is_cut_out_and_put_back(shape: str, known: KnownTokens | None) -> None:
    body = long_body(shape)
    assert job.find_long_values(memoryview(body)).prompt is not None
    exchange = require_same(body, shape, known)
    assert b"7919" not in exchange.reply
    assert exchange.prompt_ids_at is not None
    assert require_same(body, shape, known, token_text(IDS)) == exchange


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_of_a_session_s_tokens_is_kept_and_compared(shape: str) -> None:
    """Turn by turn, and two turns after the same one: each text is what the whole reply's hash is of."""
    begun = text = None
    ids = list(IDS)
    asked = Job("auto", None, [], [], [], 200, "", b"", "completions" if "completion" in shape else "chat")
    for turn in range(4):
        body = body_of(
            shape,
            dict.fromkeys(COUNTS[shape], len(ids)),
            {PROMPT[shape]: Text("[" + ",".join(map(str, ids)) + "]")},
            separators=(",", ":"),
        )
        assert (job.find_long_values(body, text).begun is not None) == (turn > 0)
        result, made, _ = job.read(asked, body, text)
        assert result == job.work(asked, memoryview(body))
        assert made is not None
        text = made()
        assert text is not None
        output = array("i", codec.unpack_tokens(result.tokens, result.exchange).output_ids)
        tokens = [*ids, *output]
        assert text.known == known_as(tokens) == result.sequence
        assert text.begins(b" " + token_text(tokens), 1)
        assert not text.begins(b" " + token_text(tokens)[:-1], 1)
        asked = msgspec.structs.replace(asked, known=result.sequence)
        begun = begun or text
        if turn == 2:
            text, tokens = begun, [*IDS, *output]
            asked = msgspec.structs.replace(asked, known=begun.known)
        ids = [*tokens, turn, 7]


BAD_TEXTS = {
    "negative": TEXT.replace(",7919,", ",-7919,"),
    "negative zero": TEXT.replace("[0,", "[-0,"),
    "a fraction": TEXT.replace(",7919,", ",7919.5,"),
    "a leading zero": TEXT.replace(",7919,", ",07919,"),
    "an empty item": TEXT.replace(",7919,", ",,"),
    "a trailing comma": TEXT[:-1] + ",]",
    "too large": TEXT.replace(",7919,", f",{2**31},"),
    "a slash": TEXT.replace(",7919,", ",79/19,"),
    "a letter": TEXT.replace(",7919,", ",7919e1,"),
    "a string": TEXT.replace(",7919,", ',"7919",'),
    "no end": TEXT[:-1],
    "a nested list": "[" + TEXT + "]",
    "missing": "null",
    "spaces inside": TEXT.replace(",7919,", ",79 19,"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a_bad_long_prompt_is_refused(shape: str, name: str) -> None:
    """For the same reason, with what is known of the prompt and without."""
    body = long_body(shape, BAD_TEXTS[name])
    for known in (None, known_as(IDS[:2900]), known_as(IDS[:1])):
        with pytest.raises(Rejected) as whole:
            parsed_whole(body, shape, known)
        with pytest.raises(Rejected) as cut:
            judged(body, shape, known)
        assert (str(cut.value), type(cut.value)) == (str(whole.value), type(whole.value))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sent_long_prompt_that_is_not_the_reported_one(shape: str) -> None:
    body = long_body(shape)
    with pytest.raises(Rejected) as whole:
        parsed_whole(body, shape, None, token_text(OTHER))
    with pytest.raises(type(whole.value), match=re.escape(str(whole.value))):
        judged(body, shape, None, token_text(OTHER))
    if "completion" not in shape:
        gone = body_of(shape, dict.fromkeys(COUNTS[shape], len(IDS)), {PROMPT[shape]: GONE})
        assert judged(gone, shape, None, token_text(IDS)).suffix_tokens == len(IDS)


@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, MAX_TOKEN_ID), st.integers(0, 200_000)), min_size=1))
def test_ids_are_read_from_their_text(ids: list[int]) -> None:
    found = scan.plain_ids(json.dumps(ids, separators=(",", ":")).encode())
    assert (found is None) == any(one > 999_999_999 for one in ids)
    assert found in (None, array("i", ids).tobytes())


@given(st.lists(st.sampled_from([*"[],[],0123 -.+e/:a\0", "[1,2]", ",10"])).map("".join))
def test_ids_are_read_only_from_a_valid_list(text: str) -> None:
    found = scan.plain_ids(text.encode())
    assert found is None or array("i", json.loads(text)).tobytes() == found
