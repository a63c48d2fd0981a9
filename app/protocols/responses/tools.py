"""Responses tools as chat functions.

A namespace's function becomes `<namespace>__<name>`. A custom tool becomes a function with one text, `input`; its
grammar is told to the model and not enforced.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from app.domain.request import value_of
from app.errors import InvalidRequest
from app.protocols.responses.values import (
    fields,
    flag_or_none,
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
    client; `shown` is what a response repeats."""

    functions: Mapping[str, msgspec.Raw]
    named: dict[str, Named]
    shown: list[dict[str, Any]]

    def raw(self, only: Collection[str] | None = None) -> msgspec.Raw | None:
        """The chat tools; None if there are none."""
        found = [raw for flat, raw in self.functions.items() if only is None or flat in only]
        return msgspec.Raw(b"[" + b",".join(map(bytes, found)) + b"]") if found else None


NO_TOOLS = Tools({}, {}, [])


def flat_name(namespace: str | None, called: str) -> str:
    return called if namespace is None else f"{namespace}__{called}"


def read_tools(field: msgspec.Raw | None) -> Tools:
    """Raises InvalidRequest, and Unsupported for a tool that a server would run."""
    raw = b"null" if field is None else bytes(field)
    if raw == b"null":
        return NO_TOOLS
    return _remembered(raw) if len(raw) <= _KNOWN_BYTES else _read(raw)


def _read(raw: bytes) -> Tools:
    return collect(placed(items(value_of(raw, "tools"), "tools"), "tools"), NO_TOOLS)


_remembered = functools.lru_cache(_KNOWN)(_read)


def collect(tools: Iterable[tuple[str, Any]], before: Tools) -> Tools:
    """`before`, and these tools, which have their paths with them."""
    functions, named, shown = dict(before.functions), dict(before.named), list(before.shown)
    for at, value in tools:
        tool = fields(value, at)
        if tool.get("type") != "namespace":
            shown.append(_add(tool, at, None, functions, named))
            continue
        namespace = name(tool.get("name"), f"{at}.name")
        inside = [
            _add(fields(one, place), place, namespace, functions, named)
            for place, one in placed(items(tool.get("tools"), f"{at}.tools"), f"{at}.tools")
        ]
        shown.append({"type": "namespace", "name": namespace, "description": "", "tools": inside})
    return Tools(functions, named, shown)


def _add(
    tool: dict[str, Any],
    path: str,
    namespace: str | None,
    functions: dict[str, msgspec.Raw],
    named: dict[str, Named],
) -> dict[str, Any]:
    """One tool into `functions` and `named`; what a response shows of it."""
    kind = text(tool.get("type"), f"{path}.type")
    if kind not in ("function", "custom"):
        raise unsupported(f"{path}.type", kind)
    if tool.get("async"):
        raise unsupported(f"{path}.async")
    callers = tool.get("allowed_callers")
    if callers is not None and "direct" not in items(callers, f"{path}.allowed_callers"):
        raise unsupported(f"{path}.allowed_callers")
    called = name(tool.get("name"), f"{path}.name")
    flat = flat_name(namespace, called)
    if flat in functions:
        raise InvalidRequest(f"{path}.name: another tool has this name")
    function = _custom(tool, path, flat) if kind == "custom" else _function(tool, path, flat)
    functions[flat] = msgspec.Raw(msgspec.json.encode({"type": "function", "function": function}))
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
    """Raises InvalidRequest, and Unsupported for a choice of a tool that a server would run."""
    path = "tool_choice"
    if value is None or isinstance(value, str):
        chosen = None if value is None else one_of(value, path, ("auto", "none", "required"))
        if chosen == "required" and not tools.functions:
            raise InvalidRequest(f"{path} is required, and there are no tools")
        return (chosen if tools.functions else None), None
    choice = fields(value, path)
    kind = text(choice.get("type"), f"{path}.type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _offered(choice, path, tools)}}, None
    if kind == "allowed_tools":
        mode = one_of(choice.get("mode"), f"{path}.mode", ("auto", "required"))
        allowed = items(choice.get("tools"), f"{path}.tools")
        places = placed(allowed, f"{path}.tools")
        return mode, frozenset(_offered(fields(one, place), place, tools) for place, one in places)
    raise unsupported(f"{path}.type", kind)


def _offered(choice: dict[str, Any], path: str, tools: Tools) -> str:
    """The engine's name of a tool that the request offers."""
    if (kind := text(choice.get("type"), f"{path}.type")) not in ("function", "custom"):
        raise unsupported(f"{path}.type", kind)
    namespace = text_or_none(choice.get("namespace"), f"{path}.namespace")
    flat = flat_name(namespace, name(choice.get("name"), f"{path}.name"))
    if flat not in tools.functions:
        raise InvalidRequest(f"{path}.name names no tool of the request")
    return flat
