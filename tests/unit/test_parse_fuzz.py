"""`parse_reply` on mutated bodies: nothing but Rejected is raised, and what is accepted is what `json` reads."""

from __future__ import annotations

import json
import math
from array import array
from random import Random
from typing import Any

import pytest
from helpers.amounts import cases
from helpers.replies import BYTES, COMPLETIONS, JUNK, SHAPES, Parsed, Reply, Text, body_of, mutated, parse_reply, paths
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain import events
from app.domain.canonical import canonical_hash, decode_message
from app.protocols.base import CommittedReply
from app.protocols.registry import PROTOCOLS
from workers.codec import Exchange, paste, unpack
from workers.job import work
from workers.parse import MAX_TOKEN_ID, Protocol, Rejected
from workers.reply import Job


def _whole(digits: str) -> int | str:
    """An integer; one that Python refuses to read stays text. What follows a token's id may hold one."""
    return int(digits) if len(digits) < 4000 else digits


def is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > -9999


def reference(body: bytes, shape: str, parsed: Parsed) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, output ids and logprobs, read slowly; asserts every rule that it passes."""
    reply = json.loads(body.decode(), parse_int=_whole)
    assert type(reply) is dict
    (choice,) = reply["choices"]
    prompt = reply["prompt_token_ids"] if (shape, parsed.dialect) == ("chat", "vllm") else choice["prompt_token_ids"]
    if (shape, parsed.dialect) == ("chat", "sglang"):
        meta = choice["meta_info"]
        entries = meta["output_token_logprobs"]
        assert all(type(entry) is list and len(entry) >= 2 for entry in entries)
        ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        count = meta["completion_tokens"]
    else:
        ids, count = choice["token_ids"], reply["usage"]["completion_tokens"]
        found = choice["logprobs"]
        logprobs = [one["logprob"] for one in found["content"]] if shape == "chat" else found["token_logprobs"]
    assert type(count) is int
    assert count == len(ids) == len(logprobs)
    assert all(is_id(value) for value in [*ids, *prompt])
    assert all(is_logprob(value) for value in logprobs)
    require_message(choice, shape, parsed, ids)
    return prompt, ids, [float(value) for value in logprobs]


def require_message(choice: Reply, shape: str, parsed: Parsed, ids: list[int]) -> None:
    if shape != "chat":
        assert type(choice["text"]) is str
        assert json.loads(parsed.message) == choice["text"]
        return
    message = choice["message"]
    assert message["role"] == "assistant"
    content = message.get("content")
    reasoned = message.get("reasoning_content") or message.get("reasoning")
    assert type(content) is str or (content is None and (message.get("tool_calls") or reasoned or not ids))
    assert json.loads(parsed.message) == message


def judge(body: bytes, shape: str = "sglang") -> bool:
    """Parse, and hold what is accepted against the reference. Was it accepted?"""
    protocol: Protocol = "completions" if shape in COMPLETIONS else "chat"
    try:
        parsed = parse_reply(body, "auto", protocol=protocol)
    except Rejected:
        return False
    prompt, ids, logprobs = reference(body, protocol, parsed)
    assert array("i", parsed.suffix_ids).tolist() == prompt
    assert array("i", parsed.output_ids).tolist() == ids
    assert [value.hex() for value in array("d", parsed.logprobs)] == [value.hex() for value in logprobs]
    assert sum(span.end - span.start for span in parsed.weight_versions) == len(ids)
    if protocol == "chat":
        serve(body, parsed)
    return True


def serve(body: bytes, parsed: Parsed) -> None:
    """What happens to an accepted reply afterwards must not fail: it is judged, stored, streamed, given again."""
    canonical_hash(decode_message(parsed.message, "m"), "tolerant")
    reply = CommittedReply(body, "1_" + "0" * 24)
    for protocol in PROTOCOLS.values():
        if protocol.name in events.COMPLETIONS - {"completions"}:
            continue  # Its replies are made of a completion.
        protocol.reply(reply)
        protocol.events(reply)
    done = work(Job(parsed.dialect, None, [], [], [], 200, "", b""), memoryview(body))
    assert paste(unpack(done.exchange, Exchange), memoryview(parsed.suffix_ids).cast("i"), {}) == body


@pytest.mark.parametrize("shape", SHAPES)
def test_every_place_with_every_junk_value(shape: str) -> None:
    """Not random: each of the reply's places holds each of the values once."""
    bodies = (body_of(shape, {at: Text(junk)}) for at in paths(SHAPES[shape]) for junk in JUNK)
    assert sum(judge(body, shape) for body in bodies) > 50


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=cases(500), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_json(shape: str, seed: int) -> None:
    judge(mutated(shape, Random(seed)), shape)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=cases(500), deadline=None)
@given(at=st.floats(0, 1), length=st.integers(0, 4), junk=st.sampled_from(BYTES) | st.binary(max_size=3))
def test_mutated_bytes(shape: str, at: float, length: int, junk: bytes) -> None:
    body = body_of(shape)
    start = int(at * len(body))
    judge(body[:start] + junk + body[start + length :], shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cut_is_rejected(shape: str) -> None:
    body = body_of(shape)
    assert judge(body, shape)
    assert not any(judge(body[:end], shape) for end in range(len(body)))
