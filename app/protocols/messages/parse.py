"""Parses a Messages request: its parameters, its tools and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from app.domain import control, prefill
from app.domain.control import SessionControl
from app.domain.events import StreamMode
from app.domain.known_body import ContinuedBody, Translation
from app.domain.left_out import DEFER_LOADING, REMOVED_TOOL, SERVER_TOOL, UNKNOWN_TOOL, left_out_at
from app.domain.request import (
    ChatRequest,
    TokenIds,
    as_raw,
    engine_params,
    fields_of,
    flag,
    items_of,
    require_one,
    stream_mode,
    token_ids,
    value_of,
)
from app.errors import InvalidRequest, ThreadUnsupported, Unsupported
from app.protocols.messages.conversation import (
    ABSENT,
    ToolChange,
    conversation,
    decode,
    is_given,
    object_text,
    required,
    system_texts,
)
from app.protocols.messages.reply import Echo

Params = dict[str, msgspec.Raw]

_NOT_CARRIED = frozenset(
    {
        *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "cache_control", "context_management"),
        *("diagnostics", "fallback_credit_token", "inference_geo", "metadata", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
"""About accounts, caches and places: they change nothing of what an engine generates."""

_UNSUPPORTED = {
    "compaction": Unsupported,
    "container": Unsupported,
    "fallbacks": Unsupported,
    "thread": ThreadUnsupported,
}

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}

_NO_THINKING = {"enable_thinking": False, "thinking": False}
"""The two names that chat templates have for it."""


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: msgspec.Raw = ABSENT


class _Output(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None
    task_budget: msgspec.Raw = ABSENT


_THINKING: msgspec.json.Decoder[_Thinking | None] = msgspec.json.Decoder(_Thinking | None)
_FORMAT: msgspec.json.Decoder[_Format | None] = msgspec.json.Decoder(_Format | None)
_OUTPUT: msgspec.json.Decoder[_Output | None] = msgspec.json.Decoder(_Output | None)
_STOPS: msgspec.json.Decoder[list[str] | None] = msgspec.json.Decoder(list[str] | None)
_TEMPLATE: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def stops_of(params: Params) -> list[str]:
    raw = params.get("stop_sequences")
    stops = (None if raw is None else decode(_STOPS, raw, "stop_sequences")) or []
    if "" in stops:
        raise InvalidRequest(f"stop_sequences[{stops.index('')}] must not be empty")
    return stops


def engine_fields(params: Params, *, has_limit: bool) -> Params:
    """The engine's parameters; fields that the API does not know are passed as they are.

    `has_limit`: `max_tokens` is required. Raises InvalidRequest, which names the field, and Unsupported.
    """
    for name, error in _UNSUPPORTED.items():
        if name in params and is_given(params[name]) and bytes(params[name]).strip() not in (b"[]", b'""'):
            raise error(f"{name} cannot be sent to an engine")
    limit = value_of(params.get("max_tokens"), "max_tokens")
    if limit is None and has_limit:
        raise InvalidRequest("max_tokens is missing")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidRequest("max_tokens must be an integer, at least 1")
    for name in ("temperature", "top_p"):
        value = value_of(params[name], name) if name in params else None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise InvalidRequest(f"{name} must be a number, at least 0")
    top_k = value_of(params.get("top_k"), "top_k")
    if top_k is not None and type(top_k) is not int:
        raise InvalidRequest("top_k must be an integer")
    own = {"stop_sequences", "thinking", "output_config", "output_format", *_UNSUPPORTED, *_NOT_CARRIED}
    fields = {name: raw for name, raw in params.items() if name not in own}
    if stops := stops_of(params):
        fields.setdefault("stop", as_raw(stops))
    raw, own_template = params.get("thinking"), params.get("chat_template_kwargs")
    thinking = None if raw is None else decode(_THINKING, raw, "thinking")
    if thinking is not None and thinking.type == "disabled":  # a budget is not enforced; the client's own go first
        given = (None if own_template is None else decode(_TEMPLATE, own_template, "chat_template_kwargs")) or {}
        fields["chat_template_kwargs"] = as_raw({**_NO_THINKING, **given})
    for name, raw in _output(params).items():
        fields.setdefault(name, raw)
    return fields


def _output(params: Params) -> Params:
    raw, old = params.get("output_config"), params.get("output_format")
    config = (None if raw is None else decode(_OUTPUT, raw, "output_config")) or _Output()
    form, where = config.format, "output_config.format"
    if form is None and old is not None:
        form, where = decode(_FORMAT, old, "output_format"), "output_format"
    if is_given(config.task_budget):
        raise Unsupported("output_config.task_budget cannot be sent to an engine")
    fields: Params = {}
    if config.effort is not None:
        fields["reasoning_effort"] = as_raw(_EFFORTS[config.effort])
    if form is not None:
        schema = msgspec.Raw(object_text(form.schema, f"{where}.schema"))
        fields["response_format"] = as_raw({"type": "json_schema", "json_schema": {"name": "output", "schema": schema}})
    return fields


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Tool(msgspec.Struct):
    """`cache_control`, `eager_input_streaming` and `input_examples` are not carried."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Changed(msgspec.Struct):
    type: str
    name: str | None = None
    definition: msgspec.Raw = ABSENT


_TOOL = msgspec.json.Decoder(_Tool)
_CHANGED = msgspec.json.Decoder(_Changed)
_TOOLS: msgspec.json.Decoder[list[_Tool] | None] = msgspec.json.Decoder(list[_Tool] | None)
_CHOICE = msgspec.json.Decoder(_Choice)


class Tools(msgspec.Struct, frozen=True):
    """Tools as raw JSON, None if there are none, the parameters that say which is to be called, and what is left out
    (`app.domain.left_out`)."""

    raw: bytes | None
    params: dict[str, msgspec.Raw]
    left_out: tuple[str, ...]


def tools_of(tools: msgspec.Raw | None, choice: msgspec.Raw | None, changes: Sequence[ToolChange] = ()) -> Tools:
    """Raises InvalidRequest, which names the field, and Unsupported."""
    functions: list[dict[str, Any]] = []
    left_out: list[str] = []
    offered = None if tools is None else decode(_TOOLS, tools, "tools")
    for index, tool in enumerate(offered or []):
        where = f"tools[{index}]"
        if not _is_carried(tool):
            left_out.append(left_out_at(SERVER_TOOL, where))
            continue
        functions.append(_function(tool, where))
        if tool.defer_loading:
            left_out.append(left_out_at(DEFER_LOADING, where))
    if changes:
        functions, untold = _changed(functions, changes)
        left_out += untold
    names = {function["function"]["name"] for function in functions}
    params = _choice_params(choice, names, bool(left_out)) if is_given(choice) else {}
    return Tools(msgspec.json.encode(functions) if functions else None, params, tuple(left_out))


def _is_carried(tool: _Tool) -> bool:
    return tool.type in (None, "custom") and "direct" in (tool.allowed_callers or ["direct"])


def _changed(functions: list[dict[str, Any]], changes: Sequence[ToolChange]) -> tuple[list[dict[str, Any]], list[str]]:
    """The functions after all changes, each at its first place, and what is left out."""
    defined = {function["function"]["name"]: function for function in functions}
    offered: dict[str, Any] = dict(defined)
    removed: dict[str, str] = {}
    left_out = []
    for change in changes:
        where = f"{change.where}.tool"
        given = decode(_CHANGED, change.tool, where)
        if given.type == "tool_definition":
            tool = decode(_TOOL, given.definition, f"{where}.definition")
            name = tool.name or ""
            if not _is_carried(tool):
                left_out.append(left_out_at(SERVER_TOOL, change.where))
                continue
            defined[name] = _function(tool, f"{where}.definition")
        elif given.type == "tool_reference":
            name = required(given.name, f"{where}.name")
        else:  # An MCP server that only the provider could ask.
            left_out.append(left_out_at(SERVER_TOOL, change.where))
            continue
        if not change.is_added:
            offered.pop(name, None)
            removed[name] = left_out_at(REMOVED_TOOL, change.where)
        elif name in defined:
            offered[name] = defined[name]
            removed.pop(name, None)
        else:
            left_out.append(left_out_at(UNKNOWN_TOOL, change.where))
    return list(offered.values()), [*left_out, *removed.values()]


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
    choice = decode(_CHOICE, raw or ABSENT, "tool_choice")
    value: Any = _CHOICES.get(choice.type)
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        if name not in names and has_left_out:
            raise Unsupported("tool_choice.name is not the name of a tool that can be sent to an engine")
        if name not in names:
            raise InvalidRequest("tool_choice.name is not the name of one of the tools")
        value = {"type": "function", "function": {"name": name}}
    if value is None:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none")
    if not names:
        if choice.type == "any" and has_left_out:
            raise Unsupported("tool_choice.type is any, but no tool can be sent to an engine")
        if choice.type == "any":
            raise InvalidRequest("tool_choice.type is any, but there are no tools")
        return {}
    params = {"tool_choice": as_raw(value)}
    if choice.disable_parallel_tool_use:
        params["parallel_tool_calls"] = msgspec.Raw(b"false")
    return params


def parse_messages(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None, *, generates: bool = True
) -> ChatRequest:
    """As `chat.parse_chat`. Raises InvalidRequest, which names the field, and Unsupported.

    `generates` False: its tokens are only counted, so `max_tokens` is not needed, and a reply's beginning is counted,
    too.
    """
    known: _Others | None = None if continued is None else continued.others
    fields, many_values = ({}, False) if known is not None else fields_of(body, has_few_values, continued)
    raws, layout = items_of(body, "messages", fields.pop("messages", None), many_values, continued)
    # The layout's fields are views of copies without the known messages: they do not keep the body.
    given = known.given if known is not None else _given(fields if layout is None else dict(layout.fields), many_values)
    history = conversation(given.system, raws, continued, keeps_states=layout is not None)
    if known is not None and not history.tool_changes:
        others = known
    else:
        others = _others(given, history.tool_changes, generates=generates)
    if layout is not None:
        layout.translation = Translation(history.messages, history.states)
        layout.others = None if history.tool_changes or given.ids is not None else others
    return ChatRequest(
        history.messages,
        others.tools,
        {**others.params, **prefill.PARAMS} if history.is_prefill and generates else others.params,
        given.stream,
        given.ids,
        others.control,
        "messages",
        given.echo,
        history.proofs,
        has_object_arguments=True,
        stream_mode=given.mode,
        layout=layout,
        prefix=None if continued is None else continued.translated(history.messages),
        left_out=others.left_out,
        call_ids=history.call_ids,
    )


class _Given(msgspec.Struct, frozen=True):
    """A request's fields beside its messages: `params` are those that are not listed here."""

    stream: bool
    mode: StreamMode | None
    ids: TokenIds | None
    params: Params
    echo: bytes
    system: list[str]
    tools: msgspec.Raw | None
    choice: msgspec.Raw | None


class _Others(msgspec.Struct, frozen=True):
    """What is sent for them, as in `ChatRequest`, if no message changes the tools."""

    given: _Given
    tools: bytes | None
    params: Params
    control: SessionControl | None
    left_out: tuple[str, ...]


def _given(fields: dict[str, msgspec.Raw], many_values: bool) -> _Given:
    ids = token_ids(fields.pop("input_ids"), "input_ids") if "input_ids" in fields else None
    stream = "stream" in fields and flag(fields.pop("stream"), "stream")
    mode = stream_mode(fields) if "stream_mode" in fields else None
    if "n" in fields:
        require_one(fields.pop("n"))
    params = engine_params(fields, many_values)
    model = value_of(params.get("model"), "model")
    if not isinstance(model, str):
        raise InvalidRequest("model must be a string" if "model" in params else "model is missing")
    echo = msgspec.json.encode(Echo(model, stops_of(params)))
    system, tools, choice = (params.pop(name, None) for name in ("system", "tools", "tool_choice"))
    return _Given(stream, mode, ids, params, echo, system_texts(system), tools, choice)


def _others(given: _Given, changes: Sequence[ToolChange], *, generates: bool) -> _Others:
    params = dict(given.params)
    offered = tools_of(given.tools, given.choice, changes)
    left_out = offered.left_out
    if bytes(params.pop("mcp_servers", b"[]")) not in (b"[]", b"null"):
        left_out = (*left_out, left_out_at(SERVER_TOOL, "mcp_servers"))
    params = {**engine_fields(params, has_limit=generates), **offered.params}
    own = control.remove_control(params) if control.EXTENSIONS in params else None
    return _Others(given, offered.raw, params, own, left_out)
