"""Canonical messages, and where a request joins a session."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from making import raw, user
from tables import rows

from app.domain import canonical
from app.domain.canonical import CANONICAL, canonical_hash, decode_message
from app.domain.events import Matcher
from app.domain.history import RequestHistory
from app.domain.rules import TreeIndex
from app.errors import InvalidRequest

ARGUMENTS = '{"city":"München","limit":1e3,"deep":{"a":[1.0,null]}}'
CALL = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
REPLY: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I think",
    "tool_calls": [CALL],
}
EMPTY: dict[str, Any] = {**REPLY, "content": ""}
TEXT: dict[str, Any] = {"role": "assistant", "content": "It rains.", "reasoning_content": "hm", "tool_calls": None}


def changed(message: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(dict(message)), **fields}


def without(message: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in copy.deepcopy(dict(message)).items() if name not in names}


def with_call(message: Mapping[str, Any], **function: Any) -> dict[str, Any]:
    result = copy.deepcopy(dict(message))
    result["tool_calls"][0]["function"].update(function)
    return result


def bare_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The calls with OpenAI's own fields alone."""
    result = copy.deepcopy(dict(message))
    result["tool_calls"] = [
        {"function": dict(reversed(call["function"].items())), "type": "function", "id": call["id"]}
        for call in result["tool_calls"]
    ]
    return result


def arguments_as(text: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda message: with_call(message, arguments=text(json.loads(ARGUMENTS)))


HARNESSES: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("openai object", REPLY, lambda m: changed(m, refusal=None, annotations=[], audio=None, function_call=None)),
    ("openai exclude_none", REPLY, lambda m: without(m, "content")),
    ("openai key order", REPLY, lambda m: dict(reversed(m.items()))),
    ("litellm", REPLY, lambda m: changed(without(m, "content"), provider_specific_fields={"refusal": None, "x": 1})),
    ("litellm reasoning moved", TEXT, lambda m: without(m, "reasoning_content", "tool_calls")),
    ("openai-agents", EMPTY, lambda m: bare_calls(changed(without(m, "reasoning_content"), content=None))),
    (
        "langchain-openai",
        EMPTY,
        lambda m: arguments_as(lambda a: json.dumps(a, ensure_ascii=False))(
            bare_calls(changed(without(m, "reasoning_content"), content=None))
        ),
    ),
    (
        "pydantic-ai",
        EMPTY,
        lambda m: arguments_as(lambda a: json.dumps(a, separators=(",", ":")))(bare_calls(changed(m, content=None))),
    ),
    ("inspect-ai empty", REPLY, lambda m: arguments_as(json.dumps)(changed(m, content="\n"))),
    ("inspect-ai text", TEXT, lambda m: changed(m, content="\nIt rains.")),
    ("qwen-agent null", REPLY, lambda m: without(m, "content")),
    ("qwen-agent empty", EMPTY, lambda m: without(m, "content")),
    ("content parts", TEXT, lambda m: changed(m, content=[{"type": "text", "text": "It "}, {"text": "rains."}])),
    ("empty parts", REPLY, lambda m: changed(m, content=[])),
    ("tool_calls absent", TEXT, lambda m: without(m, "tool_calls")),
    ("tool_calls empty", TEXT, lambda m: changed(m, tool_calls=[])),
    ("arguments as an object", REPLY, lambda m: with_call(m, arguments=json.loads(ARGUMENTS))),
    (
        "javascript",
        with_call(REPLY, arguments='{"a":9007199254740993,"b":-12345678901234567890,"c":1e16}'),
        lambda m: with_call(m, arguments='{"c":10000000000000000,"b":-12345678901234567000,"a":9007199254740992}'),
    ),
    ("whitespace", TEXT, lambda m: changed(m, content="It rains. \n")),
]


@pytest.mark.parametrize(("message", "harness"), [h[1:] for h in HARNESSES], ids=[h[0] for h in HARNESSES])
def test_what_harnesses_send_back_is_the_same_message(
    message: dict[str, Any], harness: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert canonical_hash(harness(message), "tolerant") == canonical_hash(message, "tolerant")


def test_a_tool_result_may_name_its_call_by_id_as_qwen_agent_does() -> None:
    sent = {"role": "tool", "content": "7", "tool_call_id": "call_1"}
    assert canonical_hash(without(sent, "tool_call_id") | {"id": "call_1"}, "tolerant") == canonical_hash(
        sent, "tolerant"
    )


@pytest.mark.parametrize("empty", ["", "{}", " {} ", None, {}])
def test_no_arguments_have_many_spellings(empty: object) -> None:
    assert canonical_hash(with_call(REPLY, arguments=empty), "tolerant") == canonical_hash(
        with_call(REPLY, arguments="{}"), "tolerant"
    )


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = rows("history_different")


@pytest.mark.parametrize(("one", "other"), [d[1:] for d in DIFFERENT], ids=[d[0] for d in DIFFERENT])
def test_another_message_is_another(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical_hash(one, "tolerant") != canonical_hash(other, "tolerant")


def test_strict_sees_every_field_but_not_their_order() -> None:
    assert canonical_hash(dict(reversed(REPLY.items())), "strict") == canonical_hash(REPLY, "strict")
    assert canonical_hash(without(REPLY, "reasoning_content"), "strict") != canonical_hash(REPLY, "strict")
    assert canonical_hash(changed(TEXT, content="It rains. "), "strict") != canonical_hash(TEXT, "strict")


def test_role_content_only_does_not_see_calls() -> None:
    assert canonical_hash(without(REPLY, "tool_calls"), "role_content_only") == canonical_hash(
        REPLY, "role_content_only"
    )
    assert canonical_hash(changed(TEXT, content="x"), "role_content_only") != canonical_hash(TEXT, "role_content_only")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'"x"',
        b"null",
        b"7",
        b"{}",
        b'{"role": null}',
        b'{"role": 7}',
        b'{"role": "assistant", "tool_calls": "x"}',
        b'{"role": "assistant", "tool_calls": {"a": 1}}',
        b'{"role": "user", "content": 1e999}',
        b'{"role": "user", "content": ' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"role": "user", "content": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"role": "user", "content": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("matcher", ["tolerant", "strict", "role_content_only"])
def test_a_message_of_the_wrong_shape_is_refused_by_its_place(text: bytes, matcher: Matcher) -> None:
    incoming = RequestHistory([raw(user("a")), msgspec.Raw(text)], matcher)
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        incoming.check(TreeIndex())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["{}", "[1]", "{", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SHAPED = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | JSON},
    optional={
        "content": JSON,
        "tool_calls": st.lists(
            JSON
            | st.fixed_dictionaries({}, optional={"id": JSON, "function": st.fixed_dictionaries({"arguments": JSON})}),
            max_size=2,
        )
        | JSON,
        "function_call": JSON,
        "tool_call_id": JSON,
        "id": JSON,
    },
)


@settings(max_examples=cases(600), deadline=None)
@given(SHAPED, st.sampled_from(["tolerant", "strict", "role_content_only"]))
def test_any_message_is_hashed_or_refused(message: Any, matcher: Matcher) -> None:
    incoming = RequestHistory([raw(message)], matcher)
    try:
        incoming.check(TreeIndex())
    except InvalidRequest:
        return
    assert canonical_hash(decode_message(raw(message), "m"), matcher) == incoming.canonical(0)
    if matcher != "strict":
        respelled = RequestHistory([msgspec.Raw(json.dumps(message, indent=1, ensure_ascii=False).encode())], matcher)
        assert respelled.canonical(0) == incoming.canonical(0)


@pytest.mark.parametrize("matcher", CANONICAL)
def test_a_long_text_is_hashed_as_a_short_one(monkeypatch: pytest.MonkeyPatch, matcher: Matcher) -> None:
    message = {"role": "user", "content": '"é\\\n\u2028😀' * 5, "b": [1, "x" * 40, {}], "a": {"z": "y" * 40, "c": []}}
    whole = canonical_hash(message, matcher)
    monkeypatch.setattr(canonical, "LONG", 7)
    assert canonical_hash(message, matcher) == whole


def test_arguments_that_hold_too_much_are_text() -> None:
    """They are not decoded: equal text is all that they have in common."""

    def called(arguments: str) -> str:
        return canonical_hash({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}, "tolerant")

    few, many = ("[" + "[]," * count + "1]" for count in (10, 60_000))
    assert called(few) == called(few.replace(",", ", "))
    assert called(many) == called(many)
    assert called(many) != called(many.replace(",", ", "))
