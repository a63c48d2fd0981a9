"""Requests of the Messages API as chats."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest
from tables import rows

from app.domain.canonical import canonical_hash
from app.domain.prefill import CONTINUES
from app.domain.request import ChatRequest
from app.domain.request import canonical_hash as hash_of_request
from app.errors import InvalidRequest, Unsupported
from app.protocols.messages.parse import parse_messages
from app.protocols.registry import PROTOCOLS

MESSAGES = PROTOCOLS["messages"]
PROOF, OTHER = ("1_" + "a" * 24, "2_" + "b" * 24)
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "does f", "input_schema": SCHEMA}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **({} if content is None else {"content": content}), **more}


def thought(value: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": signature}


def request(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": messages, **fields}


def parsed(messages: list[Any] | None = None, **fields: Any) -> ChatRequest:
    found = MESSAGES.parse(json.dumps(request([USER] if messages is None else messages, **fields)).encode())
    assert isinstance(found, ChatRequest)
    return found


def chat(found: ChatRequest) -> list[Any]:
    return [json.loads(bytes(raw)) for raw in found.messages]


def params(**fields: Any) -> dict[str, Any]:
    found = {name: json.loads(bytes(raw)) for name, raw in parsed(**fields).params.items()}
    assert found.pop("model") == "m"
    assert found.pop("max_tokens") == 9
    return found


BILLING = text("x-anthropic-billing-header: cc_version=1; cch=9f;")
DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}

CONVERSATIONS: list[tuple[str, Any, list[Any], list[Any]]] = rows("messages_conversations")


@pytest.mark.parametrize(
    ("system", "messages", "expected"), [c[1:] for c in CONVERSATIONS], ids=[c[0] for c in CONVERSATIONS]
)
def test_a_conversation_as_chat_messages(system: Any, messages: list[Any], expected: list[Any]) -> None:
    found = parsed(messages) if system is None else parsed(messages, system=system)
    assert chat(found) == expected
    assert (CONTINUES in found.params) == (messages[-1]["role"] == "assistant")
    counted = parse_messages(
        json.dumps({"model": "m", "messages": messages, "system": system}).encode(), generates=False
    )
    assert (chat(counted), CONTINUES in counted.params) == (expected, False)


def test_arguments_keep_the_clients_own_bytes() -> None:
    raw = (
        '{"model":"m","max_tokens":9,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",'
    )
    raw += '"input":{"b" : 1e3, "a":\n"\\u00e9 x"}}]}, {"role":"user","content":"Hi"}]}'
    (first, _) = chat(MESSAGES.parse(raw.encode()))  # type: ignore[arg-type]
    assert first["tool_calls"][0]["function"]["arguments"] == '{"b":1e3,"a":"\\u00e9 x"}'


def test_signatures_name_turns_the_newest_last() -> None:
    signed = [assistant(thought("a", f"tl_{PROOF}")), USER, assistant(thought("", "EqQB")), USER]
    assert parsed([USER, *signed, assistant(thought("b", f"tl_{OTHER}")), USER]).proofs == (PROOF, OTHER)


PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = rows("messages_params")


@pytest.mark.parametrize(("fields", "expected"), PARAMS)
def test_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params(**fields) == expected


def test_tools() -> None:
    more = {"cache_control": {}, "input_examples": [{}], "eager_input_streaming": True, "defer_loading": None}
    bare = {"type": "custom", "name": "g", "input_schema": {}, "strict": True, "allowed_callers": ["direct"]}
    found = parsed(tools=[{**TOOL, **more}, bare])
    assert json.loads(bytes(found.tools or b"")) == [
        {"type": "function", "function": {"name": "f", "description": "does f", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "parameters": {}, "strict": True}},
    ]


REFUSED: list[tuple[str, dict[str, Any], bool]] = rows("messages_refused")


@pytest.mark.parametrize(("place", "fields", "is_unsupported"), REFUSED)
def test_what_is_refused_is_named(place: str, fields: dict[str, Any], is_unsupported: bool) -> None:
    with pytest.raises(InvalidRequest) as raised:
        MESSAGES.parse(json.dumps(request([USER]) | fields).encode())
    assert str(raised.value).startswith((f"{place} ", f"{place}:"))
    assert isinstance(raised.value, Unsupported) == is_unsupported


def block(random: Random) -> Any:
    made = [text("a"), text(""), text(" b"), PNG, DOCUMENT, result("1", "r"), result("2", [text("x"), URL])]
    return random.choice(made)


def reply_of(random: Random) -> dict[str, Any]:
    parts = [thought("t", f"tl_{PROOF}"), text("x"), use("1", a=1e3), use("2")]
    return assistant(*(part for part in parts if random.randrange(2)))


def test_a_history_that_grows_begins_with_what_it_was() -> None:
    """Over random conversations: request N and its reply begin request N + 1, whatever is marked for a cache."""
    for seed in range(500):
        random = Random(seed)
        history: list[Any] = [system("S")] if random.randrange(3) == 0 else []
        before: list[str] = []
        for _ in range(4):
            for _ in range(random.randrange(1, 4)):
                said_now = [
                    user(*(block(random) for _ in range(random.randrange(4)))),
                    USER,
                    system("S"),
                    system([BILLING]),
                ]
                history.append(random.choice(said_now))
            history.append(USER)
            marked = copy.deepcopy(history)
            if isinstance(marked[-1]["content"], list) and marked[-1]["content"]:
                marked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
            hashes = hashes_of(parsed(marked))
            assert hashes[: len(before)] == before
            reply = reply_of(random)
            history.append(reply)
            before = hashes_of(parsed(history))
            assert before[:-1] == hashes


def hashes_of(found: ChatRequest) -> list[str]:
    return [canonical_hash(json.loads(bytes(raw)), "tolerant") for raw in found.messages]


def test_what_moves_from_turn_to_turn_is_not_in_the_hash_of_a_request() -> None:
    one = parsed(
        [user(text("a", cache_control={"type": "ephemeral"}))], system=[BILLING, text("A")], metadata={"user_id": "1"}
    )
    other = parsed([user(text("a"))], system=[{**BILLING, "text": BILLING["text"] + "2"}, text("A", cache_control={})])
    assert hash_of_request(one, "h") == hash_of_request(other, "h")
    assert [bytes(raw) for raw in one.messages] == [bytes(raw) for raw in other.messages]
    assert one.echo == other.echo
