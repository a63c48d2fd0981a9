"""How much a request's body may hold: what nobody needs, and what would keep everybody else waiting while it is read.

A body of 16 MiB may be one text, or eight million values, which take seconds to make and which no other request
could interrupt. What may hold many (messages, token ids) is read in parts; for the rest there are limits.
"""

from __future__ import annotations

from app.errors import InvalidRequest
from workers import scan

MAX_FIELDS = 1000
"""Top-level fields of a body."""

MAX_MESSAGES = 65_536
"""A session may have 10,000 turns, each with an assistant's message and several results of tools."""

MAX_VALUES = 500_000
"""In one message, or in one other field that is no list of token ids, by `scan.Extent.weight`: 20 ms to decode."""

MAX_MESSAGE_VALUES = 10 * MAX_VALUES
"""In all messages."""

FEW = 20_000
"""What may hold no more, by its commas and brackets, is not looked at any closer."""

_COUNTED = f"an object, a list and a member of an object count as {scan.HEAVY}"


def require_fields(body: bytes) -> None:
    """Raises InvalidRequest for a body with too many top-level fields, before it is decoded."""
    if scan.extent(body, MAX_FIELDS).members > MAX_FIELDS:
        raise too_many_fields()


def too_many_fields() -> InvalidRequest:
    return InvalidRequest(f"the body has more than {MAX_FIELDS} fields")


def require_field(name: str, raw: bytes) -> None:
    """Raises InvalidRequest for a field that holds too much; of messages and ids it does not judge."""
    if not scan.may_exceed(raw, FEW):
        return
    found = scan.extent(raw, MAX_VALUES)
    if found.members > MAX_VALUES:
        raise InvalidRequest(f"{name} has more than {MAX_VALUES} entries")
    if found.weight > MAX_VALUES:
        raise _too_many(name, found.weight, MAX_VALUES)


def require_messages(raw: bytes) -> None:
    """Raises InvalidRequest for too many messages, one that holds too much, or all of them together."""
    if not scan.may_exceed(raw, FEW):
        return
    found = scan.extent(raw, MAX_MESSAGES)
    if found.members > MAX_MESSAGES:
        raise InvalidRequest(f"messages has more than {MAX_MESSAGES} entries")
    if found.largest > MAX_VALUES:
        raise _too_many("one of the messages", found.largest, MAX_VALUES)
    if found.weight > MAX_MESSAGE_VALUES:
        raise _too_many("messages", found.weight, MAX_MESSAGE_VALUES)


def is_too_much(text: bytes) -> bool:
    """Would this JSON, which stands in a string, take long to decode?"""
    return scan.may_exceed(text, FEW) and scan.extent(text, MAX_VALUES).weight > MAX_VALUES


def _too_many(what: str, values: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"{what} has {values} values; the limit is {most} ({_COUNTED})")
