"""Messages and tools as an engine hands them to a chat template.

SGLang 0.5.23: its pydantic models (`entrypoints/openai/protocol.py`) decide which fields a template gets and in which
order; `serving_chat.py` converts content and arguments. vLLM 0.32 (`renderers/chat_utils.py`) reads other reasoning,
joins text otherwise and refuses no arguments; its tools are given in SGLang's order of keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.errors import InvalidRequest, Unsupported

EngineDialect = Literal["sglang", "vllm"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates read an assistant's reasoning."""

_REASONING: Mapping[EngineDialect, tuple[str, ...]] = {
    "sglang": ("reasoning_content",),
    "vllm": ("reasoning", "reasoning_content"),
}
"""The names under which an engine reads a message's reasoning, the first goes first, and gives it to the template."""


class MessageFormat(msgspec.Struct, frozen=True):
    """How a chat template wants what can be given in several ways. `Prompts` tries it out at start.

    `lists`: the dialects in which a content list stays one. `parts`: content is given as a list of one text part.
    `text_arguments`: a call's arguments are JSON text, not an object. `flat_tools`: tools come without the `{"type",
    "function"}` wrapper.
    """

    lists: frozenset[EngineDialect] = frozenset()
    parts: bool = False
    text_arguments: bool = False
    flat_tools: bool = False


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root"})
_TEXT_PARTS = frozenset({"text", "input_text"})
_ARGUMENTS = msgspec.json.Decoder()


def messages(
    items: Sequence[Mapping[str, Any]],
    message_format: MessageFormat,
    dialect: EngineDialect | None,
    first: int = 0,
    *,
    stored: bool = False,
) -> list[dict[str, Any]]:
    """Messages for a template, as an engine of this dialect gives them.

    `dialect`: None for messages of no engine, whose reasoning is read and given under every name. `stored`: their
    arguments may be any, since the policy may have written them, and a refusal would end the session over its own
    reply.

    Raises Unsupported for what is not rendered here and InvalidRequest for what the engine refuses. Both name the index
    in the request; the first of `items` has the index `first`.
    """
    stored = stored or dialect is None
    return [_message(item, index, message_format, dialect, stored) for index, item in enumerate(items, first)]


def _message(
    item: Mapping[str, Any], index: int, message_format: MessageFormat, dialect: EngineDialect | None, stored: bool
) -> dict[str, Any]:
    role = item.get("role")
    role = role.lower() if isinstance(role, str) else None
    if role not in _ROLES:
        raise InvalidRequest(f"messages[{index}]: role must be one of {', '.join(sorted(_ROLES))}")
    content = _content(item.get("content"), index, message_format, role, dialect)
    if message_format.parts and isinstance(content, str):
        if content and dialect == "sglang" and not stored:
            raise Unsupported(
                f"messages[{index}]: content must be a list of parts: the chat template renders nothing else, "
                "and SGLang does not convert text"
            )
        content = [{"type": "text", "text": content}] if content else []
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "user":
        return message
    for field in ("tool_call_id", "name", "phase"):
        if item.get(field) is not None:
            message[field] = item[field]
    names = REASONING if dialect is None else _REASONING[dialect]
    reasoning = next((item[name] for name in names if item.get(name) is not None), None)
    if isinstance(reasoning, str):
        message.update(dict.fromkeys(names, reasoning))
    calls = item.get("tool_calls")
    if calls is not None and (calls != [] or dialect != "vllm"):
        if not isinstance(calls, list):
            raise InvalidRequest(f"messages[{index}]: tool_calls must be a list")
        read_as = None if stored else dialect
        message["tool_calls"] = [
            _call(call, index, number, message_format, read_as) for number, call in enumerate(calls)
        ]
    if item.get("tools") is not None:
        if not isinstance(item["tools"], list):
            raise InvalidRequest(f"messages[{index}]: tools must be a list")
        message["tools"] = [_tool(tool, number, False) for number, tool in enumerate(item["tools"])]
    return message


def _content(
    content: Any, index: int, message_format: MessageFormat, role: str, dialect: EngineDialect | None
) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{index}]: content must be text, a list of parts or null")
    texts = [_part(part, index, number) for number, part in enumerate(content)]
    if role != "tool" and dialect in message_format.lists:
        return [{"type": "text", "text": text} for text in texts]
    return ("\n" if dialect == "vllm" else " ").join(texts)


def _part(part: Any, index: int, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"messages[{index}]: content part {number} must be an object")
    if part.get("type") not in _TEXT_PARTS:
        raise Unsupported(
            f"messages[{index}]: content part {number} is not text; with a tokenizer only text is supported"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"messages[{index}]: content part {number} has no text")
    return text


def _call(
    call: Any, index: int, number: int, message_format: MessageFormat, dialect: EngineDialect | None
) -> dict[str, Any]:
    """`dialect`: None for arguments as they are stored."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"messages[{index}]: tool call {number} has no function")
    arguments = function.get("arguments")
    if dialect == "sglang":
        arguments = _sglang_arguments(arguments, f"messages[{index}]: tool call {number}")
    elif dialect == "vllm":
        arguments = _vllm_arguments(arguments)
    else:
        arguments = _stored_arguments(arguments)
    if message_format.text_arguments:  # the client's own text, if it is one
        given = function.get("arguments")
        if isinstance(given, str):
            arguments = given or "{}"
        else:
            arguments = msgspec.json.encode({} if given is None else given).decode()
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _sglang_arguments(arguments: Any, where: str) -> Any:
    """SGLang answers 400 to text that is not the JSON of an object, and leaves null as it is."""
    if not isinstance(arguments, str):
        return as_doubles(arguments)
    try:
        value = _ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: arguments must be the JSON of an object: engines accept nothing else")
    return as_doubles(value)


def _vllm_arguments(arguments: Any) -> Any:
    """vLLM makes an empty object of whatever is none."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stored_arguments(arguments: Any) -> Any:
    """The object in a JSON text. Other text stays text: most templates render it unchanged."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = _ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def as_doubles(value: Any) -> Any:
    """The value as orjson reads it, with which SGLang reads requests: integers past 64 bits are doubles.

    Raises InvalidRequest for one that no double holds.
    """
    if isinstance(value, dict):
        return {key: as_doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_doubles(item) for item in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            return float(value)
        except OverflowError:
            raise InvalidRequest("an integer is too large: engines only accept those that fit a double") from None
    return value


def tools(
    items: Sequence[Any] | None, message_format: MessageFormat, dialect: EngineDialect = "sglang"
) -> list[dict[str, Any]] | None:
    """Tool schemas as SGLang's models dump them: in the client's key order, then absent defaults. None if there are
    none."""
    if not items:
        return None
    dumped = [_tool(item, number, message_format.flat_tools) for number, item in enumerate(items)]
    return [as_doubles(tool) for tool in dumped] if dialect == "sglang" else dumped


def _tool(item: Any, number: int, flat: bool) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"tool {number} must have a function with a name")
    deferred = item.get("defer_loading")
    own = function.get("defer_loading")
    fields = {
        "description": function.get("description"),
        "name": function["name"],
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
        "defer_loading": deferred if own is None else own,
    }
    for optional in ("strict", "defer_loading"):
        if fields[optional] is None:
            del fields[optional]
    ordered = {key: fields[key] for key in function if key in fields}
    dumped = {**ordered, **{key: value for key, value in fields.items() if key not in ordered}}
    if flat:
        return dumped
    return {"type": item.get("type", "function"), "function": dumped, "defer_loading": deferred}


def offered(items: Sequence[Any] | None, tool_choice: Any, dialect: EngineDialect = "sglang") -> Sequence[Any] | None:
    """The tools that a template gets: SGLang passes none for `"none"`, and only the chosen one if one is named; vLLM
    always passes all."""
    if not items:
        return None
    if dialect == "vllm":
        return items
    if tool_choice == "none":
        return None
    wanted = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(wanted, Mapping):
        return items
    name = wanted.get("name")
    return [item for item in items if isinstance(item, Mapping) and _name(item) == name] or None


def _name(item: Mapping[str, Any]) -> Any:
    function = item.get("function")
    return function.get("name") if isinstance(function, Mapping) else None
