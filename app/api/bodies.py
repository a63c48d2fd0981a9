"""A request's JSON body, read by its model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.api.state import whole_body
from app.errors import InvalidRequest
from workers import scan

MAX_LABEL = 64 << 10
"""Bytes of a session's metadata, and of a reward with its components, as JSON: labels, not a place for data."""

MAX_PLACE = 200
"""Characters of a fault's place in a body that its message has: a key may be as long as the body."""

MAX_VALUES, MAX_COMPONENTS = 33_000, 11_000
"""Values of a body, and of a reward: 64 KiB of JSON hold no more."""

SHORT = 16 << 10
"""Bytes of a body that is given to its model at once."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

Body = TypeVar("Body", bound=BaseModel)


async def body_of(request: Request, kind: type[Body], *, is_optional: bool = False, most: int = MAX_VALUES) -> Body:
    """The request's body; `is_optional`: none at all is the same as `{}`. Raises as `read_model` and `whole_body`."""
    raw = await whole_body(request)
    return kind() if is_optional and not raw.strip() else read_model(raw, kind, most)


def read_model(raw: bytes, kind: type[Body], most: int = MAX_VALUES) -> Body:
    """A body by its model, whatever its content type says. Raises InvalidRequest, naming the first wrong field.

    A model reads all of a body, on the event loop, and makes an error of each wrong value: hence the `most` values.
    """
    if scan.may_exceed(raw, most):
        raise InvalidRequest(f"the body has more than {most} values")
    if len(raw) > SHORT:
        _require_known(raw, kind)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(f"{_place(first['loc'])}: {first['msg']}") from error


def _place(parts: Sequence[str | int]) -> str:
    """Where in a body something stands."""
    return ".".join(str(part) for part in parts)[:MAX_PLACE] or "the body"


def require_finite(value: Any, *parts: str | int) -> None:
    """JSON has no other numbers: they would be stored as null. Raises InvalidRequest."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{_place(parts)}: Input should be a finite number")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        require_finite(each, *parts, part)


def require_small(what: str, value: Any) -> None:
    """Raises InvalidRequest."""
    size = len(msgspec.json.encode(value))
    if size > MAX_LABEL:
        raise InvalidRequest(f"{what} {size} bytes as JSON; the limit is {MAX_LABEL}")


def _require_known(raw: bytes, kind: type[BaseModel]) -> None:
    """A model makes an error of each unknown field, of which only the first is told. Raises InvalidRequest for that."""
    try:
        fields = _FIELDS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None and kind.model_config.get("extra") == "forbid":
        raise InvalidRequest(f"{unknown:.64}: Extra inputs are not permitted")
