"""Parameters of a Responses request as chat parameters, and what its response repeats of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from app.domain.left_out import INCLUDE, left_out_at
from app.domain.request import value_of
from app.errors import InvalidRequest
from app.protocols.responses.values import fields, flag_or_none, items, name, one_of, text, text_or_none, unsupported

Params = dict[str, msgspec.Raw]

NOT_CARRIED = frozenset(
    ["client_metadata", "prompt_cache_retention", "prompt_cache_options", "service_tier", "stream_options"]
)
"""Hints to OpenAI's service, which mean nothing to an engine: accepted, and neither sent nor kept."""

_REFUSED = (
    "background_options",
    "context_management",
    "conversation",
    "image",
    "max_tool_calls",
    "moderation",
    "prompt",
    "access_programs",
)

_ENCRYPTED = "reasoning.encrypted_content"

_OF_SERVER_TOOLS = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call_output.")
"""What an `include` asks for of the calls of a server's tools begins so; there are no such calls."""

_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Engines know three."""

_NO_THINKING = {"enable_thinking": False, "thinking": False}
"""Chat templates' own switches: Qwen's and GLM's; DeepSeek's and Granite's."""

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
"""Of `metadata`, as OpenAI has them."""


class Parameters:
    """Takes the fields of a request that Turnlog knows, each once. `params` go to the engine, `shown` into the reply.

    Fields that it does not take are left in `given`.
    """

    def __init__(self, given: Params) -> None:
        self.given = given
        self.params: Params = {}
        self.shown: dict[str, Any] = {}
        self.encrypted = False
        self.left_out: list[str] = []

    def take(self, field: str) -> Any:
        """The field's value, decoded; None if it is absent."""
        return value_of(self.given.pop(field, None), field)

    def send(self, field: str, value: Any) -> None:
        self.params[field] = msgspec.Raw(msgspec.json.encode(value))

    def read(self) -> None:
        """Raises InvalidRequest, and Unsupported for what cannot be carried to an engine."""
        for field in _REFUSED:
            if self.take(field) not in (None, []):
                raise unsupported(field)
        for field in NOT_CARRIED:
            self.given.pop(field, None)
        for reader in (self._sampling, self._reasoning, self._text, self._include, self._service, self._repeated):
            reader()

    def _sampling(self) -> None:
        for field, sent, check in (
            ("temperature", "temperature", _number),
            ("top_p", "top_p", _number),
            ("max_output_tokens", "max_tokens", _count),
            ("parallel_tool_calls", "parallel_tool_calls", flag_or_none),
        ):
            raw = self.given.get(field)
            value = check(self.take(field), field)
            self.shown[field] = value
            if value is not None and raw is not None:
                self.params[sent] = raw
        self.shown["parallel_tool_calls"] = self.shown["parallel_tool_calls"] is not False

    def _reasoning(self) -> None:
        value = self.take("reasoning")
        given = {} if value is None else fields(value, "reasoning")
        effort = text_or_none(given.get("effort"), "reasoning.effort")
        if effort == "none":
            own = self.take("chat_template_kwargs")
            self.send("chat_template_kwargs", {**_NO_THINKING, **fields(own or {}, "chat_template_kwargs")})
        elif effort is not None:
            self.send("reasoning_effort", _EFFORTS[one_of(effort, "reasoning.effort", ("none", *_EFFORTS))])
            self.given.pop("reasoning_effort", None)
        summary = self._asked(given, "summary") or self._asked(given, "generate_summary")
        for key, kept in given.items():
            is_default = kept is None or (key, kept) in (
                ("context", "auto"),
                ("context", "all_turns"),
                ("mode", "standard"),
            )
            if key not in ("effort", "summary", "generate_summary") and not is_default:
                raise unsupported(f"reasoning.{key[:64]}")
        self.shown["reasoning"] = {"effort": effort, "summary": summary}

    def _asked(self, given: dict[str, Any], key: str) -> str | None:
        value = given.get(key)
        return None if value is None else one_of(value, f"reasoning.{key}", ("auto", "concise", "detailed"))

    def _text(self) -> None:
        value = self.take("text")
        given = {} if value is None else fields(value, "text")
        form = given.get("format") or {"type": "text"}
        kind = text(fields(form, "text.format").get("type"), "text.format.type")
        if one_of(kind, "text.format.type", ("text", "json_object", "json_schema")) != "text":
            self.given.pop("response_format", None)
            self.send("response_format", _schema(form) if kind == "json_schema" else {"type": kind})
        self.shown["text"] = {"format": form}
        verbosity = given.get("verbosity")
        if verbosity is not None:
            self.given.pop("verbosity", None)
            self.send("verbosity", one_of(verbosity, "text.verbosity", ("low", "medium", "high")))
            self.shown["text"]["verbosity"] = verbosity

    def _include(self) -> None:
        value = self.take("include")
        for index, included in enumerate([] if value is None else items(value, "include")):
            place = f"include[{index}]"
            if text(included, place).startswith(_OF_SERVER_TOOLS):
                self.left_out.append(left_out_at(INCLUDE, place))
            elif included == _ENCRYPTED:
                self.encrypted = True
            else:
                raise unsupported(place, included)
        if self.take("top_logprobs"):
            raise unsupported("top_logprobs")

    def _service(self) -> None:
        if flag_or_none(self.take("background"), "background"):
            raise unsupported("background")
        truncation = self.take("truncation")
        if truncation == "auto":
            raise unsupported("truncation", "auto")
        if truncation is not None:
            one_of(truncation, "truncation", ("auto", "disabled"))
        store = flag_or_none(self.take("store"), "store")
        self.shown |= {"background": False, "truncation": "disabled", "store": store is not False}

    def _repeated(self) -> None:
        """Fields that mean nothing to an engine and that the response repeats."""
        for field in ("user", "safety_identifier", "prompt_cache_key"):
            if (value := text_or_none(self.take(field), field)) is not None:
                self.shown[field] = value
        metadata = self.take("metadata")
        self.shown["metadata"] = {} if metadata is None else _metadata(fields(metadata, "metadata"))


def _metadata(metadata: dict[str, Any]) -> dict[str, str]:
    if len(metadata) > _MAX_PAIRS:
        raise InvalidRequest(f"metadata has more than {_MAX_PAIRS} entries")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY or len(text(value, f"metadata.{key[:_MAX_KEY]}")) > _MAX_VALUE:
            raise InvalidRequest(f"metadata: a key has at most {_MAX_KEY} characters, a value at most {_MAX_VALUE}")
    return metadata


def _schema(form: dict[str, Any]) -> dict[str, Any]:
    path = "text.format"
    schema: dict[str, Any] = {"name": name(form.get("name"), f"{path}.name")}
    schema["schema"] = fields(form.get("schema"), f"{path}.schema")
    checks: tuple[tuple[str, Callable[[Any, str], Any]], ...] = (
        ("strict", flag_or_none),
        ("description", text_or_none),
    )
    for key, check in checks:
        if (value := check(form.get(key), f"{path}.{key}")) is not None:
            schema[key] = value
    return {"type": "json_schema", "json_schema": schema}


def _number(value: Any, path: str) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise InvalidRequest(f"{path} must be a number")


def _count(value: Any, path: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise InvalidRequest(f"{path} must be a positive integer")
