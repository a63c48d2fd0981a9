"""Sound replies of both engines on both routes, and their valid variants. What is malformed: test_malformed.py."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from helpers.replies import (
    CHATS,
    COMPLETIONS,
    GONE,
    SHAPES,
    Changes,
    Parsed,
    Reply,
    Text,
    body_of,
    doubled,
    parse_reply,
    sglang,
    vllm,
)

from workers.parse import PromptDiffers, VersionSpan

CHOICE = "choices.0"
META = f"{CHOICE}.meta_info"
MESSAGE = f"{CHOICE}.message"
LOGPROB = {
    "sglang": f"{META}.output_token_logprobs.1.0",
    "vllm": f"{CHOICE}.logprobs.content.1.logprob",
    **dict.fromkeys(COMPLETIONS, f"{CHOICE}.logprobs.token_logprobs.1"),
}


def sound(shape: str, *changes: Changes) -> Parsed:
    """The parsed reply, the same whether its dialect is known or found."""
    return read(shape, body_of(shape, *changes))


def read(shape: str, body: bytes) -> Parsed:
    dialect, _, completion = shape.partition(" ")
    protocol: Any = "completions" if completion else "chat"
    parsed = parse_reply(body, "auto", protocol=protocol)
    assert parsed.dialect == dialect
    assert parse_reply(body, dialect, protocol=protocol) == parsed  # type: ignore[arg-type]
    return parsed


@pytest.mark.parametrize("make", [sglang, vllm])
def test_a_sound_reply(make: Callable[..., Reply]) -> None:
    parsed = read(make.__name__, body_of(make([1, 2**31 - 1], [0, 9, 8], [-0.1, 0.0, -9998.5])))
    assert array("i", parsed.suffix_ids).tolist() == [1, 2**31 - 1]
    assert array("i", parsed.output_ids).tolist() == [0, 9, 8]
    assert array("d", parsed.logprobs).tolist() == [-0.1, 0.0, -9998.5]
    assert json.loads(parsed.message) == make()["choices"][0]["message"]
    assert json.loads(parsed.prompt_text) == [1, 2**31 - 1]
    assert parsed.finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "logprobs", "of"),
    [([-0.5, -0.25], [-0.5, -0.25], "processed"), ([[-0.5], [-0.25]], [-0.1, -0.2], None), (None, [-0.1, -0.2], None)],
)
def test_logprobs_over_what_was_kept_are_the_turns(given: Any, logprobs: list[float], of: str | None) -> None:
    """In SGLang's mode `support` there is a list for each token, which is not read."""
    body = body_of(sglang(output=[9, 8], logprobs=[-0.1, -0.2]), {f"{META}.output_token_sampling_logprobs": given})
    parsed = read("sglang", body)
    assert (array("d", parsed.logprobs).tolist(), parsed.logprobs_of) == (logprobs, of)


@pytest.mark.parametrize("shape", COMPLETIONS)
def test_a_sound_completion(shape: str) -> None:
    parsed = sound(shape)
    assert parsed.message == b'"h\\u00e9"'
    assert json.loads(parsed.prompt_text) == array("i", parsed.suffix_ids).tolist() == [1, 2, 3]
    assert array("i", parsed.output_ids).tolist() == [10, 11]
    assert array("d", parsed.logprobs).tolist() == [-0.25, -1.0]
    assert parsed.finish_reason == "stop"
    assert parsed.weight_versions == [VersionSpan("12" if "sglang" in shape else "unknown", 0, 2)]
    assert parsed.payloads == []


@pytest.mark.parametrize("make", [sglang, vllm])
def test_no_output_tokens_and_no_content(make: Callable[..., Reply]) -> None:
    parsed = read(make.__name__, body_of(make(output=[]), {MESSAGE: {"role": "assistant", "content": None}}))
    assert (parsed.output_ids, parsed.logprobs, parsed.weight_versions) == (b"", b"", [])


@pytest.mark.parametrize("shape", COMPLETIONS)
def test_an_empty_completion(shape: str) -> None:
    empty = {f"{CHOICE}.{name}": value for name, value in (("text", ""), ("token_ids", []), ("finish_reason", "abort"))}
    parsed = sound(shape, empty, {f"{CHOICE}.logprobs": {"token_logprobs": []}, "usage.completion_tokens": 0})
    assert (parsed.message, parsed.output_ids, parsed.logprobs) == (b'""', b"", b"")
    assert (parsed.weight_versions, parsed.finish_reason) == ([], "abort")


NOT_COUNTED: Changes = {"usage.prompt_tokens": 0, f"{CHOICE}.finish_reason": "abort"}
"""Of a request that SGLang 0.5.23 aborts in its waiting queue, also after it was taken back there with some output."""


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("shape", ["sglang", "sglang completion"])
def test_an_abort_in_the_waiting_queue_has_no_count_of_the_prompt(shape: str, has_ids: bool) -> None:
    chat = {f"{META}.prompt_tokens": GONE} if shape == "sglang" else {}
    ids = {} if has_ids else {f"{CHOICE}.prompt_token_ids": GONE}
    protocol: Any = "chat" if shape == "sglang" else "completions"

    def taken(*changes: Changes) -> Parsed:
        return parse_reply(body_of(shape, NOT_COUNTED, chat, ids, *changes), "auto", None, protocol, b"1,2,3,")

    parsed = taken()
    assert (parsed.was_queued, parsed.miscounted, parsed.finish_reason) == (True, None, "abort")
    assert array("i", parsed.output_ids).tolist() == [10, 11]
    assert array("i", parsed.suffix_ids).tolist() == [1, 2, 3]
    # Whatever else has such counts is told or refused: another end, another count, a `meta_info` that counts.
    for change in ({f"{CHOICE}.finish_reason": "stop"}, {"usage.prompt_tokens": 2}):
        if has_ids:
            assert taken(change).miscounted is not None
        else:
            with pytest.raises(PromptDiffers):
                taken(change)
    if shape == "sglang":
        with pytest.raises(PromptDiffers) if not has_ids else contextlib.nullcontext():
            assert taken({f"{META}.prompt_tokens": 2}).miscounted is not None


@pytest.mark.parametrize("entry", ["[-1,4]", '[-1.5,4,"text"]', '[-1,4,null,{"more":[1]}]', "[0,4,null]", "[-1E-3,4]"])
def test_entries_of_two_items_or_more(entry: str) -> None:
    body = body_of(sglang(output=[4]), {f"{META}.output_token_logprobs.0": Text(entry)})
    assert array("i", parse_reply(body, "auto").output_ids).tolist() == [4]


def test_nesting_up_to_the_limit_is_fine() -> None:
    """The value is in the root, the list of choices and the choice: 97 levels are left of 100."""
    assert sound("sglang", {f"{CHOICE}.extra": Text("[" * 97 + "]" * 97)})


SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]


@pytest.mark.parametrize(
    ("shape", "changes", "spans"),
    [
        ("sglang", {f"{META}.weight_version": "default"}, [("default", 0, 2)]),
        ("sglang", {f"{META}.weight_version": 7}, [("7", 0, 2)]),
        ("sglang", {f"{META}.weight_version": GONE, "metadata.weight_version": "9"}, [("9", 0, 2)]),
        ("sglang", {f"{META}.weight_version": GONE, "metadata": GONE}, [("unknown", 0, 2)]),
        ("sglang", {f"{META}.weight_versions": SPANS}, [("1", 0, 1), ("2", 1, 2)]),
        (
            "sglang",
            {f"{META}.weight_versions": [{"version": "0", "start": 0, "end": 0}, *SPANS]},
            [("1", 0, 1), ("2", 1, 2)],
        ),
        ("sglang", {f"{META}.weight_versions": None}, [("12", 0, 2)]),
        ("vllm", {f"{CHOICE}.weight_versions": SPANS}, [("1", 0, 1), ("2", 1, 2)]),
        ("vllm", {f"{CHOICE}.weight_versions": None}, [("unknown", 0, 2)]),
        ("sglang completion", {"metadata.weight_versions": SPANS}, [("1", 0, 1), ("2", 1, 2)]),
        ("vllm completion", {f"{CHOICE}.weight_versions": SPANS}, [("1", 0, 1), ("2", 1, 2)]),
    ],
)
def test_weight_versions(shape: str, changes: Changes, spans: list[tuple[str, int, int]]) -> None:
    assert sound(shape, changes).weight_versions == [VersionSpan(*span) for span in spans]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort", None])
def test_finish_reason(reason: str | None) -> None:
    assert sound("vllm", {f"{CHOICE}.finish_reason": reason}).finish_reason == reason
    assert sound("sglang", {f"{CHOICE}.finish_reason": reason}).finish_reason == (reason or "stop")
    of_meta = {f"{META}.finish_reason": {"type": "abort", "message": "x"}}
    assert sound("sglang", {f"{CHOICE}.finish_reason": reason}, of_meta).finish_reason == (reason or "abort")
    no_meta = {f"{CHOICE}.finish_reason": reason, f"{META}.finish_reason": GONE}
    assert sound("sglang", no_meta).finish_reason == reason


ROUNDED = ["0", "1e-4", "0.0001", "5e-324", "0.00009999"]
"""Logprobs that rounding put over zero."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "value", ["-0.0", "-9998.999", "-1e-320", "-0.1234567890123456789", "-2.5E+1", "-12", *ROUNDED]
)
def test_logprobs_are_kept_exactly(shape: str, value: str) -> None:
    parsed = sound(shape, {LOGPROB[shape]: Text(value)})
    assert array("d", parsed.logprobs).tolist()[1].hex() == float(value).hex()


@pytest.mark.parametrize("count", [2, 4, -3, 0, True, "3", 3.0, [3], {}])
@pytest.mark.parametrize(
    ("shape", "path"),
    [("sglang", "usage.prompt_tokens"), ("sglang", f"{META}.prompt_tokens"), ("vllm", "usage.prompt_tokens")],
)
def test_a_prompt_that_is_miscounted_is_told(shape: str, path: str, count: Any) -> None:
    """Only the caller knows whether it may be: an image's tokens are counted in many ways."""
    told = sound(shape, {path: count}).miscounted
    assert told is not None
    assert path.replace("choices.0", "choices[0]") in told
    for silent in (None, GONE):
        assert sound(shape, {path: silent}).miscounted is None


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("spelling", ["[10,11]", "[10, 11]", " [ 10 ,11 ]", "null"])
def test_copies_that_say_the_same(shape: str, spelling: str) -> None:
    assert sound(shape, {f"{CHOICE}.response_token_ids": Text(spelling)}) == sound(shape)
    prompt = spelling.replace("10", "1, 2").replace("11", "3")
    again = sound(shape, {"prompt_token_ids" if shape == "sglang" else f"{CHOICE}.prompt_token_ids": Text(prompt)})
    assert again == sound(shape)
    assert again.miscounted is None


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("", "model", '"m"'),
        ("", "usage", '{"completion_tokens":2 , "total_tokens":5,"prompt_tokens":3}'),
        (CHOICE, "index", "0"),
        (CHOICE, "message", ""),
        (CHOICE, "finish_reason", '"stop"'),
        ("usage", "prompt_tokens", "3"),
        (MESSAGE, "content", '"hé"'),
    ],
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
@pytest.mark.parametrize("escape", [False, True])
def test_keys_that_stand_twice_and_say_the_same(
    shape: str, path: str, key: str, value: str, first: bool, separators: tuple[str, str], escape: bool
) -> None:
    value = value or json.dumps(SHAPES[shape]["choices"][0]["message"], sort_keys=True)
    pair = (f'"\\u{ord(key[0]):04x}{key[1:]}"' if escape else f'"{key}"', value)
    assert read(shape, doubled(shape, path, pair, first, separators)).output_ids
