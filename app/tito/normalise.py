"""Messages and tools as an engine passes them to a chat template.

The reference is SGLang 0.5.23: its pydantic models (`entrypoints/openai/protocol.py`) decide which fields a template
gets and in which order; `serving_chat.py` converts content and arguments. vLLM differs in the order of a tool's keys
and also reads `reasoning`, which is accepted here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest, Unsupported

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates read an assistant's reasoning: it is given under all of them."""


class MessageFormat(msgspec.Struct, frozen=True):
    """How a chat template wants what can be given in several ways. `Prompts` tries it out at start.

    `separator` joins the text parts of a content list. `parts`: content is given as a list of one text part.
    `text_arguments`: a call's arguments are JSON text, not an object. `flat_tools`: tools come without the `{"type",
    "function"}` wrapper.
    """

    separator: str = " "
    parts: bool = False
    text_arguments: bool = False
    flat_tools: bool = False


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = frozenset({"text", "input_text"})
_KEPT = ("tool_call_id", "name")
_ARGUMENTS = msgspec.json.Decoder()


def messages(items: Sequence[Mapping[str, Any]], message_format: MessageFormat, first: int = 0) -> list[dict[str, Any]]:
    """Messages for a template.

    Raises Unsupported for parts that are not text and InvalidRequest for structures that no engine takes. Both name the
    index in the request; the first of `items` has the index `first`.
    """
    return [_message(item, index, message_format) for index, item in enumerate(items, first)]


def _message(item: Mapping[str, Any], index: int, message_format: MessageFormat) -> dict[str, Any]:
    role = item.get("role")
    role = role.lower() if isinstance(role, str) else None
    if role not in _ROLES:
        raise InvalidRequest(f"messages[{index}]: role must be one of {', '.join(sorted(_ROLES))}")
    separator = " " if role == "tool" else message_format.separator
    content = _content(item.get("content"), index, separator)
    message: dict[str, Any] = {"role": role, "content": _parts(content) if message_format.parts else content}
    if role == "user":
        return message
    for field in _KEPT:
        if item.get(field) is not None:
            message[field] = item[field]
    reasoning = next((item[name] for name in REASONING if item.get(name) is not None), None)
    if isinstance(reasoning, str):
        message.update(dict.fromkeys(REASONING, reasoning))
    calls = item.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _calls(calls, index, message_format)
    return message


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def _content(content: Any, index: int, separator: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{index}]: content must be text, a list of parts or null")
    return separator.join(_part(part, index, number) for number, part in enumerate(content))


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


def _calls(calls: Any, index: int, message_format: MessageFormat) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"messages[{index}]: tool_calls must be a list")
    return [_call(call, index, number, message_format) for number, call in enumerate(calls)]


def _call(call: Any, index: int, number: int, message_format: MessageFormat) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"messages[{index}]: tool call {number} has no function")
    arguments = function.get("arguments")
    arguments = _arguments_text(arguments) if message_format.text_arguments else _arguments(arguments)
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _arguments_text(arguments: Any) -> str:
    """The client's own text, if it is one."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return msgspec.json.encode({} if arguments is None else arguments).decode()


def _arguments(arguments: Any) -> Any:
    """The object in a JSON text. Other text stays text: the policy may have written it, and SGLang's 400 would end the
    session over its own reply. Most templates render text unchanged."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = _ARGUMENTS.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tools(items: Sequence[Any] | None, message_format: MessageFormat) -> list[dict[str, Any]] | None:
    """Tool schemas as SGLang's models dump them: in the client's key order, then absent defaults. None if there are
    none."""
    if not items:
        return None
    return [_tool(item, number, message_format.flat_tools) for number, item in enumerate(items)]


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


def offered(items: Sequence[Any] | None, tool_choice: Any) -> Sequence[Any] | None:
    """The tools that a template gets: SGLang passes none for `"none"`, and only the chosen one if one is named."""
    if not items or tool_choice == "none":
        return None
    wanted = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(wanted, Mapping):
        return items
    name = wanted.get("name")
    return [item for item in items if isinstance(item, Mapping) and _name(item) == name] or None


def _name(item: Mapping[str, Any]) -> Any:
    function = item.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def arguments(chat_template_kwargs: Mapping[str, Any] | None, reasoning_effort: Any) -> dict[str, Any]:
    """A request's template arguments: `chat_template_kwargs`, which override its `reasoning_effort`, as in SGLang."""
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**effort, **(chat_template_kwargs or {})}
