"""Committed replies as Messages: what the anthropic package reads, and what a client's next request is matched by."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message
from helpers.amounts import cases
from helpers.replies import CHATS, DEEP, Text, body_of, parse_reply
from tables import rows

from app.domain.calls import given_ids, sampled_calls, with_given_ids
from app.domain.canonical import canonical_hash, decode_message
from app.domain.events import GivenIds
from app.errors import RequestTooLarge, SessionBusy, SessionNotFound, ThreadUnsupported, Unauthorized
from app.protocols.base import CommittedReply
from app.protocols.errors import ErrorFields, engine_error, own_error
from app.protocols.registry import PROTOCOLS

MESSAGES = PROTOCOLS["messages"]
PROOF = "7_" + "0123456789ab" * 2
ASKED = {"model": "claude-x", "max_tokens": 9, "stop_sequences": ["END"]}
USER = {"role": "user", "content": "Hi"}
GENERATED = cases(2000)

TEXTS = ["", " \n", "It rains.", 'Größe "quoted" \\ 🎉 \u2028\u0000\r\n\tx', "a\n" * 20_000, "\ufeff<tool_call>", "{}"]
NUMBERS = ["0", "-0", "-0.0", "1e3", "1000.0", "0.1", "1E-7", "5e-324", "1e16", "1e21", "-1.5e300"]
NUMBERS += ["9007199254740991", "9007199254740993", "12345678901234567890", "123456789012345678901234567890"]
STRINGS = [json.dumps(text) for text in TEXTS[:4]] + ['"\\/\\u00e9é"', '"\\ud83d\\ude00"']
NOT_OBJECTS = ["", " ", "{", '{"a":', "[1]", "null", '"x"', "rm -rf", '{"a":1e999}', '{"a":NaN}', '{"a":"\\ud800"}']
OBJECTS = [" {} ", '{"a":1,"a":2}', '{"2":1,"1":[ ]}', '{"__proto__":{"a":1}}', '{\n\t"a" :\r\n1}', f'{{"a":{DEEP}}}']
OBJECTS += ['{"INVALID_JSON":"x"}', '{"INVALID_JSON":"x","y":1}', '{"INVALID_JSON":1}', '{"a":{"INVALID_JSON":"x"}}']


def value(random: Random, depth: int = 0) -> str:
    """Raw JSON, spaced as it comes."""
    kind, gap = random.randrange(8 if depth < 3 else 6), random.choice(["", " ", "\n  "])
    if kind < 6:
        return random.choice([*NUMBERS, *STRINGS, "true", "null"])
    items = [value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 6:
        return "[" + f",{gap}".join(items) + gap + "]"
    return object_of(items, random, gap)


def object_of(items: list[str], random: Random, gap: str) -> str:
    names = random.sample(['"b"', '"a"', '"10"', '"9"', '"größe"', '""'], len(items))
    return "{" + f",{gap}".join(f"{name}:{gap}{item}" for name, item in zip(names, items, strict=True)) + "}"


def arguments(random: Random) -> Any:
    if random.randrange(3) == 0:
        return random.choice([*NOT_OBJECTS, *OBJECTS, None, {"a": [1.0, "x"]}])
    return object_of([value(random) for _ in range(random.randrange(5))], random, random.choice(["", " "]))


def generated(seed: int) -> bytes:
    """A reply of either engine that the server would commit."""
    random = Random(seed)
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments(random)}}
        for number in range(random.choice([0, 0, 1, 1, 2, 5]))
    ]
    if calls and random.randrange(9) == 0:
        del calls[-1]["id"]
    text, reasoning = random.choice(TEXTS), random.choice([None, *TEXTS])
    shape = random.choice(list(CHATS))
    message = {
        "role": "assistant",
        "content": None if calls and random.randrange(2) else text,
        "reasoning" if shape == "vllm" else "reasoning_content": reasoning,
        "tool_calls": calls or random.choice([None, []]),
    }
    reason = random.choice(["stop", "length", "tool_calls" if calls else "stop"])
    raw = Text(json.dumps(message, ensure_ascii=random.randrange(2) == 0))
    stop = random.choice([{}, {"choices.0.matched_stop": "END", "choices.0.stop_reason": "END"}])
    body = body_of(shape, {"choices.0.message": raw, "choices.0.finish_reason": reason, **stop})
    parse_reply(body, "auto")
    return body


REPLIES = [generated(seed) for seed in range(GENERATED)]


def committed(body: bytes, **asked: Any) -> CommittedReply:
    request = MESSAGES.parse(json.dumps({**ASKED, "messages": [USER], **asked}).encode())
    return CommittedReply(body, PROOF, request.echo, given_to_client(body))


def given_to_client(body: bytes) -> GivenIds | None:
    message = json.dumps(json.loads(body)["choices"][0]["message"]).encode()
    return given_ids(sampled_calls(message), "messages", lambda: PROOF, [])


def client(content: bytes, kind: str) -> anthropic.Anthropic:
    """The SDK, which gets `content` for every request."""
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=content, headers={"content-type": kind}))
    http = httpx2.Client(transport=transport)
    return anthropic.Anthropic(api_key="x", base_url="http://x", http_client=http, max_retries=0)


def whole(reply: CommittedReply) -> Message:
    body = MESSAGES.reply(reply)
    return client(body, "application/json").messages.create(**ASKED, messages=[USER])  # type: ignore[call-overload,no-any-return]


def streamed(reply: CommittedReply) -> Message:
    body = MESSAGES.keepalive + MESSAGES.events(reply)
    with client(body, "text/event-stream").messages.stream(**ASKED, messages=[USER]) as stream:  # type: ignore[arg-type]
        return stream.get_final_message()


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return [whole(committed(body)) for body in REPLIES]


def test_the_packages_stream_parser_assembles_what_it_reads_in_one_piece(messages: list[Message]) -> None:
    for body, message in zip(REPLIES, messages, strict=True):
        assert streamed(committed(body)).model_dump(exclude_none=True) == message.model_dump(exclude_none=True)


def test_a_reply_is_what_the_engine_sampled(messages: list[Message]) -> None:
    """Text, reasoning and calls; an input is the text of its arguments, or holds it."""
    for body, message in zip(REPLIES, messages, strict=True):
        Message.model_validate(message.to_dict(), strict=True)
        sampled = json.loads(body)["choices"][0]["message"]
        reasoning = sampled.get("reasoning_content") or sampled.get("reasoning")
        blocks = [("thinking", reasoning), ("text", sampled["content"])]
        blocks += [("tool_use", json.dumps(call)) for call in sampled["tool_calls"] or []]
        assert [block.type for block in message.content] == [kind for kind, part in blocks if part]
        raw = {block["type"]: block for block in msgspec.json.decode(MESSAGES.reply(committed(body)))["content"]}
        assert raw.get("thinking", {}).get("thinking") == (reasoning or None)
        assert raw.get("thinking", {}).get("signature", f"tl_{PROOF}") == f"tl_{PROOF}"
        assert raw.get("text", {}).get("text") == (sampled["content"] or None)


@pytest.mark.parametrize(
    ("text", "spliced"),
    [
        ('{"b": 1e3,\n "a":1.0}', '{"b": 1e3,\n "a":1.0}'),
        ("", "{}"),
        *(
            (text, json.dumps({"INVALID_JSON": text}, separators=(",", ":")))
            for text in (*NOT_OBJECTS[2:], *OBJECTS[6:7])
        ),
    ],
)
def test_an_input_is_the_text_of_the_arguments(text: str, spliced: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    reply = committed(body_of("sglang", {"choices.0.message.tool_calls": [call]}))
    assert b'"input":' + spliced.encode() + b"}]" in MESSAGES.reply(reply)
    deltas = [
        event for event in events(MESSAGES.events(reply)) if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert [event["delta"]["partial_json"] for event in deltas] == [spliced]


def javascript(values: list[bytes], tmp_path: Path) -> list[Any]:
    """The raw JSON values as a client in JavaScript writes them after it has read them, their keys in reverse order."""
    deno = pytest.importorskip("deno", reason="deno, which runs JavaScript, is not installed")
    code = """
    const turned = (v) => Array.isArray(v) ? v.map(turned) : v && typeof v === "object"
      ? Object.fromEntries(Object.entries(v).reverse().map(([k, x]) => [k, turned(x)])) : v;
    const lines = (await new Response(Deno.stdin.readable).text()).trim().split("\\n");
    console.log(lines.map((line) => JSON.stringify(turned(JSON.parse(line)))).join("\\n"));"""
    environment = {**os.environ, "DENO_DIR": str(tmp_path), "DENO_NO_UPDATE_CHECK": "1"}
    sent = b"\n".join(value.replace(b"\n", b" ").replace(b"\r", b" ") for value in values)
    run = subprocess.run(
        [deno.find_deno_bin(), "eval", code], input=sent, capture_output=True, env=environment, timeout=60, check=True
    )
    return [json.loads(line) for line in run.stdout.decode().strip().split("\n")]


@pytest.fixture(scope="module")
def returned(messages: list[Message], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The content that each kind of client sends back."""
    python = [[block.model_dump(exclude_none=True) for block in message.content] for message in messages]
    replies = [MESSAGES.reply(committed(body)) for body in REPLIES]
    raw = [bytes(msgspec.json.decode(reply, type=dict[str, msgspec.Raw])["content"]) for reply in replies]
    return {
        "the package": python,
        "without thinking": [[block for block in content if block["type"] != "thinking"] for content in python],
        "javascript": javascript(raw, tmp_path_factory.mktemp("deno")),
    }


@pytest.mark.parametrize("kind", ["the package", "without thinking", "javascript"])
def test_what_a_client_sends_back_is_the_stored_reply(returned: dict[str, list[Any]], kind: str) -> None:
    """The next request's chat begins with this request's and its reply: else the session would fork."""
    for body, content in zip(REPLIES, returned[kind], strict=True):
        message = with_given_ids(json.loads(body)["choices"][0]["message"], given_to_client(body))
        stored = json.dumps(message).encode()
        results = [
            {"type": "tool_result", "tool_use_id": block["id"]} for block in content if block["type"] == "tool_use"
        ]
        answer = {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}
        history = [USER, {"role": "assistant", "content": content}, answer]
        request = MESSAGES.parse(json.dumps({**ASKED, "messages": history}).encode())
        sent = [canonical_hash(decode_message(raw, "m"), "tolerant") for raw in request.messages]
        first = MESSAGES.parse(json.dumps({**ASKED, "messages": [USER]}).encode()).messages
        assert sent[:2] == [canonical_hash(decode_message(raw, "m"), "tolerant") for raw in (*first, stored)]
        assert len(sent) == 3 + len(results)
        assert request.proofs == ((PROOF,) if any(block["type"] == "thinking" for block in content) else ())


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of the events, each of which has its type as its name."""
    found = []
    for part in stream.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = part.removeprefix(b"event: ").partition(b"\ndata: ")
        found.append(json.loads(data))
        assert found[-1]["type"] == name.decode()
    return found


STOPS = rows("messages_stops")


@pytest.mark.parametrize(("choice", "expected"), STOPS)
def test_stop_reasons(choice: dict[str, Any], expected: list[str | None]) -> None:
    body = body_of("sglang", {f"choices.0.{name}": value for name, value in choice.items()})
    message = json.loads(MESSAGES.reply(committed(body)))
    assert [message["stop_reason"], message["stop_sequence"]] == expected


def test_cached_tokens_are_sglangs_own_count() -> None:
    body = body_of("sglang", {"choices.0.meta_info.cached_tokens": 2})
    usage = whole(committed(body)).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 2, 2)


ERRORS: list[tuple[ErrorFields, dict[str, Any]]] = [
    (own_error(Unauthorized("no"), "r1"), {"type": "authentication_error", "message": "no", "code": "unauthorized"}),
    (own_error(SessionNotFound("no")), {"type": "not_found_error", "message": "no", "code": "session_not_found"}),
    (own_error(SessionBusy("no")), {"type": "invalid_request_error", "message": "no", "code": "session_busy"}),
    (own_error(RequestTooLarge("no")), {"type": "request_too_large", "message": "no", "code": "request_too_large"}),
    (
        own_error(ThreadUnsupported("no")),
        {
            "type": "invalid_request_error",
            "message": "no",
            "code": "unsupported",
            "details": {"error_code": "thread_unsupported_request"},
        },
    ),
    (ErrorFields(403, "no", "x"), {"type": "permission_error", "message": "no"}),
    (ErrorFields(429, "no", "x"), {"type": "rate_limit_error", "message": "no"}),
    (ErrorFields(502, "no", "x"), {"type": "api_error", "message": "no"}),
    (ErrorFields(503, "no", "x"), {"type": "overloaded_error", "message": "no"}),
    (ErrorFields(529, "no", "x"), {"type": "overloaded_error", "message": "no"}),
    (
        engine_error(400, b'{"message":"beyond the context length","code":400}'),
        {"type": "invalid_request_error", "message": "prompt is too long: beyond the context length", "code": 400},
    ),
]


@pytest.mark.parametrize("body", [b"Internal Server Error", b"{}", b'{"error":{"message":"no"}}'])
def test_an_engines_error_names_the_request(body: bytes) -> None:
    assert json.loads(MESSAGES.error(engine_error(500, body, "r2")))["request_id"] == "r2"


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_an_error_is_the_same_in_a_reply_and_in_a_stream(error: ErrorFields, expected: dict[str, Any]) -> None:
    body = {"type": "error", "error": expected, "request_id": error.request_id}
    assert json.loads(MESSAGES.error(error)) == body
    assert events(MESSAGES.error_event(error)) == [body]
    stream = client(MESSAGES.keepalive + MESSAGES.error_event(error), "text/event-stream").messages.stream(
        **ASKED,  # type: ignore[arg-type]
        messages=[USER],  # type: ignore[list-item]
    )
    with pytest.raises(anthropic.APIStatusError) as raised, stream as opened:
        opened.get_final_message()
    assert raised.value.body == body
