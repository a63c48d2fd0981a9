"""Splits a body that begins with a kept one (`app.domain.known_body`): only what follows is read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from app.domain import bounds, split
from app.domain.known_body import (
    MOST_HEAD,
    MOST_VALUES,
    BodyLayout,
    BodyPrefix,
    Hasher,
    KnownMessages,
    places_of,
)
from workers import scan

_OPENING = b'{"messages":['


class ContinuedBody(NamedTuple):
    """A body that begins with `prefix`: its fields without the messages, in the client's order, and its messages."""

    prefix: BodyPrefix
    fields: dict[str, msgspec.Raw]
    messages: KnownMessages
    layout: BodyLayout


def split_continued(body: bytes, prefix: BodyPrefix) -> ContinuedBody | None:
    """The body's fields and messages; None if it must be split as a whole: it may be invalid.

    The rest of a body, with the messages' list opened anew, is a JSON object of its new messages and later fields. If a
    later field has the name of that list again, the list that is found is not the one that was opened.
    """
    rest = body[prefix.end :].lstrip(split.WHITE)
    has_more = rest.startswith(b",")
    if not has_more and not rest.startswith(b"]"):
        return None
    text = _OPENING + (rest[1:] if has_more else rest)
    try:
        if not text.isascii():
            text.decode()
        later = split.FIELDS.decode(text)
        raw = later.pop("messages")
        new = split.ITEMS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields = {**prefix.known.front, **later}
    is_own = split.offset_in(text, raw) == len(_OPENING) - 1
    if not is_own or bool(new) != has_more or len(fields) >= bounds.MAX_FIELDS:
        return None
    messages = KnownMessages(prefix, new)
    if len(messages) > bounds.MAX_MESSAGES:
        return None
    layout = _layout(body, prefix, len(body) - len(rest) + has_more, new)
    return ContinuedBody(prefix, fields, messages, layout)


def _layout(body: bytes, prefix: BodyPrefix, at: int, new: list[msgspec.Raw]) -> BodyLayout:
    """The body's layout; its new messages begin at `at`."""
    known, count = prefix.known, prefix.messages
    view, done = memoryview(body), 0
    hashed: Hasher = hashlib.sha256()
    if prefix.is_whole:
        hashed, done = known.hashed.copy(), prefix.end
    starts, ends = places_of(body, at, new)
    places = known.starts[:count] + starts, known.ends[:count] + ends
    hashed.update(view[done : places[1][-1]])
    values = known.values + scan.count_values(view[prefix.end : places[1][-1]])
    return BodyLayout(body, known.front, places, hashed, values, known if prefix.is_whole else None)


def layout_of(body: bytes, raw: msgspec.Raw, items: Sequence[msgspec.Raw]) -> BodyLayout | None:
    """The layout of a checked chat body with this list of messages, if it may be kept."""
    if len(body) > MOST_HEAD:
        return None
    start = split.offset_in(body, raw)
    if not 0 < start < len(body):  # The body was split in parts, which are copies.
        raw = split.FIELDS.decode(body)["messages"]
        start, items = split.offset_in(body, raw), split.ITEMS.decode(raw)
    places: tuple[array[int], array[int]] = places_of(body, start + 1, items)
    head = memoryview(body)[: places[1][-1]]
    if (values := scan.count_values(head)) > MOST_VALUES:
        return None
    front = split.FIELDS.decode(body[:start] + b"0}")
    del front["messages"]
    return BodyLayout(body, front, places, hashlib.sha256(head), values)
