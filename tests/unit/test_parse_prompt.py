"""What is known of a prompt, a prompt that was sent as ids, and cached tokens."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from helpers.pools import running
from helpers.replies import CHATS, GONE, SHAPES, Changes, Parsed, Text, body_of, known_as, parse_reply

from workers.parse import MAX_TOKEN_ID, PromptDiffers, Rejected, token_text

PROMPT = {shape: "prompt_token_ids" if shape == "vllm" else "choices.0.prompt_token_ids" for shape in SHAPES}
COUNT = {"sglang": "choices.0.meta_info.prompt_tokens", "vllm": "usage.prompt_tokens"}
IDS = [1, 2, 3]


def parsed(shape: str, *changes: Changes, known: list[int] | None = None, sent: list[int] | None = None) -> Parsed:
    protocol: Any = "completions" if "completion" in shape else "chat"
    beginning = None if known is None else known_as(known)
    text = None if sent is None else token_text(sent)
    return parse_reply(body_of(shape, *changes), "auto", beginning, protocol, text)


SPELLINGS = [(",", ""), (", ", ""), (",\n", " "), (",\t", ""), (",\r", ""), (" ,\r\n", "\t")]


@pytest.mark.parametrize("shape", CHATS)
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
    found = parsed(shape, {PROMPT[shape]: Text(text)}, known=known)
    assert found.base == base
    assert array("i", found.suffix_ids).tolist() == prompt[base:]
    assert found.sequence == known_as([*prompt, 10, 11])
    assert found.prompt_text == text.encode()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("absent", [GONE, None])
@pytest.mark.parametrize(("known", "base"), [([1, 2, 3], 3), ([1, 2], 2), ([1, 2, 3, 4], 0), ([9], 0), (None, 0)])
def test_a_sent_prompt_need_not_be_reported(shape: str, absent: Any, known: list[int] | None, base: int) -> None:
    """All of it is known, as in token-in; or the part that is stored, and the rest is new."""
    found = parsed(shape, {PROMPT[shape]: absent}, known=known, sent=IDS)
    assert found.base == base
    assert array("i", found.suffix_ids).tolist() == IDS[base:]
    assert found.prompt_text == b""
    assert found.sequence == known_as([1, 2, 3, 10, 11])


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("text", ["[1,2,3]", "[1, 2, 3]", "[ 1,\n2 ,\t3\r]"])
def test_a_sent_prompt_that_is_reported_is_the_same(shape: str, text: str) -> None:
    change = {PROMPT[shape]: Text(text)}
    sent = parsed(shape, change, known=[1, 2], sent=IDS)
    assert sent == parsed(shape, change, known=[1, 2])
    assert sent.prompt_text == text.encode()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("known", [None, IDS])
@pytest.mark.parametrize(
    ("reported", "at"),
    [("[1,2,4]", 2), ("[9,2,3]", 0), ("[1,2]", 2), ("[1,2,3,4]", 3), ("[]", 0), ("[12,3]", 0), ("[1, 23]", 1)],
)
def test_another_prompt_than_was_sent(shape: str, known: list[int] | None, reported: str, at: int) -> None:
    with pytest.raises(PromptDiffers) as raised:
        parsed(shape, {PROMPT[shape]: Text(reported)}, known=known, sent=IDS)
    assert str(raised.value) == (
        f"{PROMPT[shape].replace('choices.0', 'choices[0]')} is not the prompt that was sent: they differ from token"
        f" {at} on (3 tokens sent, {len(json.loads(reported))} reported)"
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_sent_prompt_that_is_not_reported_must_be_counted(shape: str, count: int) -> None:
    """An engine that does not know the field with the ids makes a prompt of its own, and says so only here."""
    with pytest.raises(PromptDiffers, match=f"prompt_tokens is {count}, but 3 tokens were sent"):
        parsed(shape, {PROMPT[shape]: GONE, COUNT.get(shape, "usage.prompt_tokens"): count}, sent=IDS)


@pytest.mark.parametrize("usage", [3, 4])
def test_sglangs_usage_counts_where_its_meta_info_does_not(usage: int) -> None:
    changes = {PROMPT["sglang"]: GONE, COUNT["sglang"]: GONE, "usage.prompt_tokens": usage}
    if usage == 3:
        assert parsed("sglang", changes, sent=IDS).base == 0
        return
    with pytest.raises(PromptDiffers):
        parsed("sglang", changes, sent=IDS)


DETAILS = "usage.prompt_tokens_details"
CACHED = "choices.0.meta_info.cached_tokens"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [0, 3, 2**31 - 1])
def test_cached_tokens_of_usage(shape: str, value: int) -> None:
    assert parsed(shape, {DETAILS: {"cached_tokens": value}}).cached_tokens == value


@pytest.mark.parametrize(("value", "cached"), [(2, 2), (None, 3)])
def test_cached_tokens_of_meta_info_win(value: int | None, cached: int) -> None:
    assert parsed("sglang", {CACHED: value, DETAILS: {"cached_tokens": 3}}).cached_tokens == cached


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None, [], {}, 2**40, 10**400])
def test_what_is_no_count_is_no_reason_to_reject(shape: str, value: Any) -> None:
    changes: list[Changes] = [{}, {DETAILS: {"cached_tokens": value}}, {DETAILS: value}, {"usage.extra": value}]
    changes += [{CACHED: value}, {"usage": value}] if shape == "sglang" else []
    for change in changes:
        assert parsed(shape, change).cached_tokens is None


def judge_as_sent(job: memoryview, body: memoryview) -> bytes:
    """What a worker process runs: the job is the sent prompt's text."""
    return parse_reply(bytes(body), "auto", sent=bytes(job)).output_ids


@pytest.mark.anyio
async def test_a_differing_prompt_leaves_a_worker_as_what_it_is() -> None:
    body = body_of("sglang")
    async with running(function=f"{__name__}:judge_as_sent") as pool:
        assert await pool.run(b"1,2,3,", body) == array("i", [10, 11]).tobytes()
        with pytest.raises(PromptDiffers, match=r"from token 1 on \(3 tokens sent, 3 reported\)$"):
            await pool.run(b"1,5,3,", body)
        with pytest.raises(Rejected) as raised:
            await pool.run(b"1,5,3,", b"[]")
        assert type(raised.value) is Rejected
        assert pool.counters().crashes == 0
