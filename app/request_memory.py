"""The memory that the bodies of all requests in a process may take, and who gets it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Self

from app.errors import BodyGivenUp, Overloaded
from app.process import LARGE

SMALL = 64 << 10
"""Bytes up to which no body is refused for the shares below, so that large bodies do not keep small ones out."""

SESSION_SHARE, PEER_SHARE = 4, 2
"""The memory limit divided by these is a session's share, for requests that are not answered yet, and an address's
share, for bodies that are not complete yet. All harnesses may have the same address, so its share is larger and only
for incomplete bodies."""

BODY_TIMEOUT_S = 5.0
"""A body that has been arriving for longer is given up if another request needs its memory. Otherwise incomplete bodies
could block all requests of their address. Large uploads that begin together are not given up for each other."""


class BodyReservation:
    """The memory of one request, until `release` or the end of the `with` block.

    `session` and `peer` are the request's, if known. `size` is the sum of all bytes, `body_size` those of its body, and
    `arriving` the same while the body is incomplete.
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
        self.release()

    def begin(self, end: Callable[[], None]) -> None:
        """The body arrives from now on; `end` stops reading it."""
        memory = self._memory
        self._end = end
        self.since = memory.clock()
        memory.arriving[self] = None

    def grow(self, size: int) -> None:
        """Reserve `size` more bytes, for something other than the request's body. Raises Overloaded."""
        memory = self._memory
        missing = memory.size + size - memory.limit
        if missing > 0 and not memory.free_memory(self, missing, memory.arriving):
            raise Overloaded(f"bodies of {memory.size} bytes are in flight; the limit is {memory.limit}")
        memory.size += size
        self.size += size

    def give_back(self, size: int) -> None:
        """Free `size` of the bytes that `grow` reserved."""
        self._memory.size -= size
        self.size -= size

    def hold(self, size: int) -> None:
        """Reserve the bytes of a body that has come whole. Raises Overloaded."""
        memory = self._memory
        if size > SMALL:
            memory.check_shares(self, size)
        if memory.size + size > memory.limit:
            self.grow(size)
        else:
            memory.size += size
            self.size += size
        self.body_size = size
        if self.session is not None:
            memory.sessions[self.session] = memory.sessions.get(self.session, 0) + size

    def arrive(self, size: int) -> None:
        """Reserve `size` more bytes of a body that is still arriving.

        Raises BodyGivenUp; Overloaded if the limit, the session's share or the peer's share is reached.
        """
        self.check()
        memory = self._memory
        if self.body_size + size > SMALL:
            memory.check_shares(self, size)
        self.grow(size)
        self.body_size += size
        self.arriving += size
        if self.session is not None:
            memory.sessions[self.session] = memory.sessions.get(self.session, 0) + size
        if self.peer is not None:
            memory.peers[self.peer] = memory.peers.get(self.peer, 0) + size

    def arrived(self) -> None:
        """The body is complete, or reading it has ended."""
        self._memory.arriving.pop(self, None)
        if self.arriving:
            _subtract(self._memory.peers, self.peer, self.arriving)
            self.arriving = 0

    def check(self) -> None:
        """Raises BodyGivenUp after `give_up`."""
        if self._is_given_up:
            raise BodyGivenUp(
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s, and other requests needed its memory"
            )

    def give_up(self) -> None:
        """Stop reading the body and free its memory."""
        self.release()
        self._is_given_up = True
        if self._end is not None:
            self._end()

    def release(self) -> None:
        """Free all that is reserved."""
        memory = self._memory
        if self.arriving or self._end is not None:
            self.arrived()
        if self.session is not None and self.body_size:
            left = memory.sessions[self.session] - self.body_size
            if left > 0:
                memory.sessions[self.session] = left
            else:
                del memory.sessions[self.session]
        memory.size -= self.size
        if self.size > LARGE:
            memory.released()
        self.size = self.body_size = 0


class RequestMemory:
    """Bytes of all bodies in this process, at most `limit`; also by session, and by peer for incomplete bodies.

    A session and a peer may always have one request of `largest` bytes. `clock` returns seconds. `arriving` holds the
    incomplete bodies, the oldest first. `released` is called when a request with LARGE bodies has ended.
    """

    def __init__(
        self,
        limit: int,
        largest: int = 0,
        clock: Callable[[], float] = time.monotonic,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self.released = released
        self.clock = clock
        self.size = 0
        self.sessions: dict[str, int] = {}
        self.peers: dict[str, int] = {}
        self.arriving: dict[BodyReservation, None] = {}
        self._session_limit = max(limit // SESSION_SHARE, min(limit, largest))
        self._peer_limit = max(limit // PEER_SHARE, min(limit, largest))

    def reserve(self, session: str | None = None, peer: str | None = None) -> BodyReservation:
        return BodyReservation(self, session, peer)

    def check_shares(self, reservation: BodyReservation, size: int) -> None:
        """Raises Overloaded if `size` more bytes of a body exceed the session's or the peer's share."""
        of_session = 0 if reservation.session is None else self.sessions.get(reservation.session, 0) + size
        if of_session > self._session_limit:
            raise Overloaded(f"the session's requests hold its share of {self._session_limit} bytes in flight")
        missing = 0 if reservation.peer is None else self.peers.get(reservation.peer, 0) + size - self._peer_limit
        same_peer = (other for other in self.arriving if other.peer == reservation.peer)
        if missing > 0 and not self.free_memory(reservation, missing, same_peer):
            raise Overloaded(f"incomplete bodies from this address hold its share of {self._peer_limit} bytes")

    def free_memory(self, requester: BodyReservation, missing: int, arriving: Iterable[BodyReservation]) -> bool:
        """Give up bodies that have been arriving for BODY_TIMEOUT_S. If that is not enough: False, none given up.

        Large bodies go before those up to SMALL, the oldest first. Bodies that began after the requester's are
        skipped: otherwise two slow requests would give each other up in turns.
        """
        latest = self.clock() - BODY_TIMEOUT_S
        older = itertools.takewhile(lambda other: other is not requester and other.since < latest, arriving)
        chosen = []
        for other in sorted((other for other in older if other.arriving), key=lambda other: other.arriving <= SMALL):
            chosen.append(other)
            missing -= other.arriving
            if missing <= 0:
                break
        else:
            return False
        for other in chosen:
            other.give_up()
        return True


def _subtract(counter: dict[str, int], name: str | None, size: int) -> None:
    """Subtract `size` from a count; a count of 0 is removed."""
    if name is None or not size:
        return
    left = counter[name] - size
    if left > 0:
        counter[name] = left
    else:
        del counter[name]
