"""Which turn a request repeats, told by what is known of the delivery of that turn's reply.

A reply is delivered where a child turn exists, or once its last byte was handed to the kernel, which only the process
that sent it knows. It is undelivered where its connection ended before, which is written down, and where the process
that committed it died within a minute. What cannot be told, as after a reset of its connection, counts as delivered for
a request without a mark, and as undelivered for one that its client marks as a retry.

In a linear session an attempt that comes late, behind a retry of it that was committed, repeats that turn too: else it
would undo what its client was told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from app.domain.canonical import decode_message, is_beginning
from app.domain.events import ReplyRedelivered, ReplyUndelivered
from app.domain.session import Session, Turn
from app.errors import AppError, IdempotencyMismatch, SessionClosed, SessionNotFound
from app.process import cancelled
from app.sessions.cache import CacheEntry, SessionCache
from app.sessions.event_log import Followers
from app.store import incarnations
from app.store.content import load_exchanges
from app.store.log import Appended
from app.store.log_turns import AbsorbAttempt, NoteDelivery
from app.store.ports import Writer
from app.store.sessions import attempted
from app.turn.in_flight import InFlightTurn, Placed

log = logging.getLogger("turnlog.retries")

REMEMBERED = 1 << 16
"""Replies whose delivery a process remembers: about 10 MB."""

UNREAD_S = 60.0
"""A reply that a process committed in the last so many seconds before it died may not have been delivered."""

AGE_ERROR_S = 0.01
"""How much older than it is a connection's newest byte may seem: the kernel counts in ticks of up to 10 ms."""

_Key = tuple[str, int]


class Retries:
    """Finds the turns that requests repeat. `incarnation()` is this process's id in the store, `lease_s()` the silence
    after which another process is dead."""

    def __init__(
        self,
        *,
        cache: SessionCache,
        writer: Writer,
        followers: Followers,
        clock: Callable[[], float],
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
    ) -> None:
        self._lease_s = lease_s
        self._cache = cache
        self._writer = writer
        self._followers = followers
        self._clock = clock
        self._incarnation = incarnation
        self._sending: dict[_Key, int] = {}
        self._replaying: set[_Key] = set()
        self._noting: set[asyncio.Task[None]] = set()
        self._writing: dict[_Key, list[ReplyUndelivered | ReplyRedelivered]] = {}
        self._sent: OrderedDict[str, dict[int, bool | None]] = OrderedDict()
        self._remembered = 0

    # what a request repeats

    def joinable(self, entry: CacheEntry, flights: Iterable[InFlightTurn], own: InFlightTurn) -> InFlightTurn | None:
        """The turn in flight here that the request repeats. Raises IdempotencyMismatch."""
        for flight in flights:
            if has_key(own, flight.retry_key, flight.body_hash):
                return flight
            if own.retry_key is not None or (flight.body_hash, flight.agent_id) != (own.body_hash, own.agent_id):
                continue
            is_alone = own.is_retry and not entry.session.is_tree
            if is_alone or not flight.has_client:
                return flight
        return None

    async def repeated(self, entry: CacheEntry, placed: Placed) -> int | None:
        """The committed turn whose reply the request is to be given. Raises IdempotencyMismatch."""
        flight = placed.flight
        if not flight.has_client:
            return None  # The reply would count as on its way, and a retry whose client waits would generate.
        if flight.retry_key is not None:
            number = entry.keyed.get(flight.retry_key)
            first = None if number is None else entry.session.turn(number)
            return number if first is not None and has_key(flight, first.retry_key, first.body_hash) else None
        if not entry.index.knows_body(flight.body_hash, placed.partial_hash):
            return None
        died_after: dict[int, float | None] = {}
        for earlier in self._childless(entry, flight.agent_id, flight.body_hash):
            if flight.is_retry:
                is_newest = earlier is entry.session.leaf and not entry.session.is_tree
                if is_newest or not self._is_delivered(entry, earlier):
                    return earlier.number
            elif await self._is_undelivered(entry, earlier, died_after):
                return earlier.number
        number = await self._resumed(entry, placed, died_after)
        return number if number is not None else await self._absorbing(entry, placed)

    async def ended(self, entry: CacheEntry, placed: Placed) -> tuple[Session, int] | None:
        """The turn of an ended generation of the session's name that a marked request repeats, and its session. For an
        agent's own session, that of the agent in an ended generation of its root's name.

        What the open generation has tried is its own. Without a key a body is told by, and is a childless turn's: its
        reply is the last that its client can have missed. Raises SessionClosed if the reply is gone or that generation
        ended without it; SessionNotFound if that has left; IdempotencyMismatch; SessionUnreadable, StoreUnavailable.
        """
        newest, database, flight = entry.session, self._cache.database, placed.flight
        root = await self._named_root(newest)
        if root is None or root.name is None or (root.generation == 1 and root.status == "open"):
            return None
        run, name, mark = root.config.of_run, root.name, flight.retry_key or flight.body_hash
        agent = newest.session_id.removeprefix(root.session_id)
        for session_id in await database.read(lambda c: attempted(c, database.points, run, name, mark, agent)):
            is_own = session_id == newest.session_id
            if not is_own and flight.waiter.token_session is not None:
                continue
            found = entry if is_own else await self._cache.current(session_id)
            if found is None:
                raise SessionNotFound.of(session_id)  # It has left for an archive, or is erased there.
            session = found.session
            if session.status == "open":
                return None  # It is the newest, and this process has only now heard of it.
            if flight.retry_key is not None:
                number = found.keyed.get(flight.retry_key)
                if number is not None:
                    has_key(flight, flight.retry_key, session.turn(number).body_hash)
            else:
                childless = self._childless(found, flight.agent_id, flight.body_hash)
                number = next((one.number for one in childless), None)
                if number is None:
                    continue
            if number is None or session.status != "closed":
                raise SessionClosed.of(session_id, f"is {session.status}")
            return session, number
        return None

    async def _named_root(self, session: Session) -> Session | None:
        """The session itself, or for one that has no name the next above it that has."""
        while session.name is None:
            parent = session.config.parent
            above = None if parent is None else await self._cache.get(parent)
            if above is None:
                return None
            session = above.session
        return session

    async def _absorbing(self, entry: CacheEntry, placed: Placed) -> int | None:
        """The turn that a later attempt at the same request, by its client's count, has committed after this one came.

        In a tree, equal requests are samples.
        """
        session, flight = entry.session, placed.flight
        connection = flight.waiter.connection
        if session.is_tree or connection is None:
            return None
        for number in entry.index.with_body(flight.body_hash):
            later = session.turn(number)
            if later.retry_count <= flight.retry_count or later.agent_id != flight.agent_id:
                continue
            if flight.absorbed_by == number:
                return number
            age_s = connection.data_age_s()
            if age_s is None:
                return None
            clock = flight.stages.clock
            came_at = clock() - age_s + AGE_ERROR_S
            attempt = AbsorbAttempt(session.session_id, number, later.retry_count, came_at, clock)
            if await self._writer.submit(attempt):
                flight.absorbed_by = number
                return number
        return None

    async def _resumed(self, entry: CacheEntry, placed: Placed, died_after: dict[int, float | None]) -> int | None:
        """The turn whose undelivered reply begins with the request's last message: its client got no more of it."""
        if placed.partial_hash is None or placed.partial_reply is None:
            return None
        for earlier in self._childless(entry, placed.flight.agent_id, placed.partial_hash):
            if await self._is_undelivered(entry, earlier, died_after):
                reply = await self._reply_message(entry.session.session_id, earlier.number)
                if is_beginning(placed.partial_reply, reply) and not self._is_delivered(entry, earlier):
                    return earlier.number
        return None

    async def _reply_message(self, session_id: str, turn: int) -> Mapping[str, Any]:
        """Raises SessionUnreadable."""
        read = self._cache.database.read
        exchanges = await read(lambda c: load_exchanges(c, session_id, [turn]), session_id=session_id)
        return decode_message(exchanges[turn].message, "the reply's message")

    def _childless(self, entry: CacheEntry, agent_id: str | None, body_hash: str) -> Iterator[Turn]:
        """The childless turns of the same agent with this body, the newest first; in a linear session only the newest
        turn can be one."""
        session, index = entry.session, entry.index
        for number in index.with_body(body_hash):
            turn = session.turn(number)
            is_current = turn is session.leaf if not session.is_tree else not index.has_children(number)
            if is_current and turn.agent_id == agent_id:
                yield turn

    def _is_delivered(self, entry: CacheEntry, turn: Turn) -> bool:
        """Is the reply known to have been delivered, or on its way to a client that waits for it?"""
        key = entry.session.session_id, turn.number
        is_on_its_way = key in self._sending or key in self._replaying
        return is_on_its_way or self._was_sent(key) or entry.session.deliveries.get(turn.number) is True

    def _was_sent(self, key: _Key) -> bool:
        return self._sent.get(key[0], {}).get(key[1]) is True

    async def _is_undelivered(self, entry: CacheEntry, turn: Turn, died_after: dict[int, float | None]) -> bool:
        """`died_after`: what is known of other processes, by incarnation."""
        if self._is_delivered(entry, turn):
            return False
        told: Mapping[int, bool | None] = self._sent.get(entry.session.session_id, {})
        if turn.number not in told:
            told = entry.session.deliveries
        if turn.number in told:
            return told[turn.number] is False
        if turn.incarnation in (0, self._incarnation()):
            return False
        if turn.incarnation not in died_after:
            read, lease_s = self._cache.database.read, self._lease_s()
            death = await read(lambda c: incarnations.died_after(c, turn.incarnation, lease_s))
            died_after[turn.incarnation] = death
        died_at = died_after[turn.incarnation]
        # Meanwhile another request may have been given the reply.
        return died_at is not None and turn.committed_at >= died_at - UNREAD_S and not self._is_delivered(entry, turn)

    # delivery

    def sending(self, session_id: str, turn: int) -> None:
        """The reply is about to be sent to a client."""
        key = session_id, turn
        self._sending[key] = self._sending.get(key, 0) + 1

    def record_delivery(self, session_id: str, turn: int, *, delivered: bool | None, is_replay: bool) -> None:
        """The reply has left, or its connection ended before it had; None, after True: it may not have been read. Only
        what is not as usual is written down, in the background."""
        event = self._delivery_event(session_id, turn, delivered=delivered, is_replay=is_replay)
        if event is not None:
            self._note(session_id, event)

    def _delivery_event(
        self, session_id: str, turn: int, *, delivered: bool | None, is_replay: bool
    ) -> ReplyUndelivered | ReplyRedelivered | None:
        key = session_id, turn
        if delivered is None:
            self._remember(key, None)
            return ReplyUndelivered(turn, is_unknown=True) if is_replay else None
        self._replaying.discard(key)
        others = self._sending.pop(key) - 1
        if others:
            self._sending[key] = others
        if delivered:
            self._remember(key, True)
            return ReplyRedelivered(turn) if is_replay else None
        if others or self._was_sent(key):
            return None
        self._remember(key, False)
        return ReplyUndelivered(turn)

    def begin_replay(self, session_id: str, turn: int) -> None:
        """A committed reply is about to be given to a retry, and until it is sent to no other one."""
        self._replaying.add((session_id, turn))

    def cancel_replay(self, session_id: str, turn: int) -> None:
        """The reply could not be given after all."""
        self._replaying.discard((session_id, turn))

    async def close(self) -> None:
        """What is not written down by now is lost: the retry then generates once more."""
        await cancelled(*self._noting)

    def forget(self, session_id: str, _ended: object = None) -> None:
        """The session has ended: nobody asks for its replies again."""
        self._remembered -= len(self._sent.pop(session_id, ()))

    def _remember(self, key: _Key, delivered: bool | None) -> None:
        session_id, turn = key
        turns = self._sent.setdefault(session_id, {})
        self._remembered += turn not in turns
        turns[turn] = delivered
        self._sent.move_to_end(session_id)
        while self._remembered > REMEMBERED and len(self._sent) > 1:
            self.forget(next(iter(self._sent)))

    def _note(self, session_id: str, event: ReplyUndelivered | ReplyRedelivered) -> None:
        """Write the event down, behind what else is told of the turn, unless that or the log says so already, or the
        turn is none of a retry's any more."""
        key = session_id, event.turn
        told = self._writing.get(key)
        if told is not None:
            if told[-1] != event:
                told.append(event)
            return
        session = self._cache.known(session_id)
        if session is not None and _already_recorded(session, event):
            return
        self._writing[key] = [event]
        task = asyncio.create_task(self._write(key))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def _write(self, key: _Key) -> None:
        """One after the other: two at once may change places in the log."""
        session_id, turn = key
        told = self._writing[key]
        try:
            while told:
                try:
                    outcome = await self._writer.submit(NoteDelivery(session_id, self._clock(), told[0]))
                    if isinstance(outcome, Appended):
                        self._cache.advance(session_id, outcome.events)
                        self._followers.notify(session_id)
                except AppError as error:
                    log.warning(
                        "session %s: the delivery of turn %d could not be recorded: %s", session_id, turn, error
                    )
                del told[0]
        finally:
            del self._writing[key]


def has_key(flight: InFlightTurn, key: str | None, body_hash: str) -> bool:
    """Does the turn with this key and body hash have the request's key?

    Raises IdempotencyMismatch if the key was used with another body.
    """
    if flight.retry_key is None or flight.retry_key != key:
        return False
    if body_hash != flight.body_hash:
        raise IdempotencyMismatch("the idempotency key was used with another request body")
    return True


def _already_recorded(session: Session, event: ReplyUndelivered | ReplyRedelivered) -> bool:
    """A reply that was given again stays so; in a linear session only the newest turn is told."""
    told = session.deliveries
    is_past = session.leaf is not None and session.leaf.number > event.turn and not session.is_tree
    if is_past or event.turn not in told:
        return is_past
    if isinstance(event, ReplyUndelivered):
        return told[event.turn] is None if event.is_unknown else told[event.turn] is not None
    return told[event.turn] is True
