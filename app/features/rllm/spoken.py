"""How the gateway's routes say what is wrong: `{"error": text}`, and 422 `{"detail": […]}` for a parameter."""

from __future__ import annotations

import msgspec

from app.api.parameters import InvalidParameters
from app.errors import AppError
from app.upstream.headers import Headers


def spoken(error: AppError) -> tuple[int, Headers, bytes]:
    headers: Headers = [("content-type", "application/json")]
    if isinstance(error, InvalidParameters):
        return 422, headers, msgspec.json.encode({"detail": error.errors})
    return error.status, [*headers, *error.headers().items()], msgspec.json.encode({"error": str(error)})
