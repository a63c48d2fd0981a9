"""An engine's stream is read into the reply that it would have sent as a whole."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from helpers.replies import Parsed, parse_reply

from app.upstream.dialects import streamed
from app.upstream.streams import IDS_STREAM, BadStream, CutStream, ReplyStream, limit_of
from ops.simulator.app import Simulator
from ops.simulator.wire import Config, Dialect, Reply
from workers.parse import Rejected
from workers.reply import UNKNOWN_VERSION

pytestmark = pytest.mark.anyio

ASKS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
STREAMS = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLS = [{"name": "look", "arguments": '{"at": 1e3,  "b":"ü"}'}, {"name": "look", "arguments": "{}"}]

SIMS: dict[str, dict[str, Any]] = {
    "prose": {},
    "reasoning": {"reasoning": True, "tool_calls": False},
    "calls": {"calls": CALLS, "reasoning": True, "text": "So: "},
    "calls alone": {"calls": CALLS, "reasoning": False, "text": ""},
    "unicode": {"text": "Füße 👩‍👩‍👧 \u2028 end\n\n", "reasoning": False},
    "cut": {"finish_reason": "length", "reasoning": False},
    "aborted": {"finish_reason": "abort", "reasoning": False},
    "long": {"completion_tokens": 700},
    "two versions": {"weight_versions": ["1", "2"]},
    "one token": {"completion_tokens": 1, "text": "a"},
}


QUEUED = {"finish_reason": "abort", "completion_tokens": 0, "queued": True}
SGLANG_ASKS = {
    "logprobs": True,
    "return_meta_info": True,
    "return_prompt_token_ids": True,
    "return_routed_experts": True,
}


async def replied(seed: int, dialect: Dialect = "vllm", **fields: Any) -> Reply:
    """The simulator's first reply to this request."""
    simulator = Simulator(Config(dialect=dialect, seed=seed))
    asks = ASKS if dialect == "vllm" else SGLANG_ASKS
    body = {"model": "m", "messages": [{"role": "user", "content": f"Hello {seed}"}], "tools": [TOOL], **asks, **fields}
    if "stream" in fields and dialect == "sglang":
        body = msgspec.json.decode(streamed(msgspec.json.encode(body))[:-1] + IDS_STREAM + b"}")

    async def never() -> None:
        raise AssertionError

    reply = await simulator.generate("/v1/chat/completions", msgspec.json.encode(body), never)
    assert reply is not None
    return reply


def assembled(body: bytes, rng: random.Random | None = None) -> tuple[bytes, list[dict[str, Any]]]:
    """The whole reply, and the deltas; the body comes cut at random places."""
    deltas: list[dict[str, Any]] = []
    stream = ReplyStream(lambda begun, delta: deltas.append(dict(delta)))
    while body:
        size = rng.randint(1, 400) if rng else len(body)
        stream.feed(body[:size])
        body = body[size:]
    return stream.reply(), deltas


def facts(parsed: Parsed) -> tuple[Any, ...]:
    """What is validated and stored; of the message what is not empty. Only a call's `index` is a stream's own."""
    message = msgspec.json.decode(parsed.message)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
    said = {name: value for name, value in message.items() if value not in (None, "")}
    return said, parsed._replace(message=b"")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", SIMS)
async def test_a_stream_holds_the_reply(name: str, seed: int) -> None:
    whole = (await replied(seed, sim=SIMS[name])).body
    stream = (await replied(seed, sim=SIMS[name], **STREAMS)).body
    found, deltas = assembled(stream, random.Random(seed))
    assert facts(parse_reply(found, "vllm")) == facts(parse_reply(whole, "vllm"))
    one, other = (msgspec.json.decode(body) for body in (found, whole))
    assert one["usage"] == other["usage"]
    assert one["choices"][0]["stop_reason" if "stop_reason" in one["choices"][0] else "index"] in (None, 0)
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == (one["choices"][0]["message"]["content"] or "")


@pytest.mark.parametrize("name", [*SIMS, "chunks", "queued"])
async def test_a_stream_of_sglangs_holds_the_reply(name: str) -> None:
    """Its ids, logprobs and experts; no weight version, and no cached tokens without a cache report."""
    more = {"chunks": {"text": "one two three four", "chunk_tokens": 2, "reasoning": False}, "queued": QUEUED}
    sim = SIMS.get(name) or more.get(name) or {}
    whole = parse_reply((await replied(2, "sglang", sim=sim)).body, "sglang")
    found, deltas = assembled((await replied(2, "sglang", sim=sim, **STREAMS)).body, random.Random(2))
    untold = {"weight_versions": whole.weight_versions, "cached_tokens": whole.cached_tokens}
    told = parse_reply(found, "sglang")
    assert {span.version for span in told.weight_versions} <= {UNKNOWN_VERSION}
    assert facts(told._replace(**untold)) == facts(whole)
    assert bool(told.payloads) == (name != "queued")
    assert "".join(delta.get("content", "") for delta in deltas) == facts(told)[0].get("content", "")


@pytest.mark.parametrize("ids", [b"null", b"[]", b"[[]]", b"[[1,2]]", b"[[1],[2]]", b"[[true]]", b"[1]"])
async def test_a_stream_of_sglangs_with_other_ids_than_logprobs_is_no_reply(ids: bytes) -> None:
    body = (await replied(2, "sglang", sim={"text": "one two three"}, **STREAMS)).body
    at = body.index(b'"output_ids":') + len(b'"output_ids":')
    end = body.index(b"}", at)
    assert parse_reply(assembled(body)[0], "sglang").output_ids
    with pytest.raises((BadStream, Rejected)):
        parse_reply(assembled(body[:at] + ids + body[end:])[0], "sglang")


async def test_the_end_of_a_line_may_have_a_carriage_return() -> None:
    stream = (await replied(1, **STREAMS)).body
    assert assembled(stream.replace(b"\n", b"\r\n"), random.Random(1))[0] == assembled(b": alive\n\n" + stream)[0]


@pytest.mark.parametrize("name", SIMS)
async def test_what_has_come_of_a_stream_is_a_reply_that_was_aborted(name: str) -> None:
    whole = parse_reply((await replied(3, sim=SIMS[name])).body, "vllm")
    events = (await replied(3, sim=SIMS[name], **STREAMS)).parts
    for cut in range(2, len(events) - 2, 1 + len(events) // 20):
        stream = ReplyStream()
        stream.feed(b"".join(events[:cut]) + events[cut][:10])
        if stream.tokens and not stream.has_ended:
            begun = parse_reply(stream.begun(), "vllm")
            assert (begun.finish_reason, len(begun.output_ids)) == ("abort", 4 * stream.tokens)
            assert whole.output_ids.startswith(begun.output_ids)
            assert whole.logprobs.startswith(begun.logprobs)
            assert begun.suffix_ids == whole.suffix_ids


BROKEN = (
    *("not_json", "truncated_json", "bad_utf8", "not_object", "nan_logprob", "inf_logprob", "null_logprob"),
    *("bool_logprob", "positive_logprob", "minus_9999_logprob", "bool_id", "negative_id", "huge_id", "float_id"),
    *("missing_meta_info", "missing_logprobs", "short_logprobs", "two_choices", "message_null", "missing_prompt_ids"),
    *("no_choices", "deep_nesting", "error_200"),
)


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_malformed_stream_is_no_reply(fault: str) -> None:
    broken = (await replied(1, sim={"fault": fault, "reasoning": False}, **STREAMS)).body
    with pytest.raises((BadStream, Rejected)):
        parse_reply(assembled(broken)[0], "vllm")


async def test_a_stream_without_one_of_its_events_is_no_reply() -> None:
    events = (await replied(1, sim={"calls": CALLS, "text": "So: "}, **STREAMS)).parts
    for missing in range(len(events)):
        with pytest.raises((BadStream, Rejected)):
            parse_reply(assembled(b"".join(events[:missing] + events[missing + 1 :]))[0], "vllm")
        if missing:
            with pytest.raises(BadStream):
                assembled(b"".join(events[:missing]))


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[{"index":1,"delta":{"content":"a"}}]}',
        b'{"choices":[{"index":0,"delta":{"content":1}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"index":0,"delta":{"content":[{"type":"image_url"}]}}]}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":{}}}]}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"id":{"a":1}}]}}]}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":true}]}}]}',
        b'{"choices":[{"index":0,"delta":{},"token_ids":5}]}',
        b'{"choices":[{"index":0,"delta":{"content":"a"},"delta":{"content":"b"}}]}',
        b'{"choices":{}}',
        b"[]",
        b"data",
        b"[" * 5000,
    ],
)
async def test_a_chunk_that_no_engine_sends_is_refused_at_once(chunk: bytes) -> None:
    first = (await replied(1, **STREAMS)).parts[0]
    stream = ReplyStream(lambda begun, delta: None)
    stream.feed(first)
    with pytest.raises(BadStream):
        stream.feed(b"data: " + chunk + b"\n\n")


@pytest.mark.parametrize("over", [16, 17])
async def test_an_engine_that_goes_on_past_the_limit_is_left(over: int) -> None:
    events = (await replied(1, max_tokens=4 + over, sim={"reasoning": False}, **STREAMS)).parts
    stream = ReplyStream(limit=4)
    if over == 16:
        stream.feed(b"".join(events))
        assert len(parse_reply(stream.reply(), "vllm").output_ids) == 4 * 20
    else:
        with pytest.raises(BadStream, match="21 tokens came, and the request allows 4"):
            stream.feed(b"".join(events))


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        (b'{"max_tokens":7}', 7),
        (b'{"max_tokens":7,"max_completion_tokens":5}', 5),
        (b'{"max_tokens":7,"max_completion_tokens":null}', 7),
        (b'{"max_tokens":true,"x":[{"max_tokens":1}]}', None),
        (b"{}", None),
    ],
)
def test_the_limit_is_the_one_that_engines_read(params: bytes, limit: int | None) -> None:
    assert limit_of(params) == limit


@pytest.mark.parametrize(
    "end",
    [
        b'{"error":{"message":"secret","code":429,"type":"a type of many words"}}',
        b'{"choices":[{"index":0,"delta":{},"finish_reason":"error","error":{"message":"secret","code":429}}]}',
        b'{"choices":[{"index":0,"delta":{},"finish_reason":"error","error":"secret"}]}',
    ],
)
async def test_an_error_ends_a_stream_and_its_code_is_told(end: bytes) -> None:
    first, second, *_ = (await replied(1, **STREAMS)).parts
    stream = ReplyStream()
    stream.feed(first + second)
    with pytest.raises(CutStream) as told:
        stream.feed(b"data: " + end + b"\n\n")
    assert ("429" in str(told.value), "secret" in str(told.value)) == (b"429" in end, False)
    assert not stream.has_ended


async def test_nothing_follows_the_end() -> None:
    events = (await replied(1, **STREAMS)).parts
    for again in (1, -2, -3):
        with pytest.raises(BadStream):
            assembled(b"".join([*events, events[again]]))
    with pytest.raises(BadStream):
        assembled(b"".join([*events[:-1], events[1], events[-1]]))
