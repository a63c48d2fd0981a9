"""Turns in flight in this process, the clients that wait for them, and how a request is marked as a retry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.domain.events import GivenIds, History
from app.errors import ClientGone, IdempotencyMismatch
from app.turn.live import LiveStream
from app.upstream.headers import Headers

CancelReason = Literal["session_closed", "disconnect"]


class RetryMark(msgspec.Struct, frozen=True):
    """Marks a request as a retry: an idempotency key (hashed), or the OpenAI SDKs' retry count."""

    key: str | None = None
    is_retry: bool = False


class Sender(msgspec.Struct, frozen=True):
    """What a request's headers and route say of its sender: the retry mark, the agent, and the history that a session
    gets whose first turn decides that."""

    mark: RetryMark = RetryMark()
    agent_id: str | None = None
    history: History = "linear"


class Identity(msgspec.Struct, frozen=True):
    """What tells whether two requests are the same: the hash of the canonical body, the agent, and the retry mark.

    If the last message is an assistant's, `begun_reply` is that message, and `begun_hash` the hash of the body without
    it.
    """

    mark: RetryMark
    body_hash: str
    agent_id: str | None = None
    begun_reply: Mapping[str, Any] | None = None
    begun_hash: str | None = None

    def has_body(self, body_hash: str, agent_id: str | None = None) -> bool:
        return body_hash == self.body_hash and agent_id == self.agent_id

    def has_key(self, key: str | None, body_hash: str) -> bool:
        """Does the turn with this key and body hash have this request's key?

        Raises IdempotencyMismatch if the key was used with another body.
        """
        if self.mark.key is None or self.mark.key != key:
            return False
        if body_hash != self.body_hash:
            raise IdempotencyMismatch("the idempotency key was used with another request body")
        return True


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class TurnReply(msgspec.Struct, frozen=True):
    """The reply to the client. Its body is in parts, so that a large one is cut without copying.

    `turn` is None for an engine's own error, which commits nothing. `replayed`: another request's turn, stored or, if
    `joined`, still in flight. `is_aborted`: an engine ended the generation early. `rolled_back`: how many live turns
    this one superseded when it committed. `echo`: what the request's parser kept for the rendering of the reply.
    `left_out`: what of the request the engine was not sent (`app.domain.left_out`).
    `given_ids` as in `TurnCommitted`.
    """

    status: int
    headers: Headers
    parts: Sequence[bytes | memoryview]
    turn: int | None = None
    replayed: bool = False
    joined: bool = False
    is_aborted: bool = False
    rolled_back: int = 0
    echo: bytes | None = None
    left_out: tuple[str, ...] = ()
    given_ids: GivenIds | None = None


class InFlightTurn:
    """A turn in flight in this process; a retry joins it. `engine_asked`: its request may have reached an engine.

    `fence` is its claim's, None until it has one; `claims` are the times of all its attempts to claim. `finished`
    resolves to its reply if it commits, else to None.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.cancel_reason: CancelReason | None = None
        self.is_held = False
        self.engine_asked = False
        self.fence: int | None = None
        self.claims: list[float] = []
        self._waiters: list[Waiter] = []
        self._task: asyncio.Task[object] | None = None
        self.finished: asyncio.Future[TurnReply | None] = asyncio.get_running_loop().create_future()

    @property
    def has_client(self) -> bool:
        """Is a client known to wait for the reply?"""
        return any(not waiter.is_gone for waiter in self._waiters)

    def finish(self, reply: TurnReply | None) -> None:
        """The turn has ended, with `reply` if it committed. Waiters are released, so that no cycle keeps the reply
        alive."""
        if not self.finished.done():
            self.finished.set_result(reply)
        for waiter in self._waiters:
            waiter.turn_finished()
        self._waiters = []

    def add(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)
        if self.is_held:
            waiter.turn_held()

    def remove(self, waiter: Waiter) -> None:
        """If no other client waits for the turn, cancel it."""
        self._waiters.remove(waiter)
        if not self._waiters:
            self.cancel("disconnect")

    @contextlib.contextmanager
    def waiting_at_gate(self) -> Iterator[None]:
        """While the turn waits at a gate, clients that disconnect leave at once; the last one cancels the turn."""
        self.is_held = True
        for waiter in tuple(self._waiters):
            waiter.turn_held()
        try:
            yield
        finally:
            self.is_held = False

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the work on the prompt or at the engine. A turn that is past both is decided by its fence."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
            if self._task is not None:
                self._task.cancel()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Work that `cancel` ends. Raises TurnCancelled."""
        if self.cancel_reason is not None:
            raise TurnCancelled
        self._task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.cancel_reason is None or task is None:
                raise
            task.uncancel()
            raise TurnCancelled from None
        finally:
            self._task = None


def _no_watch(waiter: Waiter) -> None:
    """For clients that report their disconnect without being watched."""


def _is_connected() -> bool:
    """For clients whose connection cannot be looked at."""
    return False


class Waiter:
    """A client that waits for a turn, its own or one that it joined.

    `grow` reserves memory for the reply. `watch` arranges that `client_disconnected` is called; it is needed only at a
    gate, since other turns go on without their client. `token_session` is the session whose token authorised the
    request. `is_lost` tells whether the client's connection has ended. `live` takes its own turn's deltas.
    """

    def __init__(
        self,
        grow: Callable[[int], None],
        watch: Callable[[Waiter], None] = _no_watch,
        token_session: str | None = None,
        is_lost: Callable[[], bool] = _is_connected,
        live: LiveStream | None = None,
    ) -> None:
        self.grow = grow
        self.live = live
        self._is_lost = is_lost
        self.token_session = token_session
        self._watch = watch
        self._flight: InFlightTurn | None = None
        self._departure: asyncio.Future[None] | None = None
        self._is_disconnected = False
        self._has_left = False

    @property
    def is_gone(self) -> bool:
        return self._is_disconnected or self._is_lost()

    def wait_for(self, flight: InFlightTurn) -> None:
        """Wait for this client's own turn."""
        self._flight = flight
        flight.add(self)

    async def join(self, flight: InFlightTurn) -> TurnReply | None:
        """Wait for another request's turn that this request repeats; returns its reply if it commits.

        Raises ClientGone if the client leaves first.
        """
        self.wait_for(flight)
        self._departure = asyncio.get_running_loop().create_future()
        await asyncio.wait((flight.finished, self._departure), return_when=asyncio.FIRST_COMPLETED)
        if self._has_left:
            raise ClientGone("the client went away while it waited for a turn that it had joined")
        return flight.finished.result()

    def turn_held(self) -> None:
        """The turn waits at a gate."""
        if self._is_disconnected:
            self.leave()
        else:
            self._watch(self)

    def client_disconnected(self) -> None:
        """The client has disconnected. Leave a turn that waits at a gate; any other turn goes on until `leave`."""
        self._is_disconnected = True
        if self._flight is not None and self._flight.is_held:
            self.leave()

    def turn_finished(self) -> None:
        """The turn has ended; it cannot be cancelled any more."""
        self._flight = None

    def leave(self) -> None:
        """Stop waiting, for good."""
        flight, self._flight = self._flight, None
        self._has_left = True
        if self._departure is not None and not self._departure.done():
            self._departure.set_result(None)
        if flight is not None:
            flight.remove(self)


class TurnCancelled(Exception):
    """The turn was cancelled by `InFlightTurn.cancel`."""
