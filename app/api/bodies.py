"""Reads and validates JSON bodies with pydantic models."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.api.state import whole_body
from app.domain.surrogates import mended
from app.errors import InvalidRequest
from workers import scan

MAX_LABEL = 64 << 10
"""Maximum bytes as JSON of a session's metadata, and of a reward with its components. They are labels, not data."""

MAX_LOCATION = 200
"""Maximum characters of a location in an error message: a key may be as long as the body."""

MAX_VALUES, MAX_COMPONENTS = 33_000, 11_000
"""Maximum number of values in a body, and in a reward: 64 KiB of JSON cannot hold more."""

SHORT = 16 << 10
"""Bytes up to which a body goes to its model without a check for unknown fields first."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

Body = TypeVar("Body", bound=BaseModel)


async def body_of(request: Request, kind: type[Body], *, is_optional: bool = False, most: int = MAX_VALUES) -> Body:
    """The request's body. With `is_optional` an empty one means `{}`. Raises like `read_model` and `whole_body`."""
    raw = await whole_body(request)
    return kind() if is_optional and not raw.strip() else read_model(raw, kind, most)


def read_model(raw: bytes, kind: type[Body], most: int = MAX_VALUES) -> Body:
    """Validate a body of any content type. Raises InvalidRequest, which names the first invalid field.

    At most `most` values are allowed: a model reads the whole body on the event loop, with an error per invalid value.
    """
    if scan.may_exceed(raw, most):
        raise InvalidRequest(f"the body has more than {most} values")
    if len(raw) > SHORT:
        _require_known(raw, kind)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        if (text := mended(raw)) is not None:
            return read_model(text.body, kind, most)
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise _unknown(str(first["loc"][0]), kind) from error
        raise InvalidRequest(f"{_location(first['loc'])}: {first['msg']}") from error


def _location(parts: Sequence[str | int]) -> str:
    """The location of a value in a body, as text."""
    return ".".join(str(part) for part in parts)[:MAX_LOCATION] or "the body"


def require_finite(value: Any, *parts: str | int) -> None:
    """Raises InvalidRequest for NaN and infinity. JSON has no such numbers; they would be stored as null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{_location(parts)}: Input should be a finite number")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        require_finite(each, *parts, part)


def require_small(what: str, value: Any) -> None:
    """Raises InvalidRequest for more than MAX_LABEL bytes as JSON; its message begins with `what`."""
    size = len(msgspec.json.encode(value))
    if size > MAX_LABEL:
        raise InvalidRequest(f"{what} {size} bytes as JSON; the limit is {MAX_LABEL}")


def _require_known(raw: bytes, kind: type[BaseModel]) -> None:
    """Raises InvalidRequest for the first unknown field. The model would make an error for each of them."""
    try:
        fields = _FIELDS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None and kind.model_config.get("extra") == "forbid":
        raise _unknown(unknown, kind)


def _unknown(name: str, kind: type[BaseModel]) -> InvalidRequest:
    """Names the nearest field, or all of them: a typing error is the usual cause."""
    near = difflib.get_close_matches(name[:64], kind.model_fields, 1)
    known = f"did you mean {near[0]}?" if near else f"supported are {', '.join(sorted(kind.model_fields))}"
    return InvalidRequest(f"{name:.64} is not a field of the body; {known}")
