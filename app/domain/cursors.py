"""Cursors as clients see them: opaque, URL-safe text."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from app.errors import InvalidRequest


def encoded(place: object) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decoded(text: str, kind: Any, giver: str) -> Any:
    """Decode a cursor made by `encoded`. Raises InvalidRequest, which names the `giver` that should have issued it."""
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=kind)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"cursor is not one that {giver} gave") from error
