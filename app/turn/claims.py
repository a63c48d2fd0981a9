"""Claims a session for a turn, and releases the claim."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from app import crash_points
from app.domain import decide
from app.domain.events import Event, TurnAbandoned, TurnOpened, TurnRejected
from app.domain.fold import fold
from app.domain.rids import rid_of
from app.domain.rules import Plan
from app.domain.session import Session
from app.errors import (
    AppError,
    HistoryMismatch,
    Restored,
    RollbackTooDeep,
    SessionBusy,
    SessionUnreadable,
    StoreUnavailable,
    TooManyTurns,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from app.sessions.cache import CacheEntry, SessionCache, require_open
from app.sessions.event_log import Followers
from app.sessions.lifecycle import Clock, refusal
from app.settings import Settings
from app.store.log import Appended, Refused
from app.store.log_turns import AbandonLost, Busy, Claim, Known, Reject, Release, TooMany
from app.store.ports import Writer
from app.tasks import cancelled
from app.turn.context import ClaimedTurn, TurnContext
from app.turn.in_flight import Identity, InFlightTurn
from app.turn.retries import Retries
from app.upstream.body import Body
from workers import codec

log = logging.getLogger("turnlog.claims")

KEPT_BYTES = 256 << 10
"""How much of a rejected reply is kept for diagnosis."""

CLAIM_TRIES = 8
"""Attempts to claim a session that other processes keep changing."""

MIN_POLL_S, MAX_POLL_S = 0.05, 1.0
"""Interval at which a retry checks whether the turn it repeats, in flight in another process, has ended. It doubles
from the first to the second value."""

LOST_S = 10.0
"""Interval at which the store is looked through for claims of this process that none of its turns has."""

RELEASE_RETRY_S = 1.0
"""Pause between attempts to release claims while the store is unavailable."""


class Claims:
    """The claims of this process. `incarnation()` is the process's id in the store.

    Other processes void these claims after `lease_s()` without a heartbeat. `lease_left(incarnation)` returns the
    seconds until another process's claims become void, or None if they already are.
    """

    def __init__(
        self,
        *,
        cache: SessionCache,
        writer: Writer,
        followers: Followers,
        clock: Clock,
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
        lease_left: Callable[[int], Awaitable[float | None]],
        retries: Retries,
        settings: Settings,
    ) -> None:
        self._retries = retries
        self._settings = settings
        self._incarnation = incarnation
        self._lease_left = lease_left
        self._unreleased: dict[tuple[str, int], Release] = {}
        self._known: Counter[tuple[str, float]] = Counter()
        self._looking: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._cache = cache
        self._writer = writer
        self._followers = followers
        self._clock = clock
        self._lease_s = lease_s

    @property
    def incarnation(self) -> int:
        """Raises StoreFull, StoreUnavailable while this process is not registered in the store."""
        return self._incarnation()

    async def take(self, entry: CacheEntry, context: TurnContext, *, is_alone: bool = False) -> ClaimedTurn | None:
        """Claim the session at a version that the request fits; None if its turn is already committed, or the request
        must be read again: another process has committed turns, or a restore has undone some or given some back.

        `is_alone`: no other turn is in flight in this process.
        """
        session_id = context.session_id
        tries, look_s = 0, MIN_POLL_S
        while tries < CLAIM_TRIES:
            tries += 1
            # While the turn waited at a gate, the session may have changed.
            if await self._retries.repeated(entry, context.identity) is not None:
                return None
            self._require_room(entry.session)
            plan = await self._match(entry, context)
            outcome = await self._claim(entry, plan, context, is_alone)
            if isinstance(outcome, ClaimedTurn):
                return outcome
            if isinstance(outcome, Refused):
                self._cache.drop(session_id)
                raise refusal(session_id, outcome.status)
            if isinstance(outcome, TooMany):
                raise _too_many_open(session_id, self._settings.max_open_turns)
            if isinstance(outcome, Busy):
                left = await self._check_busy(session_id, outcome, context.identity)
                if left is not None:
                    await asyncio.sleep(min(look_s, max(left, MIN_POLL_S)))
                    tries, look_s = 0, min(2 * look_s, MAX_POLL_S)
            before = entry.session
            entry = require_open(await self._cache.refresh(session_id), session_id)
            newer = list(entry.session.turns.committed_after(before.version))
            is_restored = len(entry.session.turns) != len(before.turns) + len(newer)
            if is_restored or any(turn.incarnation != self.incarnation for turn in newer):
                return None  # How the request was read depends on the turns that were known then.
            if newer:
                tries -= 1  # Others have got on: this turn's claim was only out of date.
        busy = SessionBusy(f"session {session_id} changed {CLAIM_TRIES} times while it was being claimed")
        busy.retry = True
        raise busy

    async def _claim(
        self, entry: CacheEntry, plan: Plan, context: TurnContext, is_alone: bool
    ) -> ClaimedTurn | Refused | Busy | TooMany | None:
        """Claim the session at `entry`'s version; None if the session has changed since."""
        session, identity = entry.session, context.identity
        opened = decide.open_turn(
            session,
            plan,
            incarnation=self.incarnation,
            body_hash=identity.body_hash,
            retry_key=identity.mark.key,
            protocol=context.request.protocol,
            adapter=context.adapter,
            agent_id=identity.agent_id,
            history=context.history_if_new,
        )
        session_id = session.session_id
        # A marked retry waits for a turn that it repeats at another process: whether that turn's client still waits is
        # known there alone. Of SQLite there is no other process.
        is_retry = identity.mark.is_retry and identity.mark.key is None and not self._cache.database.is_sqlite
        held = session.open_turns.values() if is_retry else ()
        claim = Claim(
            session_id,
            known_of(session),
            self._clock(),
            opened,
            self._lease_s(),
            most=self._settings.max_open_turns if session.is_tree else 1,
            is_retry=is_retry,
            unlike=[other.fence for other in held if not identity.has_body(other.body_hash, other.agent_id)],
            is_alone=is_alone,
        )
        if crash_points.ARMED:
            crash_points.reach("before_claim")
        self._known[session_id, claim.at] += 1
        context.flight.claims.append(claim.at)
        outcome = await self._writer.submit(claim)
        if not isinstance(outcome, Appended):
            return outcome if isinstance(outcome, Refused | Busy | TooMany) else None
        if crash_points.ARMED:
            crash_points.reach("after_claim")
        fence, event = outcome.events[0].seq, outcome.events[0].event
        assert isinstance(event, TurnOpened)
        # If a PostgreSQL crash undid an earlier claim, the next claim gets the same fence.
        self._unreleased.pop((session_id, fence), None)
        context.flight.fence = fence
        claimed = self._session_after(entry, session, outcome)
        rid = rid_of(session_id, fence, event.incarnation)
        return ClaimedTurn(entry, claimed, plan, event, fence, rid, session.last_event_at, claim.at)

    def _require_room(self, session: Session) -> None:
        """Raises TooManyTurns."""
        if len(session.turns) >= self._settings.max_turns:
            raise TooManyTurns(
                f"session {session.session_id} has {len(session.turns)} turns, the most that it may have"
            )

    async def _match(self, entry: CacheEntry, context: TurnContext) -> Plan:
        """Where the request joins the session's history.

        Raises Restored (the request carries a turn that is undone), SessionBusy (takes precedence over the others),
        RollbackTooDeep, HistoryMismatch.
        """
        session = entry.session
        if session.undone and (undone := context.history.undone_turn(session, entry.every_index)) is not None:
            raise Restored.of(session.session_id, undone)
        try:
            return context.history.join(session, entry.index, context.identity.agent_id)
        except (RollbackTooDeep, HistoryMismatch):
            held = session.open_turn
            if held is not None and await self._is_held_elsewhere(held.incarnation):
                raise SessionBusy(f"session {session.session_id} has a turn in flight") from None
            raise

    async def _is_held_elsewhere(self, incarnation: int) -> bool:
        """Is this the incarnation of another living process? On SQLite there is none."""
        if incarnation == self.incarnation or self._cache.database.is_sqlite:
            return False
        return await self._lease_left(incarnation) is not None

    async def _check_busy(self, session_id: str, busy: Busy, own: Identity) -> float | None:
        """Seconds until the claim of another process, whose turn the request repeats, becomes void without a heartbeat.

        None if the session can be claimed again: this process had failed to release the claim, or its owner is dead.
        Raises SessionBusy for any other turn; IdempotencyMismatch; StoreUnavailable, StoreFull.
        """
        if (session_id, busy.opened_at) in self._known:
            raise SessionBusy(f"session {session_id} has a turn in flight")
        if busy.incarnation == self.incarnation:
            event = TurnAbandoned(busy.turn, busy.fence, "not_released")
            held = (session_id, busy.fence, self.incarnation, busy.opened_at)
            await self._write_release(Release(*held, self._clock(), event))
            return None
        left = await self._lease_left(busy.incarnation)
        repeats = own.has_key(busy.retry_key, busy.body_hash) or (
            own.mark.key is None and own.mark.is_retry and busy.body_hash == own.body_hash
        )
        if left is None or repeats:
            return left
        raise SessionBusy(f"session {session_id} has a turn in flight")

    async def reject(
        self,
        claimed: ClaimedTurn,
        reason: str,
        status: int | None = None,
        detail: str | None = None,
        reply: Body | None = None,
        *,
        keeps_staged: bool = False,
    ) -> None:
        """Release a claim after an invalid reply or an engine's error. The start of `reply` is kept for diagnosis."""
        session_id, turn, fence = claimed.session.session_id, claimed.opened.turn, claimed.fence
        if reply is None or keeps_staged:
            await self._release(self._end(claimed, TurnRejected(turn, fence, reason, status, detail), keeps_staged))
            return
        kept = reply.beginning(KEPT_BYTES)
        event = TurnRejected(turn, fence, reason, status, detail, len(reply), len(kept))
        await self._release(
            Reject(
                session_id,
                fence,
                self.incarnation,
                claimed.opened_at,
                self._clock(),
                event,
                len(reply),
                codec.compress(kept),
            )
        )

    async def fail(
        self, claimed: ClaimedTurn, error: AppError, detail: str | None = None, reply: Body | None = None
    ) -> None:
        """Release a claim after an error. If the store is unavailable, release it in the background. Of a turn whose
        engine did not finish, or that could not be written, a retry may go on from what it has staged."""
        keeps_staged = isinstance(error, (UpstreamUnreachable, UpstreamTimeout, StoreUnavailable))
        if not isinstance(error, StoreUnavailable):
            await self.reject(claimed, error.code, None, detail, reply, keeps_staged=keeps_staged)
            return
        event = TurnRejected(claimed.opened.turn, claimed.fence, error.code, None, detail)
        self._retry_release(self._end(claimed, event, keeps_staged), 0)

    async def abandon(self, claimed: ClaimedTurn, reason: Literal["disconnect", "not_released"]) -> None:
        """Release the claim of a turn that no longer runs."""
        await self.release(claimed, TurnAbandoned(claimed.opened.turn, claimed.fence, reason))

    async def release(self, claimed: ClaimedTurn, event: Event) -> None:
        await self._release(self._end(claimed, event))

    def _end(self, claimed: ClaimedTurn, event: Event, keeps_staged: bool = False) -> Release:
        session_id, at = claimed.session.session_id, self._clock()
        return Release(session_id, claimed.fence, self.incarnation, claimed.opened_at, at, event, keeps_staged)

    async def _release(self, operation: Release | Reject) -> None:
        """Release a claim. If the store is unavailable, retry in the background; the turn gets no error."""
        session_id, fence, event = operation.session_id, operation.fence, operation.event
        try:
            await self._write_release(operation)
        except SessionUnreadable:
            return  # Nobody can use the session, nor its claim.
        except AppError as error:
            log.warning("session %s: the claim %d could not be released yet: %s", session_id, fence, error)
            keeps = isinstance(operation, Release) and operation.keeps_staged
            held = (session_id, fence, self.incarnation, operation.opened_at)
            release = Release(*held, operation.at, event, keeps)
            self._retry_release(release, RELEASE_RETRY_S)

    def _retry_release(self, operation: Release, pause_s: float) -> None:
        self._unreleased[operation.session_id, operation.fence] = operation
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._retry_releases(pause_s))

    async def _retry_releases(self, pause_s: float) -> None:
        while self._unreleased:
            await asyncio.sleep(pause_s)
            pause_s = RELEASE_RETRY_S
            for key, operation in list(self._unreleased.items()):
                try:
                    await self._write_release(operation)
                except SessionUnreadable:
                    pass
                except AppError:
                    break  # The store is still unavailable; the first failure was logged.
                self._unreleased.pop(key, None)

    async def _write_release(self, operation: Release | Reject) -> None:
        """Raises StoreUnavailable, StoreFull."""
        session_id = operation.session_id
        if crash_points.ARMED:
            crash_points.reach("before_release")
        outcome = await self._writer.submit(operation)
        if crash_points.ARMED:
            crash_points.reach("after_release")
        self._unreleased.pop((session_id, operation.fence), None)
        if isinstance(outcome, Appended):
            self.appended(session_id, outcome)
        else:
            self._cache.drop(session_id)

    def appended(self, session_id: str, outcome: Appended) -> None:
        """Apply events that this process has written to the cache, and notify the session's followers."""
        self._cache.advance(session_id, outcome.events)
        self._followers.notify(session_id)

    def _session_after(self, entry: CacheEntry, before: Session, outcome: Appended) -> Session:
        """The session after `outcome` was appended to `before`, the state when the write was decided."""
        self.appended(before.session_id, outcome)
        first, last = outcome.events[0].seq, outcome.events[-1].seq
        if entry.session.version == last or first != before.version + 1:
            # In a tree, the events of other turns may stand between: the state before the claim serves as well.
            return entry.session if entry.session.version >= before.version else before
        # The entry has advanced further meanwhile, or it left the cache.
        after = fold(before.session_id, outcome.events, before)
        assert after is not None
        return after

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look_for_lost(), name="turnlog-claims")

    def forget(self, session_id: str, flight: InFlightTurn) -> None:
        """The turn is no longer in flight: what the store may still hold of its claims is nobody's."""
        for at in flight.claims:
            self._known[session_id, at] -= 1
            if not self._known[session_id, at]:
                del self._known[session_id, at]

    async def _look_for_lost(self) -> None:
        while True:
            await asyncio.sleep(LOST_S)
            try:
                found = await self._writer.submit(AbandonLost(self.incarnation, self._clock(), self._known))
            except AppError as error:
                log.warning("claims of turns that are not in flight were not looked for: %s", error)
                continue
            if found:
                log.info("abandoned %d open turns of this process that are not in flight", found)

    async def close(self) -> None:
        """Claims that are not released by now become void when the process ends."""
        await cancelled(self._releasing)
        await cancelled(self._looking)


def known_of(session: Session) -> Known:
    return Known(session.version, session.last_event_at, len(session.turns))


def _too_many_open(session_id: str, most: int) -> SessionBusy:
    error = SessionBusy(f"session {session_id} has {most} turns in flight, the most that it may have; come again")
    error.retry, error.retry_after_s = True, 1
    return error
