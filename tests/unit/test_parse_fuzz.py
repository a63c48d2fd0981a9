"""`parse_reply` on mutated bodies: nothing but Rejected is raised, and what is accepted is what `json` reads."""

from __future__ import annotations

import copy
import json
import math
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import DEEP, SHAPES, body_of

from app.domain.history import canonical_hash, decode_message
from app.protocols.stream import as_stream
from workers.codec import Wire, paste, unpack
from workers.job import Job, work
from workers.parse import MAX_TOKEN_ID, Parsed, Rejected, parse_reply

PLAIN = [
    "null",
    "true",
    "-1",
    "0",
    "7",
    "2.0",
    "1e999",
    "NaN",
    "-9999",
    "1e3",
    "[]",
    "{}",
    "[[]]",
    "[-1,3]",
    "[[-1,3],[-2,4]]",
    "tru",
]
JUNK: list[str] = [
    *PLAIN,
    str(2**31),
    str(2**70),
    '""',
    '"x"',
    '"\\ud800"',
    '"\\u0000"',
    '{"a":1,"a":2}',
    '{"role":"assistant"}',
    "9" * 5000,
    DEEP,
    "",
]
BYTES = [
    b"",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"0",
    b"-",
    b"e9",
    b"\\",
    b"\xff",
    b"\x00",
    b" ",
    b"1e999",
    b"NaN",
    b"true",
]


def _whole(digits: str) -> int | str:
    """An integer; one that Python refuses to read stays text. What follows a token's id may hold one."""
    return int(digits) if len(digits) < 4000 else digits


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), "duplicate keys"
    return dict(pairs)


def is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > -9999


def reference(body: bytes, parsed: Parsed) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, output ids and logprobs, read slowly; asserts every rule that it passes."""
    reply = json.loads(body.decode(), parse_int=_whole)
    assert type(reply) is dict
    (choice,) = reply["choices"]
    message = choice["message"]
    if parsed.dialect == "sglang":
        meta = choice["meta_info"]
        entries = meta["output_token_logprobs"]
        assert all(type(entry) is list and len(entry) >= 2 for entry in entries)
        ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        count, prompt = meta["completion_tokens"], choice["prompt_token_ids"]
    else:
        ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        count, prompt = reply["usage"]["completion_tokens"], reply["prompt_token_ids"]
    assert type(count) is int
    assert count == len(ids) == len(logprobs)
    assert all(is_id(value) for value in [*ids, *prompt])
    assert all(is_logprob(value) for value in logprobs)
    assert message["role"] == "assistant"
    content = message.get("content")
    reasoned = message.get("reasoning_content") or message.get("reasoning")
    assert type(content) is str or (content is None and (message.get("tool_calls") or reasoned or not ids))
    assert json.loads(parsed.message) == message
    return prompt, ids, [float(value) for value in logprobs]


def judge(body: bytes) -> bool:
    """Parse, and hold what is accepted against the reference. Was it accepted?"""
    try:
        parsed = parse_reply(body, "auto")
    except Rejected:
        return False
    prompt, ids, logprobs = reference(body, parsed)
    assert array("i", parsed.suffix_ids).tolist() == prompt
    assert array("i", parsed.output_ids).tolist() == ids
    assert [value.hex() for value in array("d", parsed.logprobs)] == [value.hex() for value in logprobs]
    assert sum(span.end - span.start for span in parsed.weight_versions) == len(ids)
    serve(body, parsed)
    return True


def serve(body: bytes, parsed: Parsed) -> None:
    """What happens to an accepted reply afterwards must not fail: it is judged, stored, streamed, given again."""
    canonical_hash(decode_message(parsed.message, "m"), "tolerant")
    as_stream(body)
    done = work(Job(parsed.dialect, None, [], [], [], 200, "", b""), memoryview(body))
    assert paste(unpack(done.wire, Wire), memoryview(parsed.suffix_ids).cast("i"), {}) == body


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in children for deeper in places(child, (*path, key)))]


def render(value: Any, junk: dict[str, str]) -> bytes:
    text = json.dumps(value, ensure_ascii=False)
    for mark, literal in junk.items():
        text = text.replace(json.dumps(mark), literal)
    return text.encode()


def mutate(reply: dict[str, Any], choose: Callable[[int], int]) -> bytes:
    """Replace, drop or add at one or two random places."""
    reply, junk = copy.deepcopy(reply), {}
    for number in range(1 + choose(2)):
        spots = places(reply)[1:]
        if not spots:
            break
        *path, last = spots[choose(len(spots))]
        target: Any = reply
        for part in path:
            target = target[part]
        junk[f"@{number}"] = JUNK[choose(len(JUNK))]
        match choose(4), target:
            case 0, _:
                del target[last]
            case 1, dict():
                target["added"] = f"@{number}"
            case 1, list():
                target.append(f"@{number}")
            case _:
                target[last] = f"@{number}"
    return render(reply, junk)


def test_every_place_with_every_junk_value() -> None:
    """Not random: each of the reply's places holds each of the values once."""
    accepted = 0
    for reply in SHAPES.values():
        for *path, last in places(reply)[1:]:
            for literal in JUNK:
                changed = copy.deepcopy(reply)
                target: Any = changed
                for part in path:
                    target = target[part]
                target[last] = "@"
                accepted += judge(render(changed, {"@": literal}))
    assert accepted > 100


@pytest.mark.parametrize("shape", ["sglang", "vllm"])
@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_json(shape: str, seed: int) -> None:
    judge(mutate(SHAPES[shape], random.Random(seed).randrange))


@pytest.mark.parametrize("shape", ["sglang", "vllm"])
@settings(max_examples=250, deadline=None)
@given(at=st.floats(0, 1), length=st.integers(0, 4), junk=st.sampled_from(BYTES) | st.binary(max_size=3))
def test_mutated_bytes(shape: str, at: float, length: int, junk: bytes) -> None:
    body = body_of(shape)
    start = int(at * len(body))
    judge(body[:start] + junk + body[start + length :])


@pytest.mark.parametrize("shape", ["sglang", "vllm"])
def test_every_cut_is_rejected(shape: str) -> None:
    body = body_of(shape)
    for end in range(len(body)):
        with pytest.raises(Rejected):
            parse_reply(body[:end], "auto")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    assert not judge(body)


LOGPROB = st.floats(-9998, 0, allow_subnormal=True).map(repr) | st.integers(0, 10**40).map(
    lambda digits: f"-0.{digits:041}"
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(LOGPROB, st.integers(0, MAX_TOKEN_ID)), max_size=6),
    st.lists(st.integers(0, MAX_TOKEN_ID), max_size=6),
)
def test_sound_numbers_are_read_exactly(tokens: list[tuple[str, int]], prompt: list[int]) -> None:
    triples = "[" + ",".join(f"[{logprob}, {number}, null]" for logprob, number in tokens) + "]"
    vllm = "[" + ",".join('{"token":"x","logprob":' + logprob + "}" for logprob, _ in tokens) + "]"
    ids = [number for _, number in tokens]
    sglang_reply, vllm_reply = copy.deepcopy(SHAPES["sglang"]), copy.deepcopy(SHAPES["vllm"])
    sglang_reply["choices"][0].update(prompt_token_ids=prompt)
    sglang_reply["choices"][0]["meta_info"].update(output_token_logprobs="@", completion_tokens=len(ids))
    vllm_reply["choices"][0].update(token_ids=ids, logprobs={"content": "@"})
    vllm_reply.update(prompt_token_ids=prompt, usage={"completion_tokens": len(ids)})
    assert judge(render(sglang_reply, {"@": triples}))
    assert judge(render(vllm_reply, {"@": vllm}))
