"""Bounds on a request: its head, its body and the time that takes; and on all bodies that are in memory together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

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
    """What one request holds of the bytes that may be in flight. `session` and `peer` are whose it is, if known."""

    def __init__(self, inflight: RequestMemory, session: str | None, peer: str | None) -> None:
        self._inflight = inflight
        self.session = session
        self.peer = peer
        self.size = 0
        self.body_size = 0
        self.arriving = 0
        self.since = 0.0
        self._is_given_up = False
        self._end: Callable[[], None] | None = None

    def begin(self, end: Callable[[], None]) -> None:
        """Its body arrives from now on; `end` stops whoever reads it."""
        self._end = end
        self._inflight.began(self)

    def grow(self, size: int) -> None:
        """For what is not the request's own body. Raises Overloaded."""
        self._inflight.take(self, size)

    def arrive(self, size: int) -> None:
        """So much more of its body has come. Raises Overloaded, BodyGivenUp."""
        self.check()
        self._inflight.take_body(self, size)

    def arrived(self) -> None:
        """Nobody reads its body any more."""
        self._inflight.whole(self)

    def check(self) -> None:
        """Raises BodyGivenUp."""
        if self._is_given_up:
            raise BodyGivenUp(f"the body did not come in {HELD_S:g} s, and others needed its room")

    def give_up(self) -> None:
        self._is_given_up = True
        if self._end is not None:
            self._end()


class RequestMemory:
    """Bytes of all bodies in flight in this process, at most `limit`.

    Any session may have one request of `largest` bytes, however small its share is. `clock` counts seconds.
    """

    def __init__(self, limit: int, largest: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._session_limit = max(limit // SESSION_SHARE, min(limit, largest))
        self._peer_limit = max(limit // PEER_SHARE, min(limit, largest))
        self._clock = clock
        self._sessions: Counter[str] = Counter()
        self._peers: Counter[str] = Counter()
        self._arriving: dict[BodyReservation, None] = {}  # the oldest first
        self.size = 0

    @contextlib.contextmanager
    def room(self, session: str | None = None, peer: str | None = None) -> Iterator[BodyReservation]:
        room = BodyReservation(self, session, peer)
        try:
            yield room
        finally:
            self.whole(room)
            self._release_body(room)
            self.size -= room.size

    def began(self, room: BodyReservation) -> None:
        room.since = self._clock()
        self._arriving[room] = None

    def take(self, room: BodyReservation, size: int) -> None:
        missing = self.size + size - self._limit
        if missing > 0 and not self._make_room(room, missing, self._arriving):
            raise Overloaded(f"bodies of {self.size} bytes are in flight; the limit is {self._limit}")
        self.size += size
        room.size += size

    def take_body(self, room: BodyReservation, size: int) -> None:
        """Raises Overloaded where all is taken, or the session's or the peer's share."""
        if room.body_size + size > SMALL:
            self._check_shares(room, size)
        self.take(room, size)
        room.body_size += size
        room.arriving += size
        if room.session is not None:
            self._sessions[room.session] += size
        if room.peer is not None:
            self._peers[room.peer] += size

    def _check_shares(self, room: BodyReservation, size: int) -> None:
        of_session = 0 if room.session is None else self._sessions[room.session] + size
        if of_session > self._session_limit:
            raise Overloaded(f"the session's requests hold its share of {self._session_limit} bytes in flight")
        missing = 0 if room.peer is None else self._peers[room.peer] + size - self._peer_limit
        if missing > 0 and not self._make_room(room, missing, (one for one in self._arriving if one.peer == room.peer)):
            raise Overloaded(f"bodies of this address that have not ended hold its {self._peer_limit} bytes")

    def _make_room(self, asking: BodyReservation, missing: int, arriving: Iterable[BodyReservation]) -> bool:
        """Give up bodies held for longer than HELD_S, the oldest first; none of them if all are not enough.

        Those that began after the one that asks are spared, or two slow ones would give each other up in turns. Those
        that are not SMALL go first.
        """
        latest = self._clock() - HELD_S
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
            self.whole(room)
            self._release_body(room)
            room.give_up()
        return True

    def whole(self, room: BodyReservation) -> None:
        self._arriving.pop(room, None)
        _less(self._peers, room.peer, room.arriving)
        room.arriving = 0

    def _release_body(self, room: BodyReservation) -> None:
        _less(self._sessions, room.session, room.body_size)
        self.size -= room.body_size
        room.size -= room.body_size
        room.body_size = 0


def _less(counter: Counter[str], name: str | None, size: int) -> None:
    """Whoever holds nothing any more is forgotten."""
    if name is None or not size:
        return
    counter[name] -= size
    if counter[name] <= 0:
        del counter[name]


def peer_of(scope: Scope) -> str | None:
    """The address at the other end of the connection."""
    peer = (scope.get("state") or {}).get(PEER) or scope["client"]
    return None if peer is None else str(peer[0])


def beyond(scope: Scope, header_bytes: int) -> AppError | None:
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
