"""Messages and tools as an engine hands them to a template; each value was seen in the engine's own prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import InvalidRequest, Unsupported
from app.tito import normalise
from app.tito.normalise import REASONING, EngineDialect, MessageFormat


def one(message: dict[str, Any], dialect: EngineDialect | None = "sglang", **more: Any) -> dict[str, Any]:
    return normalise.messages([message], MessageFormat(**more), dialect)[0]


def test_absent_content_is_empty_text_and_nulls_go() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "name": None}
    assert one(message) == {"role": "assistant", "content": ""}


def test_a_user_message_is_its_role_and_content() -> None:
    assert one({"role": "user", "content": "a", "name": "b", "extra": 1}) == {"role": "user", "content": "a"}


def test_text_parts_stay_a_list_where_the_template_reads_lists_and_are_joined_elsewhere() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    kept = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one({"role": "user", "content": parts}, lists=frozenset({"sglang"}))["content"] == kept
    assert one({"role": "user", "content": parts}, "vllm", lists=frozenset({"sglang"}))["content"] == "a\nb"
    assert one({"role": "user", "content": parts})["content"] == "a b"
    assert one({"role": "tool", "content": parts}, lists=frozenset({"sglang"}))["content"] == "a b"
    assert one({"role": "tool", "content": parts}, "vllm", lists=frozenset({"vllm"}))["content"] == "a\nb"


def test_text_that_the_template_shows_as_a_list_alone_is_refused_for_sglang_which_gives_it_as_text() -> None:
    message = {"role": "user", "content": "secret"}
    assert one(message, "vllm", parts=True)["content"] == [{"type": "text", "text": "secret"}]
    with pytest.raises(Unsupported, match=r"^messages\[0\]: content must be a list of parts") as error:
        one(message, parts=True)
    assert "secret" not in str(error.value)


def test_parts_that_are_not_text_are_refused_by_place_and_not_by_content() -> None:
    parts = [{"type": "text", "text": "secret"}, {"type": "image_url", "image_url": {"url": "secret"}}]
    with pytest.raises(Unsupported, match=r"messages\[1\]: content part 1 is not text") as error:
        normalise.messages(
            [{"role": "user", "content": "a"}, {"role": "user", "content": parts}], MessageFormat(), "sglang"
        )
    assert "secret" not in str(error.value)


REFUSED = object()


@pytest.mark.parametrize(
    ("text", "sglang", "vllm", "stored"),
    [
        (
            '{"b": 1, "a": [2.5, null]}',
            {"b": 1, "a": [2.5, None]},
            {"b": 1, "a": [2.5, None]},
            {"b": 1, "a": [2.5, None]},
        ),
        ({"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}),
        (None, None, {}, {}),
        ("", REFUSED, {}, {}),
        ("not JSON", REFUSED, {}, "not JSON"),
        ("[1]", REFUSED, {}, "[1]"),
        ('{"a": "\\ud800"}', REFUSED, {"a": "\ud800"}, '{"a": "\\ud800"}'),
        ('{"a": 1e400}', REFUSED, {"a": float("inf")}, '{"a": 1e400}'),
        ('{"a": %s}' % ("9" * 400), REFUSED, {"a": int("9" * 400)}, {"a": int("9" * 400)}),
        # Past 64 bits: a double for SGLang, which prints it otherwise.
        ('{"a": 18446744073709551616}', {"a": 1.8446744073709552e19}, {"a": 1 << 64}, {"a": 1 << 64}),
        ('{"a": 18446744073709551615}', {"a": (1 << 64) - 1}, {"a": (1 << 64) - 1}, {"a": (1 << 64) - 1}),
    ],
)
def test_tool_arguments_become_objects_as_the_engine_makes_them(text: Any, sglang: Any, vllm: Any, stored: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}, "extra": 1}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}

    def seen(dialect: EngineDialect, stored: bool = False) -> Any:
        [shown] = normalise.messages([message], MessageFormat(), dialect, stored=stored)
        assert list(shown["tool_calls"][0]) == ["id", "index", "type", "function"]
        return shown["tool_calls"][0]["function"]["arguments"]

    assert json.dumps(seen("vllm")) == json.dumps(vllm)
    assert json.dumps(seen("sglang", stored=True)) == json.dumps(stored)
    if sglang is REFUSED:
        with pytest.raises(InvalidRequest, match=r"arguments must be|too large"):
            seen("sglang")
    else:
        assert json.dumps(seen("sglang")) == json.dumps(sglang)


@pytest.mark.parametrize(
    ("dialect", "read"),
    [("sglang", ("reasoning_content",)), ("vllm", ("reasoning", "reasoning_content")), (None, REASONING)],
)
def test_reasoning_is_read_and_given_as_the_engine_does(dialect: EngineDialect | None, read: tuple[str, ...]) -> None:
    for name in REASONING:
        given = dict.fromkeys(read, "r") if name in read else {}
        assert one({"role": "assistant", name: "r"}, dialect) == {"role": "assistant", "content": "", **given}
    assert one({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, dialect)["reasoning_content"] == (
        "a" if dialect == "vllm" else "b"
    )


def test_tools_and_phase_of_a_message_are_given_as_sglang_dumps_them() -> None:
    message = {"role": "developer", "content": "a", "phase": "commentary", "tools": [{"function": {"name": "f"}}]}
    function = {"name": "f", "description": None, "parameters": None}
    assert one(message)["phase"] == "commentary"
    assert one(message)["tools"] == [{"type": "function", "function": function, "defer_loading": None}]


def test_a_template_gets_arguments_as_text_or_content_as_parts_if_it_takes_no_other() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a":  1}'}}
    message_format = MessageFormat(parts=True, text_arguments=True)
    message = {"role": "assistant", "content": "a", "tool_calls": [call, {"function": {"arguments": {"a": 1}}}]}
    (seen,) = normalise.messages([message], message_format, None)
    assert seen["content"] == [{"type": "text", "text": "a"}]
    assert [call["function"]["arguments"] for call in seen["tool_calls"]] == ['{"a":  1}', '{"a":1}']
    assert normalise.messages([seen], message_format, None) == [seen]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        {"role": "robot", "content": "a"},
        {"role": "user", "content": 7},
        {"role": "user", "content": [7]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": {}},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
    ],
)
def test_what_no_engine_takes_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]: "):
        one(message)


def test_tools_keep_the_clients_order_and_get_absent_defaults_behind() -> None:
    """As `Tool.model_validate(…).model_dump()` of SGLang 0.5.23 gives them."""
    parameters = {"properties": {"b": {}, "a": {}}, "type": "object"}
    tool = {"function": {"parameters": parameters, "name": "f", "strict": None, "extra": 1}, "type": "function"}
    assert json.dumps(normalise.tools([tool], MessageFormat())) == json.dumps(
        [
            {
                "type": "function",
                "function": {"parameters": parameters, "name": "f", "description": None},
                "defer_loading": None,
            }
        ]
    )
    assert normalise.tools([tool], MessageFormat(flat_tools=True)) == [
        {"parameters": parameters, "name": "f", "description": None}
    ]
    assert normalise.tools([], MessageFormat()) is None


@pytest.mark.parametrize("tool", [7, {}, {"function": {}}, {"function": {"name": 7}}])
def test_tools_without_a_name_are_refused(tool: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool 0"):
        normalise.tools([tool], MessageFormat())


def test_numbers_of_a_tools_schema_are_those_that_sglang_reads() -> None:
    tool = {"function": {"name": "f", "parameters": {"maximum": 1 << 64}}}
    assert "1.8446744073709552e+19" in json.dumps(normalise.tools([tool], MessageFormat()))
    assert "18446744073709551616" in json.dumps(normalise.tools([tool], MessageFormat(), "vllm"))


def test_tool_choice_decides_which_tools_sglang_shows_and_not_which_vllm_does() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    named = {"type": "function", "function": {"name": "b"}}
    assert normalise.offered(tools, "none") is None
    assert normalise.offered(tools, "auto") == tools
    assert normalise.offered(tools, None) == tools
    assert normalise.offered(tools, named) == tools[1:]
    assert normalise.offered(tools, "none", "vllm") == normalise.offered(tools, named, "vllm") == tools
