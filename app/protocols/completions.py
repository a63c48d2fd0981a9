"""OpenAI text completions: a prompt as text or as token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from app.domain import bounds, control, split
from app.domain.known_body import ContinuedBody
from app.domain.request import (
    CompletionRequest,
    TokenIds,
    engine_params,
    fields_of,
    flag,
    require_one,
    require_top,
    stream_mode,
    token_ids,
    value_of,
)
from app.errors import InvalidRequest, Unsupported
from app.protocols.base import COMMON, IDS, ONE, TEXT, Schema, nullable
from app.protocols.chat import CHAT
from workers import scan
from workers.parse_json import is_null

_SINGLE: Schema = {"type": "array", "minItems": 1, "maxItems": 1}

REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "CompletionRequest",
    "type": "object",
    "description": "An OpenAI completions request. Fields that Turnlog does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "prompt": {
            "anyOf": [TEXT, IDS, {**_SINGLE, "items": TEXT}, {**_SINGLE, "items": IDS}],
            "description": "Text or ids; a list of one such prompt is that one.",
        },
        "best_of": nullable(ONE),
        "echo": nullable({"const": False}),
    },
    "required": ["prompt"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {"model": "simulator", "prompt": "6 times 7 is", "max_tokens": 8}


_LIST = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*(.)", re.DOTALL)
"""A list, and the first character within, which may be its end."""


def parse_completion(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
) -> CompletionRequest:
    """As `chat.parse_chat`; also Unsupported for several prompts or choices. No completion is `continued`."""
    fields, many_values = fields_of(body, has_few_values)
    text, ids = _prompt(fields.pop("prompt", None))
    stream = flag(fields.pop("stream", None), "stream")
    require_one(fields.pop("n", None))
    if flag(fields.pop("echo", None), "echo"):
        raise Unsupported("echo must be false: the reply would hold tokens that were not sampled")
    require_one(fields.pop("best_of", None), "best_of")
    stream_mode(fields)  # A completion's stream comes whole in any mode.
    params = engine_params(fields, many_values)
    if is_null(params.get("max_tokens")):
        params.pop("max_tokens", None)  # OpenAI's default, as in vLLM; of SGLang's completions a 400.
    # What is no number is none that an engine is sent.
    if bytes(params.get("logprobs", b"")).isdigit():
        require_top(params["logprobs"], "logprobs")
    return CompletionRequest(text, ids, params, stream, control.remove_control(params))


def _prompt(raw: msgspec.Raw | None) -> tuple[str | None, TokenIds | None]:
    """A prompt as text or as ids; a list of one prompt is that prompt."""
    if raw is None:
        raise InvalidRequest("prompt is missing")
    if (opened := _LIST.match(memoryview(raw))) is not None and bytes(opened[1]) in (b'"', b"["):
        raw = _only_item(bytes(raw))
        opened = _LIST.match(memoryview(raw))
    if opened is not None:
        return None, token_ids(raw, "prompt")
    value = value_of(raw, "prompt")
    if not isinstance(value, str):
        raise InvalidRequest("prompt must be text or a list of token ids")
    return value, None


def _only_item(raw: bytes) -> msgspec.Raw:
    """Raises Unsupported for several prompts, or none."""
    if not scan.may_exceed(raw, bounds.FEW) or scan.extent(raw, 1).members == 1:
        try:
            items = split.items(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest("prompt cannot be parsed") from error
        if len(items) == 1:
            return items[0]
    raise Unsupported("prompt must be one prompt: a session has one continuation")


COMPLETIONS = msgspec.structs.replace(
    CHAT,
    name="completions",
    route="/v1/completions",
    parse=parse_completion,
    schema=REQUEST,
    example=EXAMPLE,
    has_layouts=False,
)
