"""A prompt that was sent as ids, cached tokens, and a differing prompt's way out of a worker process."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

import pytest
from helpers.pools import running
from replies import SHAPES, body_of, drop, literal, put

from workers.parse import KnownTokens, PromptDiffers, Rejected, Span, parse_reply, token_text

PROMPT = {"sglang": "choices.0.prompt_token_ids", "vllm": "prompt_token_ids"}
BOTH = ["sglang", "vllm"]


def known_as(ids: list[int]) -> KnownTokens:
    text = token_text(ids)
    return KnownTokens(len(ids), len(text), hashlib.sha256(text).hexdigest())


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("absent", [False, None])
@pytest.mark.parametrize(("known", "base"), [([1, 2, 3], 3), ([1, 2], 2), ([1, 2, 3, 4], 0), ([9], 0), (None, 0)])
def test_a_sent_prompt_need_not_be_reported(
    shape: str, absent: bool | None, known: list[int] | None, base: int
) -> None:
    """All of it known, as in token-in; or the part that is stored, and the rest is new."""
    body = body_of(shape, drop(PROMPT[shape]) if absent is False else put(PROMPT[shape], None))
    parsed = parse_reply(body, "auto", known and known_as(known), sent=token_text([1, 2, 3]))
    assert parsed.base == base
    assert array("i", parsed.suffix_ids).tolist() == [1, 2, 3][base:]
    assert parsed.prompt_text == b""
    assert parsed.sequence == known_as([1, 2, 3, 10, 11])


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("text", ["[1,2,3]", "[1, 2, 3]", "[ 1,\n2 ,\t3\r]"])
def test_a_sent_prompt_that_is_reported_is_the_same(shape: str, text: str) -> None:
    body = literal(shape, PROMPT[shape], text)
    sent = parse_reply(body, "auto", known_as([1, 2]), sent=token_text([1, 2, 3]))
    assert sent == parse_reply(body, "auto", known_as([1, 2]))
    assert sent.prompt_text == text.encode()


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("known", [None, [1, 2, 3]])
@pytest.mark.parametrize(
    ("reported", "at"),
    [("[1,2,4]", 2), ("[9,2,3]", 0), ("[1,2]", 2), ("[1,2,3,4]", 3), ("[]", 0), ("[12,3]", 0), ("[1, 23]", 1)],
)
def test_another_prompt_than_was_sent(shape: str, known: list[int] | None, reported: str, at: int) -> None:
    with pytest.raises(PromptDiffers) as raised:
        parse_reply(
            literal(shape, PROMPT[shape], reported), "auto", known and known_as(known), sent=token_text([1, 2, 3])
        )
    assert str(raised.value) == (
        f"{PROMPT[shape].replace('choices.0', 'choices[0]')} is not the prompt that was sent: they differ from token"
        f" {at} on (3 tokens sent, {len(json.loads(reported))} reported)"
    )


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("text", ['"1,2,3"', "[1,2,-3]", "[1,2,true]", "[1,2,3.0]", "{}", "[[1,2,3]]", "[1,2,3e0]"])
def test_what_is_no_list_of_ids_is_malformed_rather_than_different(shape: str, text: str) -> None:
    with pytest.raises(Rejected) as raised:
        parse_reply(literal(shape, PROMPT[shape], text), "auto", sent=token_text([1, 2, 3]))
    assert not isinstance(raised.value, PromptDiffers)


def test_a_negative_zero_is_not_the_zero_that_was_sent() -> None:
    with pytest.raises(Rejected, match="negative zero"):
        parse_reply(literal("vllm", PROMPT["vllm"], "[0,-0]"), "auto", sent=token_text([0, 0]))


@pytest.mark.parametrize("shape", BOTH)
def test_a_sent_prompt_excuses_nothing_else(shape: str) -> None:
    for body in (body_of(shape, drop("choices.0.message")), literal(shape, "extra", "[" * 150 + "]" * 150), b"{}"):
        with pytest.raises(Rejected):
            parse_reply(body, "auto", sent=token_text([1, 2, 3]))


def test_a_long_prompt() -> None:
    ids = list(range(50_000, 150_000))
    other = [*ids[:-1], 7]
    body = body_of("vllm", put("prompt_token_ids", ids))
    assert parse_reply(body, "vllm", known_as(ids), sent=token_text(ids)).base == 100_000
    with pytest.raises(PromptDiffers, match="from token 99999 on"):
        parse_reply(body, "vllm", sent=token_text(other))


DETAILS = "usage.prompt_tokens_details"
META = "choices.0.meta_info.cached_tokens"
NO_COUNTS: list[Any] = [-1, 1.5, "3", True, None, [], {}, 2**40, 10**400]


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("value", [0, 3, 2**31 - 1])
def test_cached_tokens_of_usage(shape: str, value: int) -> None:
    assert parse_reply(body_of(shape, put(DETAILS, {"cached_tokens": value})), "auto").cached_tokens == value


def test_cached_tokens_of_meta_info_win() -> None:
    body = body_of("sglang", put(META, 2), put(DETAILS, {"cached_tokens": 3}))
    assert parse_reply(body, "auto").cached_tokens == 2
    assert (
        parse_reply(body_of("sglang", put(META, None), put(DETAILS, {"cached_tokens": 3})), "auto").cached_tokens == 3
    )


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("value", NO_COUNTS)
def test_what_is_no_count_is_no_reason_to_reject(shape: str, value: Any) -> None:
    assert parse_reply(body_of(shape), "auto").cached_tokens is None
    for change in (put(DETAILS, {"cached_tokens": value}), put(DETAILS, value), put("usage.extra", value)):
        assert parse_reply(body_of(shape, change), "auto").cached_tokens is None
    if shape == "sglang":
        for change in (put(META, value), put("usage", value)):
            assert parse_reply(body_of(shape, change), "auto").cached_tokens is None


@pytest.mark.parametrize("shape", BOTH)
def test_a_key_of_usage_that_is_no_text_is_rejected_as_such(shape: str) -> None:
    with pytest.raises(Rejected):
        parse_reply(literal(shape, "usage", '{"completion_tokens":2,"\\ud800":1}'), "auto")


def test_weight_versions_on_vllms_choice() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    parsed = parse_reply(body_of("vllm", put("choices.0.weight_versions", spans)), "auto")
    assert parsed.weight_versions == [Span("a", 0, 1), Span("b", 1, 2)]
    assert parse_reply(body_of("vllm", put("choices.0.weight_versions", None)), "auto").weight_versions == [
        Span("unknown", 0, 2)
    ]
    with pytest.raises(Rejected, match="cover the 2 output tokens"):
        parse_reply(body_of("vllm", put("choices.0.weight_versions", spans[:1])), "auto")


def judge_as_sent(job: memoryview, body: memoryview) -> bytes:
    """What a worker process runs: the job is the sent prompt's text."""
    return parse_reply(bytes(body), "auto", sent=bytes(job)).output_ids


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_differing_prompt_leaves_a_worker_as_what_it_is() -> None:
    body = json.dumps(SHAPES["sglang"]).encode()
    async with running(function=f"{__name__}:judge_as_sent") as pool:
        assert await pool.run(b"1,2,3,", body) == array("i", [10, 11]).tobytes()
        with pytest.raises(PromptDiffers, match=r"from token 1 on \(3 tokens sent, 3 reported\)$"):
            await pool.run(b"1,5,3,", body)
        with pytest.raises(Rejected) as raised:
            await pool.run(b"1,5,3,", b"[]")
        assert type(raised.value) is Rejected
        assert pool.counters().crashes == 0


COUNT = {"sglang": "choices.0.meta_info.prompt_tokens", "vllm": "usage.prompt_tokens"}


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_sent_prompt_that_is_not_reported_must_be_counted(shape: str, count: int) -> None:
    """An engine that does not know the field with the ids makes a prompt of its own, and says so only here."""
    with pytest.raises(PromptDiffers, match=f"prompt_tokens is {count}, but 3 tokens were sent"):
        parse_reply(body_of(shape, drop(PROMPT[shape]), put(COUNT[shape], count)), "auto", sent=token_text([1, 2, 3]))


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("count", [None, "3", 3.5, True])
def test_a_prompt_that_is_neither_reported_nor_counted_is_malformed(shape: str, count: Any) -> None:
    changes = [drop(PROMPT[shape]), put("usage.prompt_tokens", count)]
    if shape == "sglang":
        changes.append(drop(COUNT[shape]))
    with pytest.raises(Rejected) as raised:
        parse_reply(body_of(shape, *changes), "auto", sent=token_text([1, 2, 3]))
    assert type(raised.value) is Rejected


@pytest.mark.parametrize("usage", [3, 4])
def test_sglangs_usage_counts_where_its_meta_info_does_not(usage: int) -> None:
    changes = (drop(PROMPT["sglang"]), drop(COUNT["sglang"]), put("usage.prompt_tokens", usage))
    body = body_of("sglang", *changes)
    if usage == 3:
        assert parse_reply(body, "auto", sent=token_text([1, 2, 3])).base == 0
        return
    with pytest.raises(PromptDiffers):
        parse_reply(body, "auto", sent=token_text([1, 2, 3]))
