"""An error before it is spelled in a protocol: our own, or an engine's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from app.errors import AppError

_CONTEXT = re.compile(r"context length|context window|longer than the model's|maximum (input|sequence) length", re.I)
"""SGLang 0.5.23 and vLLM 0.32 have no code for a prompt that is too long: only the message tells."""


class ErrorFields(msgspec.Struct, frozen=True):
    """`type` and `code` as in the OpenAI shape. `is_context`: the prompt is too long for the engine's model. `details`
    as in the Messages API."""

    status: int
    message: str
    type: str
    code: str | int | None = None
    param: str | None = None
    is_context: bool = False
    request_id: str | None = None
    details: Mapping[str, str] | None = None


def openai_error(error: ErrorFields) -> bytes:
    """As the OpenAI SDKs read it."""
    fields = {"message": error.message, "type": error.type, "code": error.code, "param": error.param}
    return msgspec.json.encode({"error": fields})


def own_error(error: AppError, request_id: str | None = None) -> ErrorFields:
    return ErrorFields(error.status, str(error), error.type, error.code, None, False, request_id, error.details)


def engine_error(status: int, body: bytes, request_id: str | None = None) -> ErrorFields:
    """An engine's error: flat (SGLang) or below `error` (vLLM)."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        decoded = None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        missing = "the engine returned an error without a message"
        return ErrorFields(status, missing, "upstream_error", request_id=request_id)
    message, code, param = error["message"], error.get("code"), error.get("param")
    return ErrorFields(
        status,
        message,
        error["type"] if isinstance(error.get("type"), str) else "upstream_error",
        code if isinstance(code, str | int) else None,
        param if isinstance(param, str) else None,
        status == 400 and _CONTEXT.search(message) is not None,
        request_id,
    )
