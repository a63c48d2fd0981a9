"""Cursors as clients see them: opaque, URL-safe text."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from app.errors import InvalidRequest


def encode(place: object) -> str:
    """`place` as JSON."""
    return _packed(msgspec.json.encode(place))


def decode(text: str, kind: Any, giver: str, name: str = "cursor") -> Any:
    """What `encode` was given, as this type. Raises InvalidRequest, which names the parameter and the `giver` whose
    cursor it is not."""
    try:
        return msgspec.json.decode(_unpacked(text), type=kind)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise _foreign(giver, name) from error


def encode_text(place: str) -> str:
    return _packed(place.encode())


def decode_text(text: str, giver: str) -> str:
    """What `encode_text` was given. Raises InvalidRequest, also for a text with a NUL, which PostgreSQL cannot hold."""
    try:
        place = _unpacked(text).decode()
    except (binascii.Error, ValueError) as error:
        raise _foreign(giver) from error
    if "\0" in place:
        raise _foreign(giver)
    return place


def _packed(place: bytes) -> str:
    return base64.urlsafe_b64encode(place).decode().rstrip("=")


def _unpacked(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _foreign(giver: str, name: str = "cursor") -> InvalidRequest:
    return InvalidRequest(f"{name} is not one that {giver} gave")
