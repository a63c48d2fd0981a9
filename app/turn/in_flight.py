"""Turns in flight in this process, and how a client says that a request repeats one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from app.errors import ClientGone, IdempotencyMismatch
from app.upstream.headers import Headers

CutReason = Literal["session_closed", "disconnect"]


class RetryMark(msgspec.Struct, frozen=True):
    """How a client says that a request repeats one: a key (hashed), or the OpenAI SDKs' retry count."""

    key: str | None = None
    is_retry: bool = False

    def repeats(self, key: str | None, body_hash: str, own_body: str) -> bool:
        """Is the request with `own_body` the one with `key` and `body_hash` again? A key of its own decides alone.

        Raises IdempotencyMismatch where the key is that of another body.
        """
        if self.key is None:
            return self.is_retry and body_hash == own_body
        if self.key != key:
            return False
        if body_hash != own_body:
            raise IdempotencyMismatch("the idempotency key was used with another request body")
        return True


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class TurnReply(msgspec.Struct, frozen=True):
    """What goes back to the client: its body in parts, so that a large one need not be copied to be cut.

    `turn` is None for an engine's own error, which committed nothing. `replayed`: it was another request's turn, which
    was stored or, where this one `joined` it, still in flight. `is_aborted`: an engine ended its generation.
    `rolled_back` live turns were superseded by this one when it committed.
    """

    status: int
    headers: Headers
    parts: Sequence[bytes | memoryview]
    turn: int | None = None
    replayed: bool = False
    joined: bool = False
    is_aborted: bool = False
    rolled_back: int = 0


class InFlightTurn:
    """A turn in flight in this process; a marked retry joins it. `asked`: an engine may have heard of it.

    `fence` is its claim's; None while it waits for one.
    """

    def __init__(self, mark: RetryMark, body_hash: str) -> None:
        self.mark = mark
        self.body_hash = body_hash
        self.cut: CutReason | None = None
        self.is_held = False
        self.asked = False
        self.fence: int | None = None
        self._readers: list[Waiter] = []
        self._at_work: asyncio.Task[object] | None = None
        self.landing: asyncio.Future[TurnReply | None] = asyncio.get_running_loop().create_future()

    def land(self, reply: TurnReply | None) -> None:
        """The turn has ended, with `reply` if it committed. No cycle is left behind that would keep the reply."""
        if not self.landing.done():
            self.landing.set_result(reply)
        for reader in self._readers:
            reader.landed()
        self._readers = []

    def add(self, reader: Waiter) -> None:
        self._readers.append(reader)
        if self.is_held:
            reader.held()

    def drop(self, reader: Waiter) -> None:
        """Where nobody else waits for the turn, it is cut off."""
        self._readers.remove(reader)
        if not self._readers:
            self.cut_off("disconnect")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While no engine may be asked: a reader that goes away is let go at once, and with the last one the turn."""
        self.is_held = True
        for reader in tuple(self._readers):
            reader.held()
        try:
            yield
        finally:
            self.is_held = False

    def cut_off(self, reason: CutReason) -> None:
        """End the work on the prompt or the engine's; a turn that is past both is judged by its fence."""
        if self.cut is None:
            self.cut = reason
            if self._at_work is not None:
                self._at_work.cancel()

    @contextlib.contextmanager
    def may_be_cut(self) -> Iterator[None]:
        """Work that `cut_off` ends. Raises Cut."""
        if self.cut is not None:
            raise TurnCut
        self._at_work = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.cut is None or task is None:
                raise
            task.uncancel()
            raise TurnCut from None
        finally:
            self._at_work = None


def _unwatched(reader: Waiter) -> None:
    """For clients whose going is told without being looked for."""


class Waiter:
    """A client that waits for a turn, its own or one that it joined.

    `grow` makes room for what it will be sent. `watch` has somebody call `hang_up` once the client is gone: most turns
    outlive their clients, and then nobody needs to look. `token_session` is the session whose token it came with.
    """

    def __init__(
        self,
        grow: Callable[[int], None],
        watch: Callable[[Waiter], None] = _unwatched,
        token_session: str | None = None,
    ) -> None:
        self.grow = grow
        self.token_session = token_session
        self._watch = watch
        self._flight: InFlightTurn | None = None
        self._left: asyncio.Future[None] | None = None
        self._hung_up = False
        self._is_gone = False

    def wait_for(self, flight: InFlightTurn) -> None:
        """This reader's own turn."""
        self._flight = flight
        flight.add(self)

    async def join(self, flight: InFlightTurn) -> TurnReply | None:
        """Somebody else's turn that this reader's request repeats: its reply, if it committed.

        Raises ClientGone where the reader leaves: nobody is there for whom the turn could be tried again.
        """
        self.wait_for(flight)
        self._left = asyncio.get_running_loop().create_future()
        await asyncio.wait((flight.landing, self._left), return_when=asyncio.FIRST_COMPLETED)
        if self._is_gone:
            raise ClientGone("the client went away while it waited for a turn that it had joined")
        return flight.landing.result()

    def held(self) -> None:
        """The flight has begun to be held, or is when this reader comes to it."""
        if self._hung_up:
            self.leave()
        else:
            self._watch(self)

    def hang_up(self) -> None:
        """The client has gone: a flight that is held lets go of it, any other one goes on until `leave`."""
        self._hung_up = True
        if self._flight is not None and self._flight.is_held:
            self.leave()

    def landed(self) -> None:
        """The flight has landed: there is nothing left to be cut off."""
        self._flight = None

    def leave(self) -> None:
        """Nothing is to be done for this client any more."""
        flight, self._flight = self._flight, None
        self._is_gone = True
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        if flight is not None:
            flight.drop(self)


class TurnCut(Exception):
    """The work was ended by `Flight.cut_off`."""
