"""Bounds on a request: its head, its body and the time that takes; and on all bodies that are in memory together."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from starlette.types import Receive, Scope

from app.errors import (
    AppError,
    BodyGivenUp,
    HeadersTooLarge,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    TargetTooLong,
)
from app.upstream.headers import Headers

MAX_HEADER_BYTES = 64 << 10
"""Names and values of all headers together."""

MAX_TARGET_BYTES = 16 << 10
"""Path and query, as they were sent."""

MAX_PARAMETERS = 256
"""Of a query."""

IDLE_S, IDLE_BYTES = 30.0, 30 << 10
"""Each so many bytes of a body may take so long: a KiB a second."""

BODY_S = 600.0
"""How long all of a body may take."""

SMALL = 64 << 10
"""The shares below refuse no body that has up to so many bytes, so that large bodies do not keep small ones out."""

SESSION_SHARE, PEER_SHARE = 4, 2
"""All bytes divided by these: what one session's requests may hold, until they are answered; and what one address's
requests may hold, until their bodies are whole. An address has the larger share, and only for unfinished bodies, since
all harnesses may have the same one."""

HELD_S = 5.0
"""A body that has been arriving for longer is given up where another request needs its room. Without this, bodies whose
ends are held back would keep out everybody at their address. Large uploads that begin together are spared."""

PEER = "peer"
"""In a scope's state: who is at the other end of the connection, whatever a header says (`http.protocol`)."""


class BodyReservation:
    """What one request holds of the bytes in flight, until the `with` block ends.

    `session` and `peer` are whose request it is, if known. `size` is all that it holds, `body_size` its own body, and
    `arriving` that body until it is whole.
    """

    def __init__(self, memory: RequestMemory, session: str | None, peer: str | None) -> None:
        self._memory = memory
        self.session = session
        self.peer = peer
        self.size = 0
        self.body_size = 0
        self.arriving = 0
        self.since = 0.0
        self._is_given_up = False
        self._end: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def begin(self, end: Callable[[], None]) -> None:
        """Its body arrives from now on; `end` stops whoever reads it."""
        memory = self._memory
        self._end = end
        self.since = memory.clock()
        memory.arriving[self] = None

    def grow(self, size: int) -> None:
        """Hold memory for something other than the request's body. Raises Overloaded."""
        memory = self._memory
        missing = memory.size + size - memory.limit
        if missing > 0 and not memory.make_room(self, missing, memory.arriving):
            raise Overloaded(f"bodies of {memory.size} bytes are in flight; the limit is {memory.limit}")
        memory.size += size
        self.size += size

    def arrive(self, size: int) -> None:
        """So much more of its body has come.

        Raises BodyGivenUp; Overloaded where all is taken, or the session's or the peer's share.
        """
        self.check()
        memory = self._memory
        if self.body_size + size > SMALL:
            memory.check_shares(self, size)
        self.grow(size)
        self.body_size += size
        self.arriving += size
        if self.session is not None:
            memory.sessions[self.session] += size
        if self.peer is not None:
            memory.peers[self.peer] += size

    def arrived(self) -> None:
        """Nobody reads its body any more."""
        self._memory.arriving.pop(self, None)
        if self.arriving:
            _take_off(self._memory.peers, self.peer, self.arriving)
            self.arriving = 0

    def check(self) -> None:
        """Raises BodyGivenUp."""
        if self._is_given_up:
            raise BodyGivenUp(f"the body did not come in {HELD_S:g} s, and others needed its room")

    def give_up(self) -> None:
        """Stop reading the body, which leaves its room to others."""
        self._release()
        self._is_given_up = True
        if self._end is not None:
            self._end()

    def _release(self) -> None:
        self.arrived()
        _take_off(self._memory.sessions, self.session, self.body_size)
        self._memory.size -= self.size
        self.size = self.body_size = 0


class RequestMemory:
    """Bytes of all bodies in flight in this process, at most `limit`; also by session, and by peer while they arrive.

    Any session may have one request of `largest` bytes, however small its share is. `clock` counts seconds. `arriving`
    are the bodies that have begun and are not whole, the oldest first.
    """

    def __init__(self, limit: int, largest: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.clock = clock
        self.size = 0
        self.sessions: Counter[str] = Counter()
        self.peers: Counter[str] = Counter()
        self.arriving: dict[BodyReservation, None] = {}
        self._session_limit = max(limit // SESSION_SHARE, min(limit, largest))
        self._peer_limit = max(limit // PEER_SHARE, min(limit, largest))

    def room(self, session: str | None = None, peer: str | None = None) -> BodyReservation:
        return BodyReservation(self, session, peer)

    def check_shares(self, room: BodyReservation, size: int) -> None:
        """Raises Overloaded where `size` more bytes of its body are past the session's or the peer's share."""
        of_session = 0 if room.session is None else self.sessions[room.session] + size
        if of_session > self._session_limit:
            raise Overloaded(f"the session's requests hold its share of {self._session_limit} bytes in flight")
        missing = 0 if room.peer is None else self.peers[room.peer] + size - self._peer_limit
        if missing > 0 and not self.make_room(room, missing, (one for one in self.arriving if one.peer == room.peer)):
            raise Overloaded(f"bodies of this address that have not ended hold its {self._peer_limit} bytes")

    def make_room(self, asking: BodyReservation, missing: int, arriving: Iterable[BodyReservation]) -> bool:
        """Give up bodies held for longer than HELD_S, the oldest first; none of them if all are not enough.

        Those that began after the one that asks are spared, or two slow ones would give each other up in turns. Those
        that are not SMALL go first.
        """
        latest = self.clock() - HELD_S
        older = itertools.takewhile(lambda room: room is not asking and room.since < latest, arriving)
        chosen = []
        for room in sorted((room for room in older if room.arriving), key=lambda room: room.arriving <= SMALL):
            chosen.append(room)
            missing -= room.arriving
            if missing <= 0:
                break
        else:
            return False
        for room in chosen:
            room.give_up()
        return True


def _take_off(counter: Counter[str], name: str | None, size: int) -> None:
    """Whoever holds nothing any more is forgotten."""
    if name is None or not size:
        return
    left = counter[name] - size
    if left > 0:
        counter[name] = left
    else:
        del counter[name]


def peer_of(scope: Scope) -> str | None:
    """The address at the other end of the connection."""
    peer = (scope.get("state") or {}).get(PEER) or scope["client"]
    return None if peer is None else str(peer[0])


def head_error(scope: Scope, header_bytes: int) -> AppError | None:
    """What of a request's head is too large."""
    if header_bytes > MAX_HEADER_BYTES:
        return HeadersTooLarge(f"the headers have {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    query: bytes = scope["query_string"]
    size = len(scope.get("raw_path") or scope["path"].encode()) + len(query)
    if size > MAX_TARGET_BYTES:
        return TargetTooLong(f"path and query have {size} bytes; the limit is {MAX_TARGET_BYTES}")
    if query.count(b"&") >= MAX_PARAMETERS:
        return InvalidRequest(f"the query has more than {MAX_PARAMETERS} parameters")
    return None


async def read_body(receive: Receive, headers: Headers, limit: int, room: BodyReservation) -> bytes | None:
    """A whole request body; None if the client went away before it was whole.

    Raises RequestTooLarge, Overloaded, BodyGivenUp, InvalidRequest (a compressed body), RequestTimeout.
    """
    for name, value in headers:
        if name == "content-encoding" and value.lower() != "identity":
            raise InvalidRequest("a compressed request body is not accepted")
        if name == "content-length" and value.isdigit() and int(value) > limit:
            raise RequestTooLarge(f"the body has {value} bytes; the limit is {limit}")
    try:
        async with asyncio.timeout(min(IDLE_S, BODY_S)) as patience:
            room.begin(lambda: _end(patience))
            return await _read(receive, limit, room, patience)
    except TimeoutError as error:
        room.check()
        raise RequestTimeout(
            f"less than {IDLE_BYTES} bytes of the body came in {IDLE_S:g} s, or all of it did not come in {BODY_S:g} s"
        ) from error
    finally:
        room.arrived()


def _end(patience: asyncio.Timeout) -> None:
    if not patience.expired():
        patience.reschedule(asyncio.get_running_loop().time())


async def _read(receive: Receive, limit: int, room: BodyReservation, patience: asyncio.Timeout) -> bytes | None:
    parts: list[bytes] = []
    size = paid = 0
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_S
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestTooLarge(f"the body has more than {limit} bytes")
        room.arrive(len(part))
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        if size - paid >= IDLE_BYTES:
            paid = size
            patience.reschedule(min(clock() + IDLE_S, deadline))
