"""Parameters of a Messages request as an engine's chat has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from app.domain.request import value_of
from app.errors import InvalidRequest, ThreadUnsupported, Unsupported
from app.protocols.messages.content import NOTHING
from app.protocols.messages.reading import decode, is_given, object_text

Params = dict[str, msgspec.Raw]

_NOT_CARRIED = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "billing_policy",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
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
    schema: msgspec.Raw = NOTHING


class _Output(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None
    task_budget: msgspec.Raw = NOTHING


_THINKING: msgspec.json.Decoder[_Thinking | None] = msgspec.json.Decoder(_Thinking | None)
_FORMAT: msgspec.json.Decoder[_Format | None] = msgspec.json.Decoder(_Format | None)
_OUTPUT: msgspec.json.Decoder[_Output | None] = msgspec.json.Decoder(_Output | None)
_STOPS: msgspec.json.Decoder[list[str] | None] = msgspec.json.Decoder(list[str] | None)
_TEMPLATE: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def model_of(params: Params) -> str:
    model = value_of(params.get("model"), "model")
    if not isinstance(model, str):
        raise InvalidRequest("model must be a string" if "model" in params else "model is missing")
    return model


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
        if is_given(params.get(name)) and bytes(params[name]).strip() not in (b"[]", b'""'):
            raise error(f"{name} cannot be carried to an engine")
    _require_numbers(params, has_limit)
    own = {"stop_sequences", "thinking", "output_config", "output_format", *_UNSUPPORTED, *_NOT_CARRIED}
    fields = {name: raw for name, raw in params.items() if name not in own}
    if stops := stops_of(params):
        fields.setdefault("stop", _raw(stops))
    if (template := _template(params)) is not None:
        fields["chat_template_kwargs"] = template
    for name, raw in _output(params).items():
        fields.setdefault(name, raw)
    return fields


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _require_numbers(params: Params, has_limit: bool) -> None:
    limit = value_of(params.get("max_tokens"), "max_tokens")
    if limit is None and has_limit:
        raise InvalidRequest("max_tokens is missing")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidRequest("max_tokens must be an integer, at least 1")
    for name in ("temperature", "top_p"):
        value = value_of(params.get(name), name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise InvalidRequest(f"{name} must be a number, at least 0")
    top_k = value_of(params.get("top_k"), "top_k")
    if top_k is not None and type(top_k) is not int:
        raise InvalidRequest("top_k must be an integer")


def _template(params: Params) -> msgspec.Raw | None:
    """The template's arguments where thinking is disabled; a budget is not enforced. The client's own go first."""
    raw, own = params.get("thinking"), params.get("chat_template_kwargs")
    thinking = None if raw is None else decode(_THINKING, raw, "thinking")
    if thinking is None or thinking.type != "disabled":
        return None
    given = (None if own is None else decode(_TEMPLATE, own, "chat_template_kwargs")) or {}
    return _raw({**_NO_THINKING, **given})


def _output(params: Params) -> Params:
    raw, old = params.get("output_config"), params.get("output_format")
    config = (None if raw is None else decode(_OUTPUT, raw, "output_config")) or _Output()
    form, where = config.format, "output_config.format"
    if form is None and old is not None:
        form, where = decode(_FORMAT, old, "output_format"), "output_format"
    if is_given(config.task_budget):
        raise Unsupported("output_config.task_budget cannot be carried to an engine")
    fields: Params = {}
    if config.effort is not None:
        fields["reasoning_effort"] = _raw(_EFFORTS[config.effort])
    if form is not None:
        schema = msgspec.Raw(object_text(form.schema, f"{where}.schema"))
        fields["response_format"] = _raw({"type": "json_schema", "json_schema": {"name": "output", "schema": schema}})
    return fields
