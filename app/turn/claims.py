"""Claims a session for a turn, and ends the claim: by a commit, or by a release."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from app import crash_points
from app.domain import decide
from app.domain.events import Event, TurnAbandoned, TurnCommitted, TurnOpened, TurnRejected
from app.domain.history import RequestHistory
from app.domain.request import ChatRequest
from app.domain.session import Session, fold, rid_of
from app.errors import (
    AlreadyFinished,
    AppError,
    ClaimLost,
    ClientGone,
    HistoryMismatch,
    OverBudget,
    Restored,
    RollbackTooDeep,
    RunOverBudget,
    SessionBusy,
    SessionUnreadable,
    StoreUnavailable,
    TooManyTurns,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from app.process import cancelled
from app.sessions.cache import CacheEntry, SessionCache, require_open
from app.sessions.event_log import Followers
from app.sessions.lifecycle import refusal
from app.settings import Settings
from app.store import pins
from app.store.log import Appended, Refused, StoredBlob, StoredChunk, size_of
from app.store.log_turns import (
    COMMIT_BYTES,
    AbandonLost,
    Busy,
    Claim,
    Commit,
    Known,
    Limited,
    Pinned,
    Reject,
    Release,
    Stage,
    Stale,
    TooMany,
)
from app.store.ports import Writer
from app.turn.in_flight import Claimed, EngineCall, Generated, InFlightTurn, Placed, blobs_of
from app.turn.placement import Placement
from app.turn.points import TurnPoints
from app.turn.retries import Retries, has_key
from app.turn.token_in import added_text
from app.turn.validation import payload_refs, stored_chunks
from app.upstream.body import Body
from workers import codec
from workers.reply import ValidatedReply

log = logging.getLogger("turnlog.claims")

STAGE_BYTES = 512 << 10
"""Payload chunks larger than this together are written before the commit: about 2 ms of one transaction."""

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
        points: TurnPoints,
        retries: Retries,
        placement: Placement,
        settings: Settings,
        cache: SessionCache,
        writer: Writer,
        followers: Followers,
        clock: Callable[[], float],
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
        lease_left: Callable[[int], Awaitable[float | None]],
    ) -> None:
        self._points = points
        self._retries = retries
        self._placement = placement
        self._settings = settings
        self._cache = cache
        self._writer = writer
        self._followers = followers
        self._clock = clock
        self._incarnation = incarnation
        self._own_number: int | None = None  # Known once the process is registered, which the first claim may not be.
        self._lease_s = lease_s
        self._lease_left = lease_left
        self._unreleased: dict[tuple[str, int], Release] = {}
        self._known: dict[tuple[str, float], int] = {}
        self._has_told_of_mismatch = False
        self._looking: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None

    async def take(self, placed: Placed, entry: CacheEntry, *, has_waited: bool, is_alone: bool) -> Claimed | None:
        """Claim the session at a version that the request fits; None if its turn is already committed, or the request
        must be read again: another process has committed turns, or a restore has undone some or given some back.

        `has_waited`: the turn waited since its request was read; `is_alone`: no other is in flight in this process.
        """
        session_id = placed.flight.session_id
        tries, look_s = 0, MIN_POLL_S
        while tries < CLAIM_TRIES:
            tries += 1
            # Meanwhile what the request repeats may have been committed.
            is_as_read = entry.session is placed.session and not has_waited
            if not is_as_read and await self._retries.repeated(entry, placed) is not None:
                return None
            outcome = await self._claim(placed, entry, is_alone)
            if isinstance(outcome, Claimed):
                return outcome
            has_waited = True
            if isinstance(outcome, Refused):
                self._cache.drop(session_id)
                raise refusal(session_id, outcome.status)
            if isinstance(outcome, TooMany):
                raise _too_many_open(session_id, self._settings.max_open_turns)
            if isinstance(outcome, Limited):
                assert self._points.limits is not None
                error = await self._points.limits.refused(placed, outcome)
                if error is not None:
                    raise error
            if isinstance(outcome, Busy):
                left = await self._check_busy(placed.flight, outcome)
                if left is not None:
                    await asyncio.sleep(min(look_s, max(left, MIN_POLL_S)))
                    tries, look_s = 0, min(2 * look_s, MAX_POLL_S)
            before = entry.session
            entry = require_open(await self._cache.refresh(session_id), session_id)
            newer = list(entry.session.turns.committed_after(before.version))
            is_restored = entry.session.turns.count != before.turns.count + len(newer)
            if is_restored or any(other.incarnation != self._own_number for other in newer):
                return None  # How the request was read depends on the turns that were known then.
            if newer:
                tries -= 1  # Others have got on: this turn's claim was only out of date.
        busy = SessionBusy(f"session {session_id} changed {CLAIM_TRIES} times while it was being claimed")
        busy.retry = True
        raise busy

    async def _claim(
        self, placed: Placed, entry: CacheEntry, is_alone: bool
    ) -> Claimed | Refused | Busy | TooMany | Limited | Stale:
        """Claim the session at `entry`'s version.

        Raises AlreadyFinished; TooManyTurns; Restored (the request carries a turn that is undone), SessionBusy and
        RunOverBudget (these two take precedence over the others), RollbackTooDeep, HistoryMismatch; ClientGone.
        """
        flight, session, settings, limits = placed.flight, entry.session, self._settings, self._points.limits
        session_id = flight.session_id
        if session.finished is not None:
            raise AlreadyFinished(f"session {session_id} was finished; it takes no more turns")
        if self._points.held_runs and (why := self._points.held_runs.get(session.config.of_run)) is not None:
            raise RunOverBudget(why)
        if session.turns.count >= settings.max_turns:
            raise TooManyTurns(f"session {session_id} has {session.turns.count} turns, the most that it may have")
        if session.undone.count and (undone := placed.history.undone_turn(session, entry.every_index)) is not None:
            raise Restored.of(session_id, undone)
        try:
            plan = placed.history.join(session, entry.index, flight.agent_id)
        except (RollbackTooDeep, HistoryMismatch) as error:
            await self._require_not_held(session)
            if session.budgets and limits is not None:
                await limits.require_left(session)
            if isinstance(error, HistoryMismatch) and not self._has_told_of_mismatch:
                self._has_told_of_mismatch = True  # an agent that replaces its history is refused every time
                log.warning("session %s: %s", session_id, error)
            raise
        if self._own_number is None:
            self._own_number = self._incarnation()
        incarnation = self._own_number
        opened = decide.open_turn(
            session,
            plan,
            incarnation=incarnation,
            body_hash=flight.body_hash,
            retry_key=flight.retry_key,
            retry_count=flight.retry_count,
            protocol=placed.request.protocol,
            adapter=flight.adapter,
            agent_id=flight.agent_id,
            history=flight.new_history,
        )
        at = self._clock()
        claim = Claim(
            session_id,
            Known(session.version, session.last_event_at, session.turns.count),
            at,
            opened,
            math.inf if self._cache.database.is_sqlite else self._lease_s(),
            most=settings.max_open_turns if session.history == "tree" else 1,
            is_alone=is_alone,
        )
        # A marked retry waits for a turn that it repeats at another process: whether that turn's client still waits is
        # known there alone. Of SQLite there is no other process.
        if flight.retry_count and flight.retry_key is None and not self._cache.database.is_sqlite:
            same = flight.body_hash, flight.agent_id
            unlike = [held.fence for held in session.open_turns.values() if (held.body_hash, held.agent_id) != same]
            claim = msgspec.structs.replace(claim, is_retry=True, unlike=unlike)
        if session.budgets and limits is not None:
            claim = await limits.claiming(placed, plan, session, claim)
        if not flight.has_client:
            raise ClientGone("the client disconnected before its turn began")
        if crash_points.ARMED:
            crash_points.reach("before_claim")
        self._known[session_id, at] = self._known.get((session_id, at), 0) + 1
        flight.attempts.append(at)
        outcome: Appended | Stale | Busy | TooMany | Limited | Refused = await self._writer.submit(claim)
        if not isinstance(outcome, Appended):
            return outcome
        if crash_points.ARMED:
            crash_points.reach("after_claim")
        flight.claim = outcome.events[0]
        fence, event = flight.claim.seq, flight.claim.event
        assert isinstance(event, TurnOpened)
        # If a PostgreSQL crash undid an earlier claim, the next claim gets the same fence.
        self._unreleased.pop((session_id, fence), None)
        turn = Claimed(
            flight,
            placed.request,
            placed.history,
            placed.template,
            placed.large,
            entry,
            session,
            plan,
            event,
            fence,
            incarnation,
            opened_at=at,
            idle_since=session.last_event_at,
            requested_at=self._clock(),
            rid=rid_of(session_id, fence, incarnation),
        )
        if session.budgets and limits is not None:
            limits.claimed(turn)
        self.appended(session_id, outcome)
        turn.session = entry.session
        if entry.session.version != outcome.events[-1].seq:
            turn.session = _session_after(entry, session, outcome)
        return turn

    async def _require_not_held(self, session: Session) -> None:
        """Raises SessionBusy if the open turn is that of another living process. On SQLite there is none."""
        held = session.open_turn
        if held is None or self._cache.database.is_sqlite or held.incarnation == self._incarnation():
            return
        if await self._lease_left(held.incarnation) is not None:
            raise SessionBusy(f"session {session.session_id} has a turn in flight") from None

    async def _check_busy(self, flight: InFlightTurn, busy: Busy) -> float | None:
        """Seconds until the claim of another process, whose turn the request repeats, becomes void without a heartbeat.

        None if the session can be claimed again: this process had failed to release the claim, or its owner is dead.
        Raises SessionBusy for any other turn; IdempotencyMismatch; StoreUnavailable, StoreFull.
        """
        session_id = flight.session_id
        if (session_id, busy.opened_at) in self._known:
            raise SessionBusy(f"session {session_id} has a turn in flight")
        if busy.incarnation == self._own_number:
            event = TurnAbandoned(busy.turn, busy.fence, "not_released")
            held = (session_id, busy.fence, busy.incarnation, busy.opened_at)
            await self._write_release(Release(*held, self._clock(), event))
            return None
        left = await self._lease_left(busy.incarnation)
        repeats = has_key(flight, busy.retry_key, busy.body_hash) or (
            flight.retry_key is None and flight.is_retry and busy.body_hash == flight.body_hash
        )
        if left is None or repeats:
            return left
        raise SessionBusy(f"session {session_id} has a turn in flight")

    # commit

    async def commit(self, turn: Claimed, call: EngineCall, generated: Generated, *, is_alone: bool) -> TurnCommitted:
        """Commit the turn: it is on disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable,
        StoreFull."""
        session_id, stages, reply = turn.flight.session_id, turn.flight.stages, generated.reply
        chunks: Sequence[StoredChunk] = stored_chunks(reply) if reply.payloads else ()
        stages.reply_bytes = generated.answer.body.size
        stages.stored_bytes = len(reply.tokens or b"") + len(reply.exchange)
        try:
            if chunks:
                stages.stored_bytes += size_of(chunks)
                chunks = await self._stage(turn, chunks)
            entry = await self._cache.open(session_id)
            if entry.session.history != "tree":
                outcome = await self._commit_to(turn, call, generated, chunks, entry, is_alone)
            else:  # This process's commits would make each other stale.
                async with entry.committing:
                    outcome = await self._commit_to(turn, call, generated, chunks, entry, is_alone)
        except AppError as error:
            self._cache.drop(session_id)
            await self.fail(turn, error)
            raise
        if isinstance(outcome, Refused):
            self._cache.drop(session_id)
            if outcome.status == "open":
                # The session still has the claim if only its staged chunks are gone.
                await self.reject(turn, ClaimLost.code)
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        self.appended(session_id, outcome)
        self._remember(turn, call, reply)
        return next(one.event for one in outcome.events if isinstance(one.event, TurnCommitted))

    async def _commit_to(
        self,
        turn: Claimed,
        call: EngineCall,
        generated: Generated,
        chunks: Sequence[StoredChunk],
        entry: CacheEntry,
        is_alone: bool,
    ) -> Appended | Refused:
        """Other turns may have been committed since the claim: the events are decided for the state that they are
        written to. Raises StoreUnavailable, StoreFull, SessionClosed."""
        session_id, reply, limits = turn.flight.session_id, generated.reply, self._points.limits
        while True:
            if entry.pinned_upto:
                entry.pinned_upto = await self._read_pins(session_id)
            session = entry.session
            if not turn.may_hold_claim(session):
                return Refused(session.status)
            stored_once = call.sent_params, [(blob.kind, blob.hash) for blob in call.shared]
            if entry.newest_blobs is not None and entry.newest_blobs[0] == stored_once:
                blobs, new_blobs = entry.newest_blobs[1], list[StoredBlob]()
            else:
                blobs, new_blobs = blobs_of(call, session)
            events = decide.commit_turn(
                session,
                entry.index,
                turn.opened,
                turn.fence,
                turn.plan,
                turn.history,
                reply,
                blobs=blobs,
                payloads=payload_refs(turn.fence, reply) if reply.payloads else (),
                given_ids=generated.given_ids,
                odd_arguments=call.odd_arguments,
                tool_errors=call.tool_errors,
                binding=self._placement.binding(turn.choice, session, reply.engine),
                timing=turn.flight.stages.timing(),
                left_out=call.left_out,
                max_replay_bytes=self._settings.max_replay_bytes,
                uses=entry.uses,
                pinned_upto=entry.pinned_upto,
            )
            size = COMMIT_BYTES + len(reply.tokens or b"") + len(reply.exchange)
            if new_blobs or chunks:
                size += size_of([*new_blobs, *chunks])
            commit = Commit(
                session_id,
                turn.fence,
                turn.incarnation,
                turn.opened_at,
                self._clock(),
                Known(session.version, session.last_event_at, session.turns.count),
                events,
                reply.tokens,
                reply.exchange,
                new_blobs,
                chunks,
                is_alone=is_alone,
                stages=("turn" if session.is_tree else "session") if self._settings.stage_tokens_s else None,
                pinned_upto=entry.pinned_upto,
                size=size,
            )
            if turn.session.budgets and limits is not None:
                commit = limits.committing(turn, commit)
            if crash_points.ARMED:
                crash_points.reach("before_commit")
            outcome: Appended | Stale | Pinned | Refused = await self._writer.submit(commit)
            if crash_points.ARMED:
                crash_points.reach("after_commit")
            if isinstance(outcome, Appended):
                if new_blobs:
                    turn.flight.stages.stored_bytes += size_of(new_blobs)
                entry.newest_blobs = stored_once, msgspec.structs.replace(blobs, new=()) if new_blobs else blobs
                return outcome
            if isinstance(outcome, Refused):
                return outcome
            if isinstance(outcome, Pinned):
                entry.pinned_upto = outcome.upto
            entry = require_open(await self._cache.refresh(session_id), session_id)

    async def _read_pins(self, session_id: str) -> int:
        """A checkpoint that had the session may have been deleted; one that is made is found by the commit."""
        database = self._cache.database
        return await database.read(
            lambda connection: pins.read_pinned_upto(connection, database.points, session_id), session_id=session_id
        )

    async def _stage(self, turn: Claimed, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write chunks before the commit: as objects, or, if there are many bytes of them, into the database, one at a
        time. Returns the chunks that the commit must write. Raises as `Objects.stored`."""
        for stored in self._points.chunks:
            chunks = await stored(turn.flight.session_id, turn.fence, chunks)
        if size_of(chunks) <= STAGE_BYTES:
            return chunks
        for chunk in chunks:
            stage = Stage(turn.flight.session_id, turn.fence, turn.incarnation, turn.opened_at, [chunk])
            if not await self._writer.submit(stage):
                break
            if crash_points.ARMED:
                crash_points.reach("after_staged")
        return ()

    def _remember(self, turn: Claimed, call: EngineCall, reply: ValidatedReply) -> None:
        """Keep what the next request repeats of the committed turn."""
        prompt, request = call.prompt, turn.request
        if reply.calls or call.odd_arguments:
            odd = turn.entry.index.odd_calls
            if turn.opened.turn in odd:
                odd.learn(turn.opened.turn, reply.calls)
        tokens = None if prompt is None else added_text(prompt, reply.base, reply.output_ids)
        messages = b",".join((*call.new, reply.message))
        layout = request.layout if isinstance(request, ChatRequest) else None
        prefix_hasher = text = None
        if layout is not None:
            prefix_hasher = turn.history.prefix_hasher() if isinstance(turn.history, RequestHistory) else None
            text = None if reply.text is None else reply.text()
        call.messages = ()  # While the stored history is in use, the cache can only append to a copy of it.
        self._cache.remember(turn.flight.session_id, turn.opened.turn, messages, tokens, layout, prefix_hasher, text)

    # release

    async def reject(
        self,
        turn: Claimed,
        reason: str,
        status: int | None = None,
        detail: str | None = None,
        reply: Body | None = None,
        *,
        keeps_staged: bool = False,
    ) -> None:
        """Release a claim after an invalid reply or an engine's error. The start of `reply` is kept for diagnosis."""
        number, fence = turn.opened.turn, turn.fence
        if reply is None or keeps_staged:
            await self._release(
                _end(turn, self._clock(), TurnRejected(number, fence, reason, status, detail), keeps_staged)
            )
            return
        kept = reply.beginning(KEPT_BYTES)
        event = TurnRejected(number, fence, reason, status, detail, reply.size, len(kept))
        held = turn.flight.session_id, fence, turn.incarnation, turn.opened_at
        await self._release(Reject(*held, self._clock(), event, reply.size, codec.compress(kept)))

    async def fail(self, turn: Claimed, error: AppError, detail: str | None = None, reply: Body | None = None) -> None:
        """Release a claim after an error. If the store is unavailable, release it in the background. Of a turn whose
        engine did not finish, or that could not be written, a retry may go on from what it has staged."""
        keeps_staged = isinstance(error, (UpstreamUnreachable, UpstreamTimeout, StoreUnavailable))
        if isinstance(error, OverBudget) and self._points.limits is not None:
            event = TurnRejected(turn.opened.turn, turn.fence, error.code, None, detail)
            await self._release(self._points.limits.ending(turn, _end(turn, self._clock(), event), error))
            return
        if not isinstance(error, StoreUnavailable):
            await self.reject(turn, error.code, None, detail, reply, keeps_staged=keeps_staged)
            return
        event = TurnRejected(turn.opened.turn, turn.fence, error.code, None, detail)
        self._retry_release(_end(turn, self._clock(), event, keeps_staged), 0)

    async def abandon(self, turn: Claimed, reason: Literal["disconnect", "not_released"]) -> None:
        """Release the claim of a turn that no longer runs."""
        event = TurnAbandoned(turn.opened.turn, turn.fence, reason)
        await self._release(_end(turn, self._clock(), event))

    async def _release(self, operation: Release | Reject) -> None:
        """Release a claim. If the store is unavailable, retry in the background; the turn gets no error."""
        session_id, fence, event = operation.session_id, operation.fence, operation.event
        try:
            await self._write_release(operation)
        except SessionUnreadable:
            return  # Nobody can use the session, nor its claim.
        except AppError as error:
            log.warning("session %s: the claim %d could not be released yet: %s", session_id, fence, error)
            if not isinstance(operation, Release):
                held = (session_id, fence, operation.incarnation, operation.opened_at)
                operation = Release(*held, operation.at, event)
            self._retry_release(operation, RELEASE_RETRY_S)

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
        if session_id in self._followers.following:
            self._followers.notify(session_id)

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look_for_lost(), name="turnlog-claims")

    def forget(self, flight: InFlightTurn) -> None:
        """The turn is no longer in flight: what the store may still hold of its claims is nobody's."""
        for at in flight.attempts:
            left = self._known[flight.session_id, at] - 1
            if left:
                self._known[flight.session_id, at] = left
            else:
                del self._known[flight.session_id, at]
        flight.attempts = []

    async def _look_for_lost(self) -> None:
        while True:
            await asyncio.sleep(LOST_S)
            try:
                abandoned = await self._writer.submit(AbandonLost(self._incarnation(), self._clock(), self._known))
            except AppError as error:
                log.warning("leftover claims of this process could not be looked up: %s", error)
                continue
            if abandoned:
                log.info("abandoned %d leftover claims of this process", abandoned)

    async def close(self) -> None:
        """Claims that are not released by now become void when the process ends."""
        await cancelled(self._releasing)
        await cancelled(self._looking)


def _end(turn: Claimed, at: float, event: Event, keeps_staged: bool = False) -> Release:
    return Release(turn.flight.session_id, turn.fence, turn.incarnation, turn.opened_at, at, event, keeps_staged)


def _session_after(entry: CacheEntry, before: Session, outcome: Appended) -> Session:
    """The session after `outcome` was appended to `before`, the state when the write was decided, where the entry is at
    another version."""
    if outcome.events[0].seq != before.version + 1:
        # In a tree, the events of other turns may stand between: the state before the claim serves as well.
        return entry.session if entry.session.version >= before.version else before
    # The entry has advanced further meanwhile, or it left the cache.
    after = fold(before.session_id, outcome.events, before)
    assert after is not None
    return after


def _too_many_open(session_id: str, most: int) -> SessionBusy:
    error = SessionBusy(f"session {session_id} has {most} turns in flight, the most that it may have; retry later")
    error.retry, error.retry_after_s = True, 1
    return error
