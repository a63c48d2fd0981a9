"""Tools and the choice among them as a chat has them."""

from __future__ import annotations

from typing import Any

import msgspec

from app.errors import InvalidRequest, Unsupported
from app.protocols.messages.content import NOTHING, unsupported
from app.protocols.messages.reading import decode, is_given, object_text, required

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Tool(msgspec.Struct):
    """`cache_control`, `eager_input_streaming` and `input_examples` are not carried."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = NOTHING
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_TOOLS: msgspec.json.Decoder[list[_Tool] | None] = msgspec.json.Decoder(list[_Tool] | None)
_CHOICE = msgspec.json.Decoder(_Choice)


class Tools(msgspec.Struct, frozen=True):
    """Tools as raw JSON, None if there are none, and the parameters that say which is to be called."""

    raw: msgspec.Raw | None
    params: dict[str, msgspec.Raw]


def tools_of(tools: msgspec.Raw | None, choice: msgspec.Raw | None) -> Tools:
    """Raises InvalidRequest, which names the field, and Unsupported."""
    found = (None if tools is None else decode(_TOOLS, tools, "tools")) or []
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(found)]
    params = _choice_params(choice, {tool.name for tool in found}) if is_given(choice) else {}
    return Tools(msgspec.Raw(msgspec.json.encode(functions)) if functions else None, params)


def _function(tool: _Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported("a tool", tool.type or "", where)
    if tool.defer_loading:
        raise Unsupported(f"{where}.defer_loading: there is no search for tools")
    if tool.allowed_callers not in (None, ["direct"]):
        raise Unsupported(f'{where}.allowed_callers must be ["direct"]: only the model calls tools')
    function: dict[str, Any] = {"name": required(tool.name, f"{where}.name")}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = msgspec.Raw(object_text(tool.input_schema, f"{where}.input_schema"))
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_params(raw: msgspec.Raw | None, names: set[str | None]) -> dict[str, msgspec.Raw]:
    choice = decode(_CHOICE, raw or NOTHING, "tool_choice")
    value: Any = _CHOICES.get(choice.type)
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        if name not in names:
            raise InvalidRequest("tool_choice.name is not the name of one of the tools")
        value = {"type": "function", "function": {"name": name}}
    if value is None:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none")
    if not names:
        if choice.type == "any":
            raise InvalidRequest("tool_choice.type is any, but there are no tools")
        return {}
    params = {"tool_choice": msgspec.Raw(msgspec.json.encode(value))}
    if choice.disable_parallel_tool_use:
        params["parallel_tool_calls"] = msgspec.Raw(b"false")
    return params
