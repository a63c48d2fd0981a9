"""Responses tools as chat functions.

A namespace's function becomes `<namespace>__<name>`. A custom tool becomes a function with one text, `input`; its
grammar is told to the model and not enforced.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import msgspec

from app.domain.left_out import SERVER_TOOL, left_out_at
from app.domain.request import as_raw, value_of
from app.errors import InvalidRequest, Unsupported
from app.protocols.responses.items import (
    fields,
    flag_or_none,
    flat_name,
    items,
    name,
    one_of,
    placed,
    text,
    text_or_none,
    unsupported,
)

_KNOWN, _KNOWN_BYTES = 32, 256 << 10
"""How many lists of tools up to which size are remembered: agents send the same ones with every turn."""

CARRIED = ("function", "custom")
"""Types of tools that become a chat's functions; those of a namespace too."""

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class Named(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a tool's calls are spelled to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Tools(msgspec.Struct, frozen=True):
    """`functions` are raw chat tools by the name that the engine knows; `named` those that are spelled otherwise to the
    client; `shown` is what a response repeats; `left_out` are those that no engine is sent (`app.domain.left_out`)."""

    functions: Mapping[str, msgspec.Raw]
    named: dict[str, Named]
    shown: list[dict[str, Any]]
    left_out: tuple[str, ...] = ()

    def raw(self, only: Collection[str] | None = None) -> bytes | None:
        """The chat tools; None if there are none."""
        raws = [raw for flat, raw in self.functions.items() if only is None or flat in only]
        return b"[" + b",".join(map(bytes, raws)) + b"]" if raws else None


NO_TOOLS = Tools({}, {}, [])


def read_tools(field: msgspec.Raw | None) -> Tools:
    """Raises InvalidRequest, and Unsupported."""
    raw = b"null" if field is None else bytes(field)
    if raw == b"null":
        return NO_TOOLS
    return _remembered(raw) if len(raw) <= _KNOWN_BYTES else _read(raw)


def _read(raw: bytes) -> Tools:
    return collect(placed(items(value_of(raw, "tools"), "tools"), "tools"), NO_TOOLS)


_remembered = functools.lru_cache(_KNOWN)(_read)


def collect(tools: Iterable[tuple[str, Any]], before: Tools) -> Tools:
    """`before`, and these tools, which have their paths with them."""
    functions, named, shown, left_out = dict(before.functions), dict(before.named), list(before.shown), []
    for at, value in tools:
        tool = fields(value, at)
        if tool.get("type") != "namespace":
            if (carried := _add(tool, at, None, functions, named)) is None:
                left_out.append(left_out_at(SERVER_TOOL, at))
            else:
                shown.append(carried)
            continue
        namespace = name(tool.get("name"), f"{at}.name")
        inside = []
        for place, member in placed(items(tool.get("tools"), f"{at}.tools"), f"{at}.tools"):
            if (carried := _add(fields(member, place), place, namespace, functions, named)) is None:
                left_out.append(left_out_at(SERVER_TOOL, place))
            else:
                inside.append(carried)
        shown.append({"type": "namespace", "name": namespace, "description": "", "tools": inside})
    return Tools(functions, named, shown, (*before.left_out, *left_out))


def _add(
    tool: dict[str, Any], path: str, namespace: str | None, functions: dict[str, msgspec.Raw], named: dict[str, Named]
) -> dict[str, Any] | None:
    """One tool into `functions` and `named`; what a response shows of it. None for a tool that no client runs at the
    model's call: a server's own."""
    kind = text(tool.get("type"), f"{path}.type")
    callers = tool.get("allowed_callers")
    if kind not in CARRIED or (callers is not None and "direct" not in items(callers, f"{path}.allowed_callers")):
        return None
    if tool.get("async"):
        raise unsupported(f"{path}.async")
    called = name(tool.get("name"), f"{path}.name")
    flat = flat_name(namespace, called)
    if flat in functions:
        raise InvalidRequest(f"{path}.name: another tool has this name")
    function = _custom(tool, path, flat) if kind == "custom" else _function(tool, path, flat)
    functions[flat] = as_raw({"type": "function", "function": function})
    if namespace is not None or kind == "custom":
        named[flat] = Named(called, namespace, kind == "custom")
    return {"type": kind, "name": called}


def _function(tool: dict[str, Any], path: str, flat: str) -> dict[str, Any]:
    parameters, strict = tool.get("parameters"), flag_or_none(tool.get("strict"), f"{path}.strict")
    function: dict[str, Any] = {"name": flat}
    if (description := text_or_none(tool.get("description"), f"{path}.description")) is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = fields(parameters, f"{path}.parameters")
    return function if strict is None else {**function, "strict": strict}


def _custom(tool: dict[str, Any], path: str, flat: str) -> dict[str, Any]:
    description = text_or_none(tool.get("description"), f"{path}.description") or ""
    form = {"type": "text"} if tool.get("format") is None else fields(tool["format"], f"{path}.format")
    if one_of(form.get("type"), f"{path}.format.type", ("text", "grammar")) == "grammar":
        syntax = one_of(form.get("syntax"), f"{path}.format.syntax", ("lark", "regex"))
        definition = text(form.get("definition"), f"{path}.format.definition")
        description = f"{description}\n\n`input` must match this {syntax} grammar:\n{definition}".strip()
    return {"name": flat, "description": description, "parameters": _INPUT}


Choice = tuple[Any, frozenset[str] | None]
"""A chat `tool_choice` (None: not sent), and the names of the tools that are offered (None: all)."""


def read_choice(value: Any, tools: Tools) -> Choice:
    """Raises InvalidRequest, and Unsupported for a choice that forces a tool that is left out."""
    path = "tool_choice"
    if value is None or isinstance(value, str):
        chosen = None if value is None else one_of(value, path, ("auto", "none", "required"))
        if chosen == "required" and not tools.functions:
            _refuse_forced(path, tools)
        return (chosen if tools.functions else None), None
    choice = fields(value, path)
    kind = text(choice.get("type"), f"{path}.type")
    if kind in CARRIED:
        return {"type": "function", "function": {"name": _offered(choice, path, tools)}}, None
    if kind == "allowed_tools":
        mode = one_of(choice.get("mode"), f"{path}.mode", ("auto", "required"))
        allowed = placed(items(choice.get("tools"), f"{path}.tools"), f"{path}.tools")
        carried = [(place, tool) for place, tool in allowed if fields(tool, place).get("type") in CARRIED]
        offered = frozenset(_offered(tool, place, tools) for place, tool in carried)
        if mode == "required" and not offered:
            _refuse_forced(path, tools)
        return (mode if offered else None), offered
    raise unsupported(f"{path}.type", kind)


def _refuse_forced(path: str, tools: Tools) -> NoReturn:
    if tools.left_out:
        raise Unsupported(f"{path} is required, and no tool can be sent to an engine")
    raise InvalidRequest(f"{path} is required, and there are no tools")


def _offered(choice: dict[str, Any], path: str, tools: Tools) -> str:
    """The engine's name of a tool that the request offers."""
    namespace = text_or_none(choice.get("namespace"), f"{path}.namespace")
    flat = flat_name(namespace, name(choice.get("name"), f"{path}.name"))
    if flat not in tools.functions:
        raise InvalidRequest(f"{path}.name names no tool of the request")
    return flat
