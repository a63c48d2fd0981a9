"""The newest request bodies of a session, as bytes. The next body usually begins with one of them: then only what
follows is read and checked.

    {"model":"m","messages":[{"role":…},{"role":…}   ],"stream":false}
    └─ front ─┘              └──────────── head ──┘  └─ rest

A head is a body up to the end of its last message. All of it was checked when its turn was taken, and equal bytes are
equal JSON as far as a message's end. What is said of messages here is true of the items of a Responses `input`, too.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import msgspec

from app.domain import bounds, split
from workers import scan
from workers.parse_prompt import Hasher, KnownText, KnownTokens

LONG_BODY = 32 << 10
"""Bytes of a body from which on it is worth keeping: a shorter one is parsed in some ten microseconds."""

MOST_HEAD = 8 << 20
"""Bytes of a head that is kept. The event loop compares it with a body, at some GiB a second."""

MOST_REST, MOST_REST_VALUES = 512 << 10, 8000
"""Bytes and values (`scan.count_values`) that may follow a head, to be read on the event loop: some milliseconds. So
few values are within `bounds`."""

MOST_HEADS, MOST_BYTES = 16, 16 << 20
"""How many heads are kept, and their bytes together; at least the newest."""

MOST_VALUES = bounds.MAX_MESSAGE_VALUES // (2 * scan.HEAVY)
"""Values of a head by `scan.count_values`: so many are within `bounds`, whatever they are. None weighs more than a list
that is the value of a member."""

MOST_FRONT, SEARCHED = 64 << 10, 64
"""Bytes of the fields before a body's messages, if they may be others than those known: they are searched for so many
bytes of the first message."""

STATES = 4
"""After how many of a body's newest messages the state of what reads them is kept: Claude Code moves its marks within
the last two."""

_BETWEEN = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_WHITE = re.compile(rb"[ \t\r\n]*")


class State(NamedTuple):
    """The translator (`app.protocols.body`) that has read the first `messages` of a body."""

    messages: int
    reader: Any


class Translation(NamedTuple):
    """A body's messages as those of a chat, in a protocol that translates them. `states` are the translator's."""

    messages: Sequence[msgspec.Raw]
    states: Sequence[State]


class BodyLayout:
    """Where a checked body's messages are, and what was computed on the way.

    `name` is that of their field, `front` are the fields before it, `starts` and `ends` the messages' places. `values`
    is an upper bound of its values by `scan.count_values`. `continued` is the body that it begins with, if all of that
    one's messages are in it. `translation` is set where the protocol translates messages.
    """

    __slots__ = ("body", "continued", "ends", "front", "name", "starts", "translation", "values")

    def __init__(
        self,
        body: bytes,
        name: str,
        front: Mapping[str, msgspec.Raw],
        places: tuple[array[int], array[int]],
        values: int,
        continued: KnownBody | None = None,
    ) -> None:
        self.body = body
        self.name = name
        self.front = front
        self.starts, self.ends = places
        self.values = values
        self.continued = continued
        self.translation: Translation | None = None


class KnownBody:
    """The head of a committed turn's body in `protocol`. `spelled` is the hash state of the turn's chat messages
    (`Incoming.spelling`), `text` that of the turn's tokens if it is kept."""

    __slots__ = (
        *("ends", "front", "head", "name", "protocol", "spelled", "starts"),
        *("text", "translation", "turn", "values"),
    )

    def __init__(
        self, layout: BodyLayout, protocol: str, turn: int, spelled: Hasher, text: KnownText | None = None
    ) -> None:
        body, end = layout.body, layout.ends[-1]
        self.head = memoryview(body)[:end] if len(body) - end <= LONG_BODY else memoryview(body[:end])
        self.name, self.protocol = layout.name, protocol
        self.front, self.values = layout.front, layout.values
        self.starts, self.ends = layout.starts, layout.ends
        self.translation = layout.translation
        self.turn = turn
        self.spelled = spelled
        self.text = text

    def __len__(self) -> int:
        """Approximate bytes in memory; messages that were translated have about as many as the head."""
        copies = 1 if self.translation is None else 2
        text = 0 if self.text is None else len(self.text)
        return copies * len(self.head) + text + 2 * self.ends.itemsize * len(self.ends)


class BodyPrefix(NamedTuple):
    """A body's messages begin with the first `messages` of `known`, byte for byte. `front` are the fields before them;
    if these are other bytes than those of `known`, the messages stand `shift` bytes behind theirs."""

    known: KnownBody
    messages: int
    front: Mapping[str, msgspec.Raw]
    shift: int = 0

    @property
    def end(self) -> int:
        return self.known.ends[self.messages - 1] + self.shift

    @property
    def has_known_front(self) -> bool:
        return self.front is self.known.front

    @property
    def is_whole(self) -> bool:
        """Does the body begin with all messages of `known`?"""
        return self.messages == len(self.known.ends)

    def state(self, states: Sequence[State]) -> State | None:
        """The last of the known body's states that holds for this one, too."""
        return next((state for state in reversed(states) if state.messages <= self.messages), None)


class HistoryPrefix(NamedTuple):
    """A request begins with the first `messages` chat messages of turn `turn`'s request, byte for byte. `spelled` is
    the hash state of these, if they are all of them (`Incoming.spelling`)."""

    turn: int
    messages: int
    spelled: Hasher | None


class KnownBodies:
    """The kept bodies of a session, the newest last; `size` are their bytes together."""

    __slots__ = ("_bodies", "size")

    def __init__(self) -> None:
        self._bodies: list[KnownBody] = []
        self.size = 0

    def __contains__(self, known: object) -> bool:
        return any(one is known for one in self._bodies)

    def prefix(self, body: bytes, protocol: str) -> BodyPrefix | None:
        """The longest beginning that `body` shares with a kept one of its protocol, if the event loop may read what
        follows."""
        bodies = [known for known in reversed(self._bodies) if known.protocol == protocol]
        found = [BodyPrefix(known, count, known.front) for known in bodies if (count := _equal_messages(known, body))]
        found = found or [prefix for known in bodies if (prefix := _behind_another_front(known, body))]
        if not found:
            return None
        longest = max(found, key=lambda prefix: prefix.end)
        known, end = longest.known, longest.end
        if len(body) - end > MOST_REST:
            return None
        values = scan.count_values(memoryview(body)[end:])
        if not longest.has_known_front:
            values += scan.count_values(memoryview(body)[: known.starts[0] + longest.shift])
        if values > MOST_REST_VALUES or values + known.values > MOST_VALUES:
            return None
        return longest

    def text_of(self, tokens: KnownTokens) -> KnownText | None:
        """The text of these tokens, if it is kept."""
        texts = (known.text for known in reversed(self._bodies))
        return next((text for text in texts if text is not None and text.known == tokens), None)

    def add(self, known: KnownBody, continued: KnownBody | None) -> None:
        """Keep a committed turn's body instead of the one that it continues."""
        self._bodies = [*(body for body in self._bodies if body is not continued), known]
        self.size = sum(map(len, self._bodies))
        while len(self._bodies) > MOST_HEADS or (len(self._bodies) > 1 and self.size > MOST_BYTES):
            self.size -= len(self._bodies.pop(0))


class KnownMessages(Sequence[msgspec.Raw]):
    """A request's messages: those of a kept body, in its bytes, and new ones."""

    def __init__(self, prefix: BodyPrefix, new: Sequence[msgspec.Raw]) -> None:
        self._head = prefix.known.head
        self._starts, self._ends = prefix.known.starts, prefix.known.ends
        self._count = prefix.messages
        self._new = new

    def __len__(self) -> int:
        return self._count + len(self._new)

    @overload
    def __getitem__(self, index: int) -> msgspec.Raw: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[msgspec.Raw]: ...
    def __getitem__(self, index: int | slice) -> msgspec.Raw | Sequence[msgspec.Raw]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place >= self._count:
            return self._new[place - self._count]
        return msgspec.Raw(self._head[self._starts[place] : self._ends[place]])

    def __iter__(self) -> Iterator[msgspec.Raw]:
        return (self[place] for place in range(len(self)))


def places_of(text: bytes, at: int, items: Sequence[msgspec.Raw]) -> tuple[array[int], array[int]]:
    """The starts and ends in `text` of a list's items, the first of which begins at `at`, or behind white space."""
    starts, ends = array("Q"), array("Q")
    at = _end(_WHITE, text, at)
    for item in items:
        starts.append(at)
        end = at + len(memoryview(item))
        ends.append(end)
        at = end + 1 if text[end : end + 2] == b",{" else _end(_BETWEEN, text, end)
    return starts, ends


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _behind_another_front(known: KnownBody, body: bytes) -> BodyPrefix | None:
    """What the body shares with a kept one if the fields before its messages are others."""
    start = known.starts[0]
    at = body.find(bytes(known.head[start : min(start + SEARCHED, known.ends[0])]), 0, MOST_FRONT)
    front = None if at < 0 else _front(body[:at], known.name)
    count = 0 if front is None else _equal_messages(known, body, start, at - start)
    return None if front is None or not count else BodyPrefix(known, count, front, at - start)


def _front(text: bytes, name: str) -> dict[str, msgspec.Raw] | None:
    """The fields of a body that begins with `text`; None unless that ends where its list `name` was opened."""
    text = text.rstrip(split.WHITE)
    if not text.endswith(b"["):
        return None
    text = text[:-1] + b"0}"
    try:
        text.decode()
        fields = split.FIELDS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    raw = fields.pop(name, None)
    return None if raw is None or split.offset_in(text, raw) != len(text) - 2 else fields


def _equal_messages(known: KnownBody, body: bytes, begin: int = 0, shift: int = 0) -> int:
    """How many of the kept body's first messages `body` begins with, from `begin` on, `shift` bytes further on."""
    head, ends = known.head, known.ends
    if body.startswith(head[begin:], begin + shift):
        return len(ends)
    low, high = 0, len(ends) - 1  # at least `low` messages are equal, at most `high`
    while low < high:
        middle = (low + high + 1) // 2
        start = ends[low - 1] if low else begin
        if body.startswith(head[start : ends[middle - 1]], start + shift):
            low = middle
        else:
            high = middle - 1
    return low
