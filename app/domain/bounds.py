"""Limits of a request's body, against bodies that would block other requests while they are decoded.

A body of 16 MiB may be one text, or eight million values that take seconds to decode without interruption. Fields that
may hold many values (messages, token ids) are decoded in parts; the others are limited.
"""

from __future__ import annotations

from app.errors import InvalidRequest
from workers import scan

MAX_FIELDS = 1000
"""Top-level fields of a body."""

MAX_MESSAGES = 65_536
"""A session may have 10,000 turns, each with an assistant's message and several results of tools."""

MAX_VALUES = 500_000
"""Values in one message, or in any other field except token ids, by `scan.Extent.weight`: 20 ms to decode."""

MAX_MESSAGE_VALUES = 10 * MAX_VALUES
"""Values in all messages."""

FEW = 20_000
"""Text with no more commas and brackets than this is not scanned further."""

_COUNTED = f"an object, a list and a member of an object count as {scan.HEAVY}"


def require_fields(body: bytes) -> None:
    """Raises InvalidRequest for a body with too many top-level fields, before it is decoded."""
    if scan.extent(body, MAX_FIELDS).members > MAX_FIELDS:
        raise too_many_fields()


def too_many_fields() -> InvalidRequest:
    return InvalidRequest(f"the body has more than {MAX_FIELDS} fields")


def require_field(name: str, raw: bytes) -> None:
    """Raises InvalidRequest for a field with too many values; not for messages and token ids."""
    if not scan.may_exceed(raw, FEW):
        return
    extent = scan.extent(raw, MAX_VALUES)
    if extent.members > MAX_VALUES:
        raise InvalidRequest(f"{name} has more than {MAX_VALUES} entries")
    if extent.weight > MAX_VALUES:
        raise _too_many(name, extent.weight, MAX_VALUES)


def require_messages(raw: bytes) -> None:
    """Raises InvalidRequest for too many messages, or too many values in one or all of them."""
    if not scan.may_exceed(raw, FEW):
        return
    extent = scan.extent(raw, MAX_MESSAGES)
    if extent.members > MAX_MESSAGES:
        raise InvalidRequest(f"messages has more than {MAX_MESSAGES} entries")
    if extent.largest > MAX_VALUES:
        raise _too_many("one of the messages", extent.largest, MAX_VALUES)
    if extent.weight > MAX_MESSAGE_VALUES:
        raise _too_many("messages", extent.weight, MAX_MESSAGE_VALUES)


def is_too_much(text: bytes) -> bool:
    """Has a JSON text more values than one message or field may have?"""
    return scan.may_exceed(text, FEW) and scan.extent(text, MAX_VALUES).weight > MAX_VALUES


def _too_many(what: str, values: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"{what} has {values} values; the limit is {most} ({_COUNTED})")
