"""Parses a text completion's request."""

from __future__ import annotations

import msgspec

from app.domain import bounds, control, split
from app.domain.request import CompletionRequest, TokenIds, value_of
from app.errors import InvalidRequest, Unsupported
from app.protocols.body import (
    engine_params,
    flag,
    has_many_values,
    require_one,
    split_fields,
    stream_mode,
    token_ids,
)
from workers import scan


def parse_completion(body: bytes, has_few_values: bool = False) -> CompletionRequest:
    """As `chat.parse.parse_chat`; also Unsupported for several prompts or choices."""
    many_values = has_many_values(body, has_few_values)
    fields = split_fields(body, many_values)
    text, ids = _prompt(fields.pop("prompt", None))
    stream = flag(fields.pop("stream", None), "stream")
    require_one(fields.pop("n", None))
    if flag(fields.pop("echo", None), "echo"):
        raise Unsupported("echo must be false: the reply would hold tokens that were not sampled")
    require_one(fields.pop("best_of", None), "best_of")
    stream_mode(fields)  # A completion's stream comes whole in any mode.
    params = engine_params(fields, many_values)
    return CompletionRequest(text, ids, params, stream, control.remove_control(params))


def _prompt(raw: msgspec.Raw | None) -> tuple[str | None, TokenIds | None]:
    """A prompt as text or as ids; a list of one prompt is that prompt."""
    if raw is None:
        raise InvalidRequest("prompt is missing")
    if _is_list(raw) and bytes(raw).lstrip()[1:].lstrip()[:1] in (b'"', b"["):
        raw = _only_item(bytes(raw))
    if _is_list(raw):
        return None, token_ids(raw, "prompt")
    value = value_of(raw, "prompt")
    if not isinstance(value, str):
        raise InvalidRequest("prompt must be text or a list of token ids")
    return value, None


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(raw).lstrip().startswith(b"[")


def _only_item(raw: bytes) -> msgspec.Raw:
    """Raises Unsupported for several prompts, or none."""
    if not scan.may_exceed(raw, bounds.FEW) or scan.extent(raw, 1).members == 1:
        try:
            items = split.items(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest("prompt is not a value that can be read") from error
        if len(items) == 1:
            return items[0]
    raise Unsupported("prompt must be one prompt: a session has one continuation")
