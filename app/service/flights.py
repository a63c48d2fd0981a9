"""Turns in flight in this process, and how a client says that a request repeats one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from app.errors import IdempotencyMismatch
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

    `turn` is None for an engine's own error, which committed nothing.
    """

    status: int
    headers: Headers
    parts: Sequence[bytes | memoryview]
    turn: int | None = None
    replayed: bool = False


class Flight:
    """A turn in flight in this process; a marked retry joins it. `asked`: an engine may have heard of it.

    `fence` is its claim's; None while it waits for one.
    """

    def __init__(self, mark: RetryMark, body_hash: str) -> None:
        self.mark = mark
        self.body_hash = body_hash
        self.cut: CutReason | None = None
        self.readers = 0
        self.asked = False
        self.fence: int | None = None
        self._at_work: asyncio.Task[object] | None = None
        self.landing: asyncio.Future[TurnReply | None] = asyncio.get_running_loop().create_future()

    def land(self, reply: TurnReply | None) -> None:
        """The turn has ended, with `reply` if it committed."""
        if not self.landing.done():
            self.landing.set_result(reply)

    async def join(self) -> TurnReply | None:
        return await asyncio.shield(self.landing)

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
            raise Cut
        self._at_work = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.cut is None or task is None:
                raise
            task.uncancel()
            raise Cut from None
        finally:
            self._at_work = None


class Reader:
    """A client that waits for a turn, its own or one that it joined; `grow` makes room for what it will be sent."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        self.grow = grow
        self._flight: Flight | None = None

    def wait_for(self, flight: Flight) -> None:
        self._flight = flight
        flight.readers += 1

    def leave(self) -> None:
        """The client has gone. Where nobody else waits for the turn, it is cut off."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.readers -= 1
            if flight.readers == 0:
                flight.cut_off("disconnect")


class Cut(Exception):
    """The work was ended by `Flight.cut_off`."""
