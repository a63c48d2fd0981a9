"""An error in the shape of the Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from app.protocols.errors import ErrorFields

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

_TOO_LONG = "prompt is too long"
"""Claude Code compacts its history after a 400 whose message begins like this."""


def error_body(error: ErrorFields) -> bytes:
    """The error with its stable code, where it has one."""
    message = f"{_TOO_LONG}: {error.message}" if error.is_context else error.message
    fields: dict[str, Any] = {"type": _type_of(error.status), "message": message}
    if error.code is not None:
        fields["code"] = error.code
    if error.details is not None:
        fields["details"] = error.details
    return msgspec.json.encode({"type": "error", "error": fields, "request_id": error.request_id})


def _type_of(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
