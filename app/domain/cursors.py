"""Cursors as clients see them: opaque, URL-safe text."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel

from app.domain.patterns import NO_NUL
from app.errors import InvalidRequest

Text = Annotated[str, msgspec.Meta(pattern=NO_NUL)]
"""A text of a cursor, which a client may have made up."""


def encode(place: object) -> str:
    """`place` as JSON."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode(text: str, kind: Any, giver: str, name: str = "cursor") -> Any:
    """What `encode` was given, as this type. Raises InvalidRequest, which names the parameter and the `giver` whose
    cursor it is not."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{name} was not issued by {giver}") from error


def mark(query: BaseModel, filters: Collection[str]) -> str:
    """What a cursor has of the filters among a request's parameters: a short hash, or nothing where none is set."""
    chosen = query.model_dump(include=set(filters), exclude_defaults=True)
    raw = msgspec.json.encode(chosen, order="deterministic")
    return hashlib.sha256(raw).hexdigest()[:12] if chosen else ""


def require_mark(given: str, wanted: str) -> None:
    """Raises InvalidRequest for a cursor of other filters."""
    if given != wanted:
        raise InvalidRequest("the cursor belongs to a request with other filters: start again without it")
