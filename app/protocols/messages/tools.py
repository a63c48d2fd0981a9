"""Tools and the choice among them as a chat has them."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.left_out import DEFER_LOADING, SERVER_TOOL, left_out_at
from app.errors import InvalidRequest, Unsupported
from app.protocols.messages.content import NOTHING
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
    """Tools as raw JSON, None if there are none, the parameters that say which is to be called, and what is left out
    (`app.domain.left_out`)."""

    raw: msgspec.Raw | None
    params: dict[str, msgspec.Raw]
    left_out: tuple[str, ...]


def tools_of(tools: msgspec.Raw | None, choice: msgspec.Raw | None) -> Tools:
    """Raises InvalidRequest, which names the field, and Unsupported."""
    functions: list[dict[str, Any]] = []
    left_out: list[str] = []
    offered = None if tools is None else decode(_TOOLS, tools, "tools")
    for index, tool in enumerate(offered or []):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom") or "direct" not in (tool.allowed_callers or ["direct"]):
            left_out.append(left_out_at(SERVER_TOOL, where))
            continue
        functions.append(_function(tool, where))
        if tool.defer_loading:
            left_out.append(left_out_at(DEFER_LOADING, where))
    names = {function["function"]["name"] for function in functions}
    params = _choice_params(choice, names, bool(left_out)) if is_given(choice) else {}
    return Tools(msgspec.Raw(msgspec.json.encode(functions)) if functions else None, params, tuple(left_out))


def _function(tool: _Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": required(tool.name, f"{where}.name")}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = msgspec.Raw(object_text(tool.input_schema, f"{where}.input_schema"))
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_params(raw: msgspec.Raw | None, names: set[str], has_left_out: bool) -> dict[str, msgspec.Raw]:
    """`has_left_out`: the request offers more tools than these, which it must not force."""
    choice = decode(_CHOICE, raw or NOTHING, "tool_choice")
    value: Any = _CHOICES.get(choice.type)
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        if name not in names and has_left_out:
            raise Unsupported("tool_choice.name is not the name of a tool that can be carried to an engine")
        if name not in names:
            raise InvalidRequest("tool_choice.name is not the name of one of the tools")
        value = {"type": "function", "function": {"name": name}}
    if value is None:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none")
    if not names:
        if choice.type == "any" and has_left_out:
            raise Unsupported("tool_choice.type is any, but no tool can be carried to an engine")
        if choice.type == "any":
            raise InvalidRequest("tool_choice.type is any, but there are no tools")
        return {}
    params = {"tool_choice": msgspec.Raw(msgspec.json.encode(value))}
    if choice.disable_parallel_tool_use:
        params["parallel_tool_calls"] = msgspec.Raw(b"false")
    return params
