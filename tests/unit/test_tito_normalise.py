"""Messages and tools as SGLang hands them to a template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import InvalidRequest, Unsupported
from app.tito import normalise
from app.tito.normalise import REASONING, MessageFormat


def one(message: dict[str, Any], separator: str = " ") -> dict[str, Any]:
    return normalise.messages([message], MessageFormat(separator))[0]


def test_absent_content_is_empty_text_and_nulls_go() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "name": None}
    assert one(message) == {"role": "assistant", "content": ""}


def test_a_user_message_is_its_role_and_content() -> None:
    assert one({"role": "user", "content": "a", "name": "b", "extra": 1}) == {"role": "user", "content": "a"}


def test_text_parts_are_joined_as_the_template_would_and_with_a_space_in_results() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert one({"role": "user", "content": parts}, "")["content"] == "ab"
    assert one({"role": "user", "content": parts}, " ")["content"] == "a b"
    assert one({"role": "tool", "content": parts}, "")["content"] == "a b"


def test_parts_that_are_not_text_are_refused_by_place_and_not_by_content() -> None:
    parts = [{"type": "text", "text": "secret"}, {"type": "image_url", "image_url": {"url": "secret"}}]
    with pytest.raises(Unsupported, match=r"messages\[1\]: content part 1 is not text") as error:
        normalise.messages([{"role": "user", "content": "a"}, {"role": "user", "content": parts}], MessageFormat())
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('{"b": 1, "a": [2.5, null]}', {"b": 1, "a": [2.5, None]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("not JSON", "not JSON"),
        ("[1]", "[1]"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
)
def test_tool_arguments_become_objects_where_they_are(text: Any, seen: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}, "extra": 1}
    call_seen = one({"role": "assistant", "content": "", "tool_calls": [call]})["tool_calls"][0]
    assert list(call_seen) == ["id", "index", "type", "function"]
    assert call_seen["function"] == {"name": "f", "arguments": seen}


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_given_under_every_name_that_templates_read(name: str) -> None:
    assert one({"role": "assistant", name: "r"}) == {
        "role": "assistant",
        "content": "",
        **dict.fromkeys(REASONING, "r"),
    }


def test_a_template_gets_arguments_as_text_or_content_as_parts_if_it_takes_no_other() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a":  1}'}}
    message_format = MessageFormat(parts=True, text_arguments=True)
    message = {"role": "assistant", "content": "a", "tool_calls": [call, {"function": {"arguments": {"a": 1}}}]}
    (seen,) = normalise.messages([message], message_format)
    assert seen["content"] == [{"type": "text", "text": "a"}]
    assert [call["function"]["arguments"] for call in seen["tool_calls"]] == ['{"a":  1}', '{"a":1}']
    assert normalise.messages([seen], message_format) == [seen]


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


def test_tool_choice_decides_which_tools_are_seen() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    assert normalise.offered(tools, "none") is None
    assert normalise.offered(tools, "auto") == tools
    assert normalise.offered(tools, None) == tools
    assert normalise.offered(tools, {"type": "function", "function": {"name": "b"}}) == tools[1:]


def test_reasoning_effort_is_an_argument_that_chat_template_kwargs_override() -> None:
    assert normalise.arguments(None, None) == {}
    assert normalise.arguments({"a": 1}, "low") == {"reasoning_effort": "low", "a": 1}
    assert normalise.arguments({"reasoning_effort": "high"}, "low") == {"reasoning_effort": "high"}
