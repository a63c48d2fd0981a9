"""Splits a body that begins with a kept one (`app.domain.known_body`): only what follows is read."""

from __future__ import annotations

import itertools
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
    HistoryPrefix,
    KnownMessages,
    places_of,
)
from workers import scan


class ContinuedBody(NamedTuple):
    """A body that begins with `prefix`: its fields without the messages, in the client's order, and its messages."""

    prefix: BodyPrefix
    fields: dict[str, msgspec.Raw]
    messages: KnownMessages
    layout: BodyLayout

    @property
    def is_translated_anew(self) -> bool:
        """Must all of its messages be translated again? No state is known that early in them."""
        translation = self.prefix.known.translation
        return translation is not None and self.prefix.state(translation.states) is None

    def history(self) -> HistoryPrefix:
        """What is known of its history, if its messages are a chat's."""
        known, count = self.prefix.known, self.prefix.messages
        return HistoryPrefix(known.turn, count, known.spelled if self.prefix.is_whole else None)

    def translated(self, messages: Sequence[msgspec.Raw]) -> HistoryPrefix | None:
        """What is known of its history, if its messages were translated into these."""
        known = self.prefix.known
        assert known.translation is not None
        pairs = zip(messages, known.translation.messages, strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs))
        is_whole = count == len(known.translation.messages)
        return HistoryPrefix(known.turn, count, known.spelled if is_whole else None) if count else None


def split_continued(body: bytes, prefix: BodyPrefix) -> ContinuedBody | None:
    """The body's fields and messages; None if it must be split as a whole: it may be invalid.

    The rest of a body, with the messages' list opened anew, is a JSON object of its new messages and later fields. If a
    later field has the name of that list again, the list that is found is not the one that was opened.
    """
    rest = body[prefix.end :].lstrip(split.WHITE)
    has_more = rest.startswith(b",")
    if not has_more and not rest.startswith(b"]"):
        return None
    name = prefix.known.name
    opening = b'{"' + name.encode() + b'":['
    text = opening + (rest[1:] if has_more else rest)
    try:
        if not text.isascii():
            text.decode()
        later = split.FIELDS.decode(text)
        raw = later.pop(name)
        new = split.ITEMS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields = {**prefix.front, **later}
    is_own = split.offset_in(text, raw) == len(opening) - 1
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
    starts, ends = places_of(body, at, new)
    places = _moved(known.starts[:count], prefix.shift) + starts, _moved(known.ends[:count], prefix.shift) + ends
    values = known.values + scan.count_values(memoryview(body)[prefix.end : places[1][-1]])
    if not prefix.has_known_front:
        values += scan.count_values(memoryview(body)[: places[0][0]])
    return BodyLayout(body, known.name, prefix.front, places, values, known if prefix.is_whole else None)


def _moved(places: array[int], shift: int) -> array[int]:
    return array("Q", (place + shift for place in places)) if shift else places


def layout_of(body: bytes, name: str, raw: msgspec.Raw, items: Sequence[msgspec.Raw]) -> BodyLayout | None:
    """The layout of a checked body with this list of messages, if it may be kept. `name` is the list's."""
    if len(body) > MOST_HEAD:
        return None
    start = split.offset_in(body, raw)
    if not 0 < start < len(body):  # The body was split in parts, which are copies.
        raw = split.FIELDS.decode(body)[name]
        start, items = split.offset_in(body, raw), split.ITEMS.decode(raw)
    places: tuple[array[int], array[int]] = places_of(body, start + 1, items)
    if (values := scan.count_values(memoryview(body)[: places[1][-1]])) > MOST_VALUES:
        return None
    front = split.FIELDS.decode(body[:start] + b"0}")
    del front[name]
    return BodyLayout(body, name, front, places, values)
