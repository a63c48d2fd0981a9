"""Completions: every rule of what makes a 200 of `/v1/completions` malformed, in SGLang's and vLLM's shapes."""

from __future__ import annotations

import copy
import json
import math
import random
from array import array
from typing import Any

import pytest
from helpers.replies import GONE, Text, encode, spoiled
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.parse import MAX_TOKEN_ID, Parsed, PromptDiffers, Rejected, Span, parse_reply

CHOICE = ("choices", 0)
IDS = (*CHOICE, "token_ids")
PROMPT = (*CHOICE, "prompt_token_ids")
LOGPROBS = (*CHOICE, "logprobs")
VALUES = (*LOGPROBS, "token_logprobs")

SGLANG: dict[str, Any] = {
    "id": "r",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "hé",
            "logprobs": {
                "text_offset": [-1, -1],
                "token_logprobs": [-0.25, -1],
                "tokens": ["h", "é"],
                "top_logprobs": [],
            },
            "finish_reason": "stop",
            "matched_stop": 7,
            "token_ids": [10, 11],
            "prompt_token_ids": [1, 2, 3],
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None},
    "metadata": {"weight_version": "12"},
}
VLLM: dict[str, Any] = {
    "id": "cmpl-r",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "hé",
            "logprobs": {
                "text_offset": [0, 1],
                "token_logprobs": [-0.25, -1],
                "tokens": ["h", "é"],
                "top_logprobs": [{"h": -0.25}, {"é": -1}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [10, 11],
            "prompt_logprobs": None,
            "prompt_token_ids": [1, 2, 3],
            "routed_experts": None,
            "weight_versions": None,
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "kv_transfer_params": None,
}
SHAPES = {"sglang": SGLANG, "vllm": VLLM}

BAD_IDS: list[Any] = [-1, 2**31, 2**64, 1.5, True, "4", None, [], Text(b"1e2"), Text(b"4.0")]
BAD_LOGPROBS: list[Any] = [
    True,
    "x",
    None,
    [],
    -9999,
    -9999.0,
    -10000.5,
    Text(b"NaN"),
    Text(b"-Infinity"),
    Text(b"1e999"),
    Text(b"-1e999"),
]
MALFORMED: list[tuple[tuple[Any, ...], Any]] = [
    *((("choices",), value) for value in (GONE, None, {}, [], [SGLANG["choices"][0]] * 2, ["x"])),
    *(((*CHOICE, "text"), value) for value in (GONE, None, 5, True, [], {}, Text(b'"\\ud800"'), Text(b'"\xff"'))),
    *((IDS, value) for value in (GONE, None, "x", {}, [], [10], [10, 11, 12])),
    *(((*IDS, 1), value) for value in BAD_IDS),
    *((LOGPROBS, value) for value in (GONE, None, [], "x", {})),
    *((VALUES, value) for value in (GONE, None, {}, [], [-1.0], [-1.0] * 3, [None, -1.0])),
    *(((*VALUES, 1), value) for value in BAD_LOGPROBS),
    *((("usage", "completion_tokens"), value) for value in (GONE, None, True, "2", 2.0, 1, 3, -2, [2])),
    *((("usage",), value) for value in (GONE, None, [])),
    *((PROMPT, value) for value in (GONE, None, "x", {}, 3)),
    *(((*PROMPT, 1), value) for value in [*BAD_IDS, Text(b"-0")]),
    ((*CHOICE, "finish_reason"), 3),
    ((*CHOICE, "extra"), Text(b"[" * 101 + b"]" * 101)),
    ((*CHOICE, "extra"), Text(b"[" * 200_000 + b"]" * 200_000)),
    ((*LOGPROBS, "top_logprobs"), Text(b"[" * 150 + b"]" * 150)),
    (("extra",), Text(b"1e999")),
    (("prompt_token_ids",), [1, 2]),
    *(((*CHOICE, "response_token_ids"), value) for value in ("x", [10], [10, 12], [10, 11, 12])),
    (("metadata",), {"weight_version": True}),
    (("metadata",), {"weight_version": 1.5}),
    (("metadata",), {"weight_versions": [{"version": "1", "start": 0, "end": 1}]}),
    ((*CHOICE, "weight_versions"), [{"version": "1", "start": 1, "end": 2}]),
    ((*CHOICE, "weight_versions"), "x"),
]


def sound(reply: dict[str, Any], dialect: Any = "auto", **known: Any) -> Parsed:
    return parse_reply(encode(reply), dialect, protocol="completions", **known)


@pytest.mark.parametrize(
    ("path", "to"),
    [pytest.param(path, to, id=f"{number}-{path[-1]}") for number, (path, to) in enumerate(MALFORMED)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_malformed(shape: str, path: tuple[Any, ...], to: Any) -> None:
    for dialect in ("auto", shape):
        with pytest.raises(Rejected) as raised:
            parse_reply(spoiled(SHAPES[shape], *path, to=to), dialect, protocol="completions")  # type: ignore[arg-type]
        assert len(str(raised.value)) < 300, "names the rule and the place, not the content"


@pytest.mark.parametrize("body", [b"", b"x", b"null", b"[]", b'"x"', b"\xff", b"{} {}", b'{"choices": [}'])
def test_not_an_object_of_json(body: bytes) -> None:
    with pytest.raises(Rejected):
        parse_reply(body, "auto", protocol="completions")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("key", ["token_logprobs", "tokens", "token_ids", "text", "new"])
def test_keys_that_stand_twice(shape: str, separators: tuple[str, str], key: str) -> None:
    comma, colon = separators
    text = json.dumps(SHAPES[shape], separators=separators)
    again = f'"{key}"{colon}[-1,-1]{comma}'
    if key == "new":
        again += f'"{key}"{colon}[-1,-2]{comma}'
    at = f'"logprobs"{colon}{{' if key.startswith("token") and key != "token_ids" else f'"index"{colon}0{comma}'
    with pytest.raises(Rejected, match="duplicate"):
        parse_reply(text.replace(at, at + again, 1).encode(), "auto", protocol="completions")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_completion(shape: str) -> None:
    parsed = sound(SHAPES[shape])
    assert parsed == sound(SHAPES[shape], shape)
    assert parsed.dialect == shape
    assert parsed.message == b'"h\\u00e9"'
    assert json.loads(parsed.prompt_text) == array("i", parsed.suffix_ids).tolist() == [1, 2, 3]
    assert array("i", parsed.output_ids).tolist() == [10, 11]
    assert array("d", parsed.logprobs).tolist() == [-0.25, -1.0]
    assert parsed.finish_reason == "stop"
    assert parsed.weight_versions == [Span("12" if shape == "sglang" else "unknown", 0, 2)]
    assert parsed.payloads == []


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_completion(shape: str) -> None:
    reply = copy.deepcopy(SHAPES[shape])
    reply["choices"][0].update(text="", token_ids=[], logprobs={"token_logprobs": []}, finish_reason="abort")
    reply["usage"]["completion_tokens"] = 0
    parsed = sound(reply)
    assert (parsed.message, parsed.output_ids, parsed.logprobs) == (b'""', b"", b"")
    assert (parsed.weight_versions, parsed.finish_reason) == ([], "abort")


def test_a_completion_is_no_chat_reply_and_the_other_way_round() -> None:
    for shape in SHAPES.values():
        with pytest.raises(Rejected):
            parse_reply(encode(shape), "auto")
    message = spoiled(VLLM, *CHOICE, "text", to=GONE).replace(b'"index"', b'"message":{"role":"assistant"},"index"')
    with pytest.raises(Rejected, match="text is missing"):
        parse_reply(message, "auto", protocol="completions")


SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]


def test_weight_versions_stand_in_metadata_or_on_the_choice() -> None:
    sglang, vllm = copy.deepcopy(SGLANG), copy.deepcopy(VLLM)
    sglang["metadata"]["weight_versions"] = SPANS
    vllm["choices"][0]["weight_versions"] = SPANS
    expected = [Span("1", 0, 1), Span("2", 1, 2)]
    assert sound(sglang).weight_versions == sound(vllm).weight_versions == expected


def test_payloads_stand_in_sglext_or_on_the_choice() -> None:
    sglang, vllm = copy.deepcopy(SGLANG), copy.deepcopy(VLLM)
    sglang["sglext"] = {"routed_experts": "AAAA"}
    vllm["choices"][0]["routed_experts"] = "AAAA"
    for reply in (sglang, vllm):
        ((kind, raw),) = sound(reply).payloads
        assert (kind, bytes(raw)) == ("routed_experts", b'"AAAA"')


@pytest.mark.parametrize("details", [{"cached_tokens": 2}, {"cached_tokens": 0}])
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_tokens(shape: str, details: dict[str, int]) -> None:
    reply = copy.deepcopy(SHAPES[shape])
    reply["usage"]["prompt_tokens_details"] = details
    assert sound(reply).cached_tokens == details["cached_tokens"]


def whole(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits


def judge(body: bytes) -> bool:
    """Parse, and hold what is accepted against a slow reading. Was it accepted?"""
    try:
        parsed = parse_reply(body, "auto", protocol="completions")
    except Rejected:
        return False
    reply = json.loads(body.decode(), parse_int=whole)
    (choice,) = reply["choices"]
    ids, values, prompt = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["prompt_token_ids"]
    assert type(reply["usage"]["completion_tokens"]) is int
    assert reply["usage"]["completion_tokens"] == len(ids) == len(values)
    assert all(type(value) is int and 0 <= value <= MAX_TOKEN_ID for value in [*ids, *prompt])
    assert all(type(value) in (int, float) and math.isfinite(value) and value > -9999 for value in values)
    assert array("i", parsed.suffix_ids).tolist() == prompt
    assert array("i", parsed.output_ids).tolist() == ids
    assert array("d", parsed.logprobs).tolist() == [float(value) for value in values]
    assert type(choice["text"]) is str
    assert json.loads(parsed.message) == choice["text"]
    assert sum(span.end - span.start for span in parsed.weight_versions) == len(ids)
    return True


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in children for deeper in places(child, (*path, key)))]


JUNK = ["null", "true", "-1", "7", "2.0", "1e999", "NaN", "-9999", "[]", "{}", "[-1,3]", '"x"', '"\\ud800"', "9" * 5000]


def test_every_place_with_every_junk_value() -> None:
    accepted = 0
    for reply in SHAPES.values():
        for path in places(reply)[1:]:
            accepted += sum(judge(spoiled(reply, *path, to=Text(literal.encode()))) for literal in JUNK)
    assert accepted > 100


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cut_is_rejected(shape: str) -> None:
    body = encode(SHAPES[shape])
    assert judge(body)
    for end in range(len(body)):
        assert not judge(body[:end])


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_bytes(shape: str, seed: int) -> None:
    rng, body = random.Random(seed), encode(SHAPES[shape])
    start = rng.randrange(len(body))
    junk = rng.choice([b"", b'"', b"}", b"[", b",", b"0", b"-", b"e9", b"\\", b"\xff", b"\x00", b" ", rng.randbytes(2)])
    judge(body[:start] + junk + body[start + rng.randrange(4) :])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [None, 2, 4])
def test_a_sent_prompt_is_reported_or_counted(shape: str, count: int | None) -> None:
    reply = json.loads(spoiled(SHAPES[shape], *PROMPT, to=GONE))
    assert parse_reply(encode(reply), "auto", None, "completions", b"1,2,3,").base == 0
    body = spoiled(reply, "usage", "prompt_tokens", to=count)
    with pytest.raises(Rejected, match=r"prompt tokens|3 tokens were sent") as raised:
        parse_reply(body, "auto", None, "completions", b"1,2,3,")
    assert isinstance(raised.value, PromptDiffers) == (count is not None)
