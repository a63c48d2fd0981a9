"""Long replies of one JSON object per line, and how to resume one that breaks off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from turnlog.errors import NotTurnlog

Object = dict[str, Any]

LARGEST = 4 << 30
"""Bytes of a reply, or of a line of one, that are held in memory."""

UNPACKED = {"accept-encoding": "identity"}
"""A reply is read as it was sent: a few KiB of zstd or gzip can unpack to gigabytes in one piece, before a limit sees
them."""


def require_unpacked(headers: Mapping[str, str]) -> None:
    """Raises NotTurnlog for a reply that is compressed although UNPACKED was sent."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise NotTurnlog(f"a reply with content-encoding {encoding:.64}, which the client did not ask for")


def present(given: Mapping[str, Any]) -> Object:
    """Without parameters that are None: the server's defaults apply."""
    return {name: value for name, value in given.items() if value is not None}


class Place:
    """How far a stream of lines has been read. `left`: so many more were asked for."""

    def __init__(self, *, is_open_ended: bool = False, left: int | None = None) -> None:
        self.is_open_ended = is_open_ended
        """Is a reply expected to pause for long?"""
        self.has_begun = False
        """Has the server answered?"""
        self._left = left

    def parameters(self) -> Mapping[str, Any]:
        """The parameters that ask for what has not been read yet."""
        raise NotImplementedError

    def begin(self, headers: Mapping[str, str]) -> None:
        """A reply has begun."""
        self.has_begun = True

    def read(self, line: Object) -> None:
        """The line is about to be returned to the caller. Raises NotTurnlog for one that has no place."""
        raise NotImplementedError

    @property
    def has_all(self) -> bool:
        """Has everything that was asked for been read, however the reply ended?"""
        return self._left == 0

    @property
    def is_done(self) -> bool:
        """Is the stream complete, if the reply ended normally? That of a follower was ended by a server that stops."""
        return self.has_all or not self.is_open_ended


class Lines:
    """Splits a reply's bytes into objects.

    Only line feeds separate them: a JSON string may contain other line separators (U+2028, U+0085).
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[Object]:
        """The objects that are complete so far. Raises NotTurnlog, also for a line of more than LARGEST bytes."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join((*self._rest, whole[0]))
            self._rest.clear()
            self._size = 0
        if rest:
            self._size += len(rest)
            if self._size > LARGEST:
                raise NotTurnlog(f"a line of more than {LARGEST} bytes: ask for less per row")
            self._rest.append(rest)
        for line in whole:
            if line:
                yield decode(line)


def decode(content: bytes) -> Object:
    """A JSON object. Raises NotTurnlog."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise NotTurnlog("a reply that is not JSON: is this Turnlog's address?") from error
    if not isinstance(found, dict):
        raise NotTurnlog("a reply that is not a JSON object: is this Turnlog's address?")
    return found


class EventsPlace(Place):
    """A session's log after the event `after`. A followed one ends when the session is erased."""

    def __init__(self, after: int, follow: bool) -> None:
        super().__init__(is_open_ended=follow)
        self.after = after

    def __str__(self) -> str:
        return f"after event {self.after}"

    def parameters(self) -> Mapping[str, Any]:
        return {"after": self.after, "follow": "true" if self.is_open_ended else "false"}

    def read(self, line: Object) -> None:
        match line:
            case {"seq": int(seq), "type": str(kind)}:
                self.after = seq
                if kind == "SessionErased":
                    self._left = 0  # nothing follows
            case _:
                raise NotTurnlog("a line that is not an event: is this Turnlog's address?")


class AllEventsPlace(Place):
    """The log of all sessions after a position. `position` is None until the server has given one."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)
        follow, left = bool(self._parameters.pop("follow", False)), self._parameters.pop("limit", None)
        super().__init__(is_open_ended=follow, left=left)
        self._after: str | None = self._parameters.pop("after", None)
        self.position = None if self._after == "end" else self._after

    def __str__(self) -> str:
        return "after the last event"

    def parameters(self) -> Mapping[str, Any]:
        after = self.position or self._after
        follow = "true" if self.is_open_ended else None
        return present({**self._parameters, "after": after, "limit": self._left, "follow": follow})

    def read(self, line: Object) -> None:
        match line:
            case {"position": str(position)}:
                self.position = position
            case _:
                raise NotTurnlog("a line without a position: is this Turnlog's address?")
        if self._left is not None and is_event(line):
            self._left -= 1


def is_event(line: Object) -> bool:
    """Of the log of all sessions: is it an event, not a position alone?"""
    return "session_id" in line


class ExportPlace(Place):
    """An export, in which each row has the cursor after it."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)
        super().__init__(left=self._parameters.pop("limit", None))
        self.cursor: str | None = self._parameters.pop("cursor", None)
        self.next_cursor: str | None = None

    def parameters(self) -> Mapping[str, Any]:
        return present({**self._parameters, "cursor": self.cursor, "limit": self._left})

    def begin(self, headers: Mapping[str, str]) -> None:
        super().begin(headers)
        self.cursor = self.cursor or headers.get("x-turnlog-cursor")
        self.next_cursor = headers.get("x-turnlog-next-cursor")

    def read(self, line: Object) -> None:
        self.cursor = cursor_of(line)
        if self._left is not None:
            self._left -= 1


def cursor_of(row: Object) -> str:
    """The cursor after this row; trainers' shapes have their own place for it.

    Raises NotTurnlog.
    """
    metadata = row.get("metadata")
    places = (
        row,
        metadata.get("turnlog") if isinstance(metadata, dict) else None,
        row.get("extra_fields"),
        row.get("extra"),
    )
    for place in places:
        if isinstance(place, dict) and isinstance(found := place.get("cursor"), str):
            return found
    raise NotTurnlog("a row without a cursor")
