"""Taking the one open turn of a session, and letting go of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.completion import IncomingPrompt
from app.domain.events import Event, TurnAbandoned, TurnOpened, TurnRejected
from app.domain.history import Incoming, Plan
from app.domain.request import ChatRequest, CompletionRequest
from app.domain.rids import rid_of
from app.domain.session import Session, apply
from app.errors import AppError, HistoryMismatch, RollbackTooDeep, SessionBusy, SessionUnreadable, StoreUnavailable
from app.sessions.cache import CacheEntry, SessionCache
from app.sessions.followers import Followers
from app.sessions.lifecycle import Clock, refusal
from app.store.log import Appended, Refused
from app.store.log_turns import Busy, Claim, Reject, Release
from app.store.ports import Writer
from app.turn.in_flight import RetryMark
from app.upstream.body import Body
from workers import codec

log = logging.getLogger("turnlog.claims")

Request = ChatRequest | CompletionRequest

RequestHistory = Incoming | IncomingPrompt
"""A request's history: a chat's messages, or a completion's prompt."""

KEPT_BYTES = 256 << 10
"""Of a refused reply, for diagnosis."""

CLAIM_TRIES = 8
"""How often a claim is tried again because another process moved the session; more is a storm."""

FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 1.0
"""How often a retry looks whether the turn that it repeats, in flight in another process, has ended; and when the
other's lease ends."""

RELEASE_AGAIN_S = 1.0
"""Between tries to let go of claims that the store could not take back."""


class ClaimedTurn(msgspec.Struct, frozen=True):
    """A claim that was taken. `session` is the state at the claim; while it stands, its turns cannot change.

    `idle_since` is when the session's event before the claim was written.
    """

    live: CacheEntry
    session: Session
    plan: Plan
    event: TurnOpened
    fence: int
    idle_since: float

    @property
    def rid(self) -> str:
        return rid_of(self.session.session_id, self.fence)


class Claims:
    """The claims of this process, which is `incarnation()` to the store; `lease_s()` of silence ends those of another.

    `lease_left` says of another incarnation how long it keeps its claims in silence; None where they are void.
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
    ) -> None:
        self._incarnation = incarnation
        self._lease_left = lease_left
        self._unreleased: dict[tuple[str, int], Release] = {}
        self._releasing: asyncio.Task[None] | None = None
        self._cache = cache
        self._writer = writer
        self._followers = followers
        self._clock = clock
        self._lease_s = lease_s

    @property
    def incarnation(self) -> int:
        """Raises StoreFull, StoreUnavailable while this process is not registered."""
        return self._incarnation()

    async def open(
        self, live: CacheEntry, request: Request, incoming: RequestHistory, mark: RetryMark, adapter: str | None
    ) -> ClaimedTurn | None:
        """Claim the session at a version at which the request fits; None if the turn is found committed."""
        session_id = live.session.session_id
        tries, look_s = 0, FIRST_LOOK_S
        while tries < CLAIM_TRIES:
            tries += 1
            # The session may have moved since it was read: while the turn waited for a gate, others read it again.
            if repeated_turn(live, mark, request) is not None:
                return None
            session = live.session
            plan = await self._match(session, incoming)
            if plan is not None:
                event = decide.open_turn(
                    session,
                    plan,
                    incarnation=self.incarnation,
                    body_hash=request.body_hash,
                    retry_key=mark.key,
                    protocol="chat" if isinstance(request, ChatRequest) else "completions",
                    adapter=adapter,
                )
                claim = Claim(session_id, session.version, session.last_event_at, self._clock(), event, self._lease_s())
                reach("before_claim")
                outcome = await self._writer.submit(claim)
                if isinstance(outcome, Appended):
                    reach("after_claim")
                    # A crash of PostgreSQL gives the fence of a claim that it took back to the next.
                    self._unreleased.pop((session_id, claim.fence), None)
                    self.appended(session_id, outcome)
                    claimed = apply(session, outcome.events[0], session_id)
                    return ClaimedTurn(live, claimed, plan, event, session.version + 1, session.last_event_at)
                if isinstance(outcome, Refused):
                    self._cache.drop(session_id)
                    raise refusal(session_id, outcome.status)
                if isinstance(outcome, Busy):
                    left = await self._in_the_way(session_id, outcome, request, mark)
                    if left is not None:
                        await asyncio.sleep(min(look_s, max(left, FIRST_LOOK_S)))
                        tries, look_s = 0, min(2 * look_s, LONGEST_LOOK_S)
            fresh = await self._cache.refresh(session_id)
            decide.require_open(fresh.session if fresh else None, session_id)
            assert fresh is not None
            live = fresh
        busy = SessionBusy(f"session {session_id} changed {CLAIM_TRIES} times while it was being claimed")
        busy.retry = True
        raise busy

    async def _match(self, session: Session, incoming: RequestHistory) -> Plan | None:
        """Where the request joins; None if the session has moved on since it was read.

        Raises SessionBusy, which comes before a history that does not fit, RollbackTooDeep, HistoryMismatch.
        """
        try:
            return incoming.join(session)
        except (RollbackTooDeep, HistoryMismatch):
            fresh = await self._cache.refresh(session.session_id)
            if fresh is not None and fresh.session.version != session.version:
                return None
            if fresh is not None and self._cache.held_elsewhere(fresh.session, self.incarnation):
                raise SessionBusy(f"session {session.session_id} has a turn in flight") from None
            raise

    async def _in_the_way(self, session_id: str, held: Busy, request: Request, mark: RetryMark) -> float | None:
        """For how long another process may keep its open turn, which the request repeats, without a sign of life.

        None where it is in the way no longer: this process had failed to let it go, or its own is gone. Raises
        SessionBusy for any other turn; IdempotencyMismatch; StoreUnavailable, StoreFull.
        """
        if held.incarnation == self.incarnation:
            event = TurnAbandoned(held.turn, held.fence, "not_released")
            await self._end(Release(session_id, held.fence, self.incarnation, self._clock(), event))
            return None
        left = await self._lease_left(held.incarnation)
        if left is None or mark.repeats(held.retry_key, held.body_hash, request.body_hash):
            return left
        raise SessionBusy(f"session {session_id} has a turn in flight")

    async def reject(
        self,
        opening: ClaimedTurn,
        reason: str,
        status: int | None = None,
        detail: str | None = None,
        reply: Body | None = None,
    ) -> None:
        """Let go of a claim because of what the engine answered; the beginning of `reply` is kept for diagnosis."""
        session_id, turn, fence = opening.session.session_id, opening.event.turn, opening.fence
        if reply is None:
            await self.release(session_id, fence, TurnRejected(turn, fence, reason, status, detail))
            return
        kept = reply.beginning(KEPT_BYTES)
        event = TurnRejected(turn, fence, reason, status, detail, len(reply), len(kept))
        await self._let_go(
            Reject(session_id, fence, self.incarnation, self._clock(), event, len(reply), codec.compress(kept))
        )

    async def fail(
        self, opening: ClaimedTurn, error: AppError, detail: str | None = None, reply: Body | None = None
    ) -> None:
        """Let go of a claim because of an error; not before the reply where the client has waited for the store."""
        if not isinstance(error, StoreUnavailable):
            await self.reject(opening, error.code, None, detail, reply)
            return
        session_id, fence = opening.session.session_id, opening.fence
        event = TurnRejected(opening.event.turn, fence, error.code, None, detail)
        self._keep_trying(Release(session_id, fence, self.incarnation, self._clock(), event), 0)

    async def release(self, session_id: str, fence: int, event: Event) -> None:
        """Let go of a claim."""
        await self._let_go(Release(session_id, fence, self.incarnation, self._clock(), event))

    async def _let_go(self, operation: Release | Reject) -> None:
        """A store that cannot take it is not an error of the turn: it is tried again until it can."""
        session_id, fence, event = operation.session_id, operation.fence, operation.event
        try:
            await self._end(operation)
        except SessionUnreadable:
            return  # Nobody can use the session, nor its claim.
        except AppError as error:
            log.warning("session %s: the claim %d could not be released yet: %s", session_id, fence, error)
            self._keep_trying(Release(session_id, fence, self.incarnation, operation.at, event), RELEASE_AGAIN_S)

    def _keep_trying(self, operation: Release, pause_s: float) -> None:
        self._unreleased[operation.session_id, operation.fence] = operation
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release_again(pause_s))

    async def _release_again(self, pause_s: float) -> None:
        while self._unreleased:
            await asyncio.sleep(pause_s)
            pause_s = RELEASE_AGAIN_S
            for key, operation in list(self._unreleased.items()):
                try:
                    await self._end(operation)
                except SessionUnreadable:
                    pass
                except AppError:
                    break  # The store is still not well, of which the first failure has told.
                self._unreleased.pop(key, None)

    async def _end(self, operation: Release | Reject) -> None:
        """Raises StoreUnavailable, StoreFull."""
        session_id = operation.session_id
        reach("before_release")
        outcome = await self._writer.submit(operation)
        reach("after_release")
        self._unreleased.pop((session_id, operation.fence), None)
        if isinstance(outcome, Appended):
            self.appended(session_id, outcome)
        else:
            self._cache.drop(session_id)

    async def close(self) -> None:
        """What could not be released by now is void with the process."""
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.gather(self._releasing, return_exceptions=True)

    def appended(self, session_id: str, outcome: Appended) -> None:
        self._cache.advance(session_id, outcome.events)
        self._followers.notify(session_id)


def repeated_turn(live: CacheEntry, mark: RetryMark, request: Request) -> int | None:
    """The committed turn that the request is a marked retry of."""
    if mark.key is not None and mark.key in live.keyed:
        number = live.keyed[mark.key]
        turn = live.session.turn(number)
    elif live.session.leaf is not None:
        turn = live.session.leaf
    else:
        return None
    return turn.number if mark.repeats(turn.retry_key, turn.body_hash, request.body_hash) else None
