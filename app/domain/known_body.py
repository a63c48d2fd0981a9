"""The newest request bodies of a session, as bytes. The next body usually begins with one of them: then only what
follows is read and checked.

    {"model":"m","messages":[{"role":…},{"role":…}   ],"stream":false}
    └─ front ─┘              └──────────── head ──┘└───── tail ──────┘

A head is a body up to the end of its last message. All of it was checked when its turn was taken, and equal bytes are
equal JSON as far as a message's end. An equal tail has the same fields: Claude Code writes its tools there. What is
said of messages here is true of the items of a Responses `input`, too.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import msgspec

from app.domain import bounds, split
from workers import scan
from workers.parse_prompt import Hasher, KnownText, KnownTokens

LONG_BODY = 16 << 10
"""Bytes of a body from which on it is worth keeping: to read a shorter one takes some ten microseconds."""

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
    """The translator (`app.domain.request`) that has read the first `messages` of a body."""

    messages: int
    reader: Any


class Translation(NamedTuple):
    """A body's messages as those of a chat, in a protocol that translates them. `states` are the translator's."""

    messages: Sequence[msgspec.Raw]
    states: Sequence[State]


Places = tuple["array[int]", "array[int]"]


class KnownBody:
    """A checked body: where its messages are, and what was computed on the way.

    `name` is that of their field, `front` are the fields before it, `fields` all others, in the client's order. The
    body's head has `count` messages, of which the first is head[start:first_end]. `values` is an upper bound of its
    values by `scan.count_values`. `continued` is the body that it begins with, if all of that one's messages are in it.
    `translation` is set where the protocol translates messages; `others` is what it has made of the other fields.

    Once its turn is committed (`keep`): `protocol`, `turn`, the hash state `prefix_hasher` of the turn's chat messages
    (`RequestHistory.prefix_hash`), and `text`, that of the turn's tokens if it is kept.
    """

    __slots__ = (
        *("_places", "continued", "count", "fields", "first_end", "front", "head", "name", "others"),
        *("prefix_hasher", "protocol", "start", "tail", "text", "translation", "turn", "values"),
    )

    def __init__(
        self,
        body: bytes,
        name: str,
        front: Mapping[str, msgspec.Raw],
        fields: Mapping[str, msgspec.Raw],
        start: int,
        first_end: int,
        end: int,
        count: int,
        values: int,
        continued: KnownBody | None = None,
        places: Places | None = None,
    ) -> None:
        whole = memoryview(body)
        self.head, self.tail = whole[:end], whole[end:]
        self._places = places
        self.name, self.front, self.fields = name, front, fields
        self.start, self.first_end, self.count = start, first_end, count
        self.values = values
        self.continued = continued
        self.translation: Translation | None = None
        self.others: Any = None
        self.protocol, self.turn = "", 0
        self.prefix_hasher: Hasher | None = None
        self.text: KnownText | None = None

    def keep(self, protocol: str, turn: int, prefix_hasher: Hasher, text: KnownText | None = None) -> None:
        """The body's turn is committed."""
        self.continued = None
        self.protocol, self.turn, self.prefix_hasher, self.text = protocol, turn, prefix_hasher, text

    @property
    def size(self) -> int:
        """Approximate bytes in memory; messages that were translated have about as many as the head, and of the other
        fields there is a copy, and what was made of it."""
        copies = 1 if self.translation is None else 2
        size = copies * len(self.head) + len(self.tail) + 2 * (self.start + len(self.tail)) + 16 * self.count
        return size if self.text is None else size + len(self.text)

    @property
    def has_places(self) -> bool:
        return self._places is not None

    @property
    def places(self) -> Places:
        """The starts and ends of the messages. A body that goes on from all of them does not need any, so they are
        looked for when they are first asked for."""
        if self._places is None:
            items = split.ITEMS.decode(b"[" + self.head[self.start :] + b"]")
            self._places = _places_of(self.head, self.start, items)
        return self._places


class HistoryPrefix(NamedTuple):
    """A request begins with the first `messages` chat messages of turn `turn`'s request, byte for byte.
    `prefix_hasher` is the hash state of these, if they are all of them (`RequestHistory.prefix_hash`)."""

    turn: int
    messages: int
    prefix_hasher: Hasher | None


class KnownMessages(Sequence[msgspec.Raw]):
    """A request's messages: the first `shared` of a known body, in its bytes, and new ones."""

    __slots__ = ("_known", "new", "shared")

    def __init__(self, known: KnownBody, shared: int, new: Sequence[msgspec.Raw]) -> None:
        self._known = known
        self.shared = shared
        self.new = new

    def __len__(self) -> int:
        return self.shared + len(self.new)

    @overload
    def __getitem__(self, index: int) -> msgspec.Raw: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[msgspec.Raw]: ...
    def __getitem__(self, index: int | slice) -> msgspec.Raw | Sequence[msgspec.Raw]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shared + len(self.new))
            if start >= self.shared and step == 1:
                return self.new[start - self.shared : max(stop - self.shared, 0)]
            return [self[place] for place in range(start, stop, step)]
        if index >= self.shared:
            return self.new[index - self.shared]
        place = range(len(self))[index]
        if place >= self.shared:
            return self.new[place - self.shared]
        starts, ends = self._known.places
        return msgspec.Raw(self._known.head[starts[place] : ends[place]])

    def __iter__(self) -> Iterator[msgspec.Raw]:
        return (self[place] for place in range(len(self)))


class ContinuedBody(NamedTuple):
    """A body whose messages begin with the first `shared` of `known`, byte for byte: its `fields` without the messages,
    in the client's order, its `messages`, and its own `layout`. `end` is where the common ones end in it."""

    known: KnownBody
    shared: int
    end: int
    fields: Mapping[str, msgspec.Raw]
    messages: KnownMessages
    layout: KnownBody

    @property
    def others(self) -> Any:
        """`known.others`, if the other fields are the same."""
        return self.known.others if self.fields is self.known.fields else None

    def state(self, states: Sequence[State]) -> State | None:
        """The last of the known body's states that holds for this one, too."""
        return next((state for state in reversed(states) if state.messages <= self.shared), None)

    @property
    def is_translated_anew(self) -> bool:
        """Must all of its messages be translated again? No state is known that early in them."""
        translation = self.known.translation
        return translation is not None and self.state(translation.states) is None

    def history(self) -> HistoryPrefix:
        """What is known of its history, if its messages are a chat's."""
        known, shared = self.known, self.shared
        return HistoryPrefix(known.turn, shared, known.prefix_hasher if shared == known.count else None)

    def translated(self, messages: Sequence[msgspec.Raw]) -> HistoryPrefix | None:
        """What is known of its history, if its messages were translated into these."""
        known = self.known
        assert known.translation is not None
        pairs = zip(messages, known.translation.messages, strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs))
        is_whole = count == len(known.translation.messages)
        return HistoryPrefix(known.turn, count, known.prefix_hasher if is_whole else None) if count else None


class KnownBodies:
    """The kept bodies of a session, the newest last; `size` are their bytes together."""

    __slots__ = ("_bodies", "size")

    def __init__(self) -> None:
        self._bodies: list[KnownBody] = []
        self.size = 0

    def __contains__(self, known: object) -> bool:
        return any(kept is known for kept in self._bodies)

    def continued(self, body: bytes, protocol: str) -> ContinuedBody | None:
        """The body, if it begins with messages of a kept one of its protocol, as many as possible, and the event loop
        may read what follows. None also for one that must be split as a whole, since it may be invalid."""
        longest: KnownBody | None = None
        candidates: list[KnownBody] = []
        end = 0
        for known in reversed(self._bodies):
            if known.protocol != protocol:
                continue
            if known.has_places or not body.startswith(known.head):
                candidates.append(known)
            elif len(known.head) > end:
                longest, end = known, len(known.head)
        count = 0 if longest is None else longest.count
        for known in candidates:
            equal = _equal_messages(known, body) if body.startswith(known.head[: end + 1]) else 0
            if equal and known.places[1][equal - 1] > end:
                longest, count, end = known, equal, known.places[1][equal - 1]
        if longest is not None:
            return _split(body, longest, count, end, longest.front, 0)
        behind = [split for known in candidates if (split := _behind_another_front(known, body))]
        return _split(body, *max(behind, key=lambda split: split[2])) if behind else None

    def text_of(self, tokens: KnownTokens) -> KnownText | None:
        """The text of these tokens, if it is kept."""
        for known in reversed(self._bodies):
            if known.text is not None and known.text.known == tokens:
                return known.text
        return None

    def add(self, known: KnownBody, continued: KnownBody | None, parent: int) -> None:
        """Keep a committed turn's body instead of the one that it continues, and instead of its parent's: a client that
        moves its cache marks sends other bytes for the same messages."""
        self._bodies = [body for body in self._bodies if body is not continued and body.turn != parent]
        self._bodies.append(known)
        self.size = sum(body.size for body in self._bodies)
        while len(self._bodies) > MOST_HEADS or (len(self._bodies) > 1 and self.size > MOST_BYTES):
            self.size -= self._bodies.pop(0).size


def layout_of(body: bytes, name: str, raw: msgspec.Raw, items: Sequence[msgspec.Raw]) -> KnownBody | None:
    """The layout of a checked body with this list of messages, if it may be kept. `name` is the list's."""
    if len(body) > MOST_HEAD:
        return None
    at = split.offset_in(body, raw)
    if not 0 < at < len(body):  # The body was split in parts, which are copies.
        raw = split.FIELDS.decode(body)[name]
        at = split.offset_in(body, raw)
    start = _end(_WHITE, body, at + 1)
    end = at + len(bytes(raw)[:-1].rstrip(split.WHITE))
    if (values := scan.count_values(memoryview(body)[:end])) > MOST_VALUES:
        return None
    front = split.FIELDS.decode(body[:at] + b"0}")
    later = split.FIELDS.decode(_opening(name) + body[end:])
    del front[name], later[name]
    first_end = start + len(memoryview(items[0]))
    return KnownBody(body, name, front, {**front, **later}, start, first_end, end, len(items), values)


def _opening(name: str) -> bytes:
    """Before the rest of a body's messages it is an object of these and of the later fields."""
    return b'{"%b":[' % name.encode()


def _split(
    body: bytes,
    known: KnownBody,
    count: int,
    end: int,
    front: Mapping[str, msgspec.Raw],
    shift: int,
    *,
    leaves_tail: bool = True,
) -> ContinuedBody | None:
    """The body's fields and messages; None if it must be split as a whole. Its first `count` messages are those of
    `known`, `shift` bytes behind theirs, up to `end`; `front` are the fields before them.

    The rest of a body, with the messages' list opened anew, is a JSON object of its new messages and later fields. If a
    later field has the name of that list again, the list that is found is not the one that was opened. A known tail is
    left out of it (`leaves_tail`) if what its fields say is known too, and the list and the object closed in its place.
    """
    until = len(body) - len(known.tail)
    has_known_fields = leaves_tail and known.others is not None and front is known.front and until >= end
    has_known_fields = has_known_fields and body.endswith(known.tail)
    if not has_known_fields:
        until = len(body)
    if until - end > MOST_REST:
        return None
    behind = body[end:until]
    values = added = scan.count_values(behind)
    if front is not known.front:
        values += scan.count_values(memoryview(body)[: known.start + shift])
    if values > MOST_REST_VALUES or values + known.values > MOST_VALUES:
        return None
    rest = behind.lstrip(split.WHITE)
    at = until - len(rest)
    if has_known_fields:
        rest += b"]}"
    has_more = rest.startswith(b",")
    if not has_more and not rest.startswith(b"]"):
        return None
    opening = _opening(known.name)
    text = opening + (rest[1:] if has_more else rest)
    try:
        if not text.isascii():
            text.decode()
        later = split.FIELDS.decode(text)
        raw = later.pop(known.name)
        new = split.ITEMS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if has_known_fields and later:  # It ends like the known one, but behind other fields.
        return _split(body, known, count, end, front, shift, leaves_tail=False)
    fields = known.fields if has_known_fields else {**front, **later}
    if split.offset_in(text, raw) != len(opening) - 1:
        return None
    if bool(new) != has_more or len(fields) >= bounds.MAX_FIELDS:
        return None
    if count + len(new) > bounds.MAX_MESSAGES:
        return None
    # Where the new messages begin and end in the body.
    at += has_more
    stop = at + len(bytes(raw)[1:-1].rstrip(split.WHITE)) if new else end
    is_whole = count == known.count
    places: Places | None = None
    if not is_whole or shift or known.has_places:
        places = _extended(known, count, shift, _places_of(body, at, new))
    values = known.values + (added if has_known_fields else scan.count_values(memoryview(body)[end:stop]))
    start, first_end = known.start + shift, known.first_end + shift
    if front is not known.front:
        values += scan.count_values(memoryview(body)[:start])
    total, continued = count + len(new), known if is_whole else None
    own = KnownBody(body, known.name, front, fields, start, first_end, stop, total, values, continued, places)
    return ContinuedBody(known, count, end, fields, KnownMessages(known, count, new), own)


def _extended(known: KnownBody, count: int, shift: int, new: Places) -> Places:
    """The places of the first `count` messages of `known`, moved by `shift`, and those of new ones."""
    starts, ends = (places[:count] for places in known.places)
    if shift:
        starts, ends = (array("Q", (place + shift for place in places)) for places in (starts, ends))
    return starts + new[0], ends + new[1]


def _places_of(text: bytes | memoryview, at: int, items: Sequence[msgspec.Raw]) -> Places:
    """The starts and ends in `text` of a list's items, the first of which begins at `at`, or behind white space."""
    starts, ends = array("Q"), array("Q")
    at = _end(_WHITE, text, at)
    for item in items:
        starts.append(at)
        end = at + len(memoryview(item))
        ends.append(end)
        at = end + 1 if text[end : end + 2] == b",{" else _end(_BETWEEN, text, end)
    return starts, ends


def _end(pattern: re.Pattern[bytes], text: bytes | memoryview, at: int) -> int:
    matched = pattern.match(text, at)
    return at if matched is None else matched.end()


def _behind_another_front(
    known: KnownBody, body: bytes
) -> tuple[KnownBody, int, int, Mapping[str, msgspec.Raw], int] | None:
    """What the body shares with a kept one if the fields before its messages are others, as `_split` takes it."""
    start = known.start
    at = body.find(bytes(known.head[start : min(start + SEARCHED, known.first_end)]), 0, MOST_FRONT)
    front = None if at < 0 else _front(body[:at], known.name)
    count = 0 if front is None else _equal_messages(known, body, start, at - start)
    if front is None or not count:
        return None
    end = len(known.head) if count == known.count else known.places[1][count - 1]
    return known, count, end + at - start, front, at - start


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
    head = known.head
    if known.has_places and known.count > STATES:
        # A client that has moved its marks moves them again: then these messages are compared once.
        ends, equal = known.places[1], known.count - STATES
        if body.startswith(head[begin : ends[equal - 1]], begin + shift):
            while equal < known.count and body.startswith(head[ends[equal - 1] : ends[equal]], ends[equal - 1] + shift):
                equal += 1
            return equal
    if body.startswith(head[begin:], begin + shift):
        return known.count
    if not body.startswith(head[begin : known.first_end], begin + shift):
        return 0
    ends = known.places[1]
    low, high = 1, known.count - 1  # at least `low` messages are equal, at most `high`
    while low < high:
        middle = (low + high + 1) // 2
        if body.startswith(head[ends[low - 1] : ends[middle - 1]], ends[low - 1] + shift):
            low = middle
        else:
            high = middle - 1
    return low
