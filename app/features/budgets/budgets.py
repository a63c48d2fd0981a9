"""Holds the turns of this process to the limits of their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from app.domain import decide
from app.domain.events import LimitName, LimitReached, OnLimit, TurnCommitted
from app.domain.request import as_raw, value_of
from app.domain.rules import Plan
from app.domain.session import Session
from app.errors import AppError, InvalidRequest, OverBudget, SessionBusy
from app.features.budgets.operations import Budget, BudgetClaim, BudgetCommit, EndAtLimit, NoteLimit, read_used
from app.features.budgets.rules import NAMES, NoneLeft, Used, allowance, left, wanted_tokens
from app.process import cancelled
from app.protocols.errors import engine_error
from app.store.log import Appended
from app.store.log_turns import Claim, Commit, Limited, Release, Stale
from app.turn.in_flight import Claimed, EngineCall, Generated, Placed, TurnCancelled
from app.turn.points import Generate
from app.upstream.body import Body
from app.upstream.client import EngineReply

if TYPE_CHECKING:
    from app.services import Services

ABORT_S = 5.0
"""How long an engine has to return the tokens of a generation that it was told to end."""

FEW_TOKENS = 16
"""Where an engine has no room for all that is left, half of it is asked for, and so on down to this."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


NAME = "budgets"
"""The name of a turn's `LimitedTurn` in `InFlightTurn.features`."""


class Held(msgspec.Struct, frozen=True):
    """A budget that holds for a session; its time began at `created_at`."""

    budget: Budget
    created_at: float
    on_limit: OnLimit

    def seconds_left(self, now: float) -> float | None:
        seconds = self.budget.limits.seconds
        return None if seconds is None else self.created_at + seconds - now


class Budgets:
    """The limits of sessions, of this process's turns."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def held(self, session: Session) -> list[Held]:
        """The budgets that hold for a session: its own, that of its rollout. Raises SessionUnreadable."""
        held: list[Held] = []
        for name in session.budgets:
            of = session
            if name != session.session_id:
                entry = await self._services.cache.get(name)
                if entry is None:
                    continue
                of = entry.session
            if of.config.limits is not None:
                held.append(Held(Budget(name, of.config.limits), of.created_at, of.config.on_limit))
        return held

    async def claiming(self, placed: Placed, plan: Plan, session: Session, claim: Claim) -> Claim:
        """The claim that also reserves what the turn may use. Raises InvalidRequest, StoreUnavailable."""
        held = await self.held(session)
        params = placed.request.params
        try:
            wanted = wanted_tokens([value_of(params.get(name), name) for name in NAMES])
        except ValueError:
            raise InvalidRequest("max_tokens must be an integer, at least 1") from None
        placed.flight.features[NAME] = LimitedTurn(self._services, held, session, plan.parent, wanted)
        return BudgetClaim(
            **msgspec.structs.asdict(claim),
            budgets=[one.budget for one in held],
            wanted=wanted,
            reached=self._reached(plan, session, held),
        )

    def _reached(self, plan: Plan, session: Session, held: Sequence[Held]) -> LimitName | None:
        """A limit that needs no look at the store: the time, and the context if the turn continues one that is full."""
        now = self._services.clock()
        if _is_over(held, now):
            return "seconds"
        parent = decide.token_parent(session, plan)
        most = _context(held)
        return "context" if parent is not None and most is not None and parent.token_count >= most else None

    async def require_left(self, session: Session) -> None:
        """Raises OverBudget if a limit of the session is used up; StoreUnavailable."""
        held, now = await self.held(session), self._services.clock()
        if _is_over(held, now):
            raise OverBudget.of(session.session_id, "seconds")
        used = [(one.budget.limits, await self._used(one)) for one in held]
        verdict = allowance(used, None)
        if isinstance(verdict, NoneLeft) and not verdict.is_reserved:
            raise OverBudget.of(session.session_id, verdict.limit)

    async def refused(self, placed: Placed, outcome: Limited) -> AppError | None:
        """The error of a turn that was not claimed; None if a process that has reserved something is gone, which ends
        its claims. What the turn continues is noted to have reached the limit, once."""
        session_id = placed.flight.session_id
        if outcome.reserved_by:
            for incarnation in outcome.reserved_by - {self._services.registration.incarnation()}:
                if await self._services.lease_left(incarnation) is None:
                    return None
            busy = SessionBusy(f"turns in flight have reserved what session {session_id} has left of {outcome.limit}")
            busy.retry, busy.retry_after_s = True, 1
            return busy
        limited: LimitedTurn = placed.flight.features[NAME]
        event = LimitReached(outcome.limit, limited.parent, refused=True)
        session: Session | None = placed.session
        while session is not None and event.turn not in session.reached:
            noted = await self._services.writer.submit(
                NoteLimit(session_id, self._services.clock(), event, session.version)
            )
            if not isinstance(noted, Stale):
                if isinstance(noted, Appended):
                    self._services.claims.appended(session_id, noted)
                break
            entry = await self._services.cache.refresh(session_id)  # Another request may have been refused at once.
            session = None if entry is None else entry.session
        return OverBudget.of(session_id, outcome.limit)

    def claimed(self, turn: Claimed) -> None:
        """The turn has its claim: its request asks for no more than what was reserved."""
        limited: LimitedTurn = turn.flight.features[NAME]
        limited.claimed(turn)

    async def around(self, generate: Generate, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Generate within the limits, if some held for the turn's claim. Raises as `generate`, OverBudget."""
        limited: LimitedTurn | None = turn.flight.features.get(NAME)
        return await (generate(turn, call) if limited is None else limited.around(generate, turn, call))

    def is_late(self, turn: Claimed) -> bool:
        """Is the turn's time over?"""
        limited: LimitedTurn | None = turn.flight.features.get(NAME)
        return limited is not None and limited.is_late

    def committing(self, turn: Claimed, commit: Commit) -> Commit:
        """The commit that also counts what the turn has used."""
        limited: LimitedTurn | None = turn.flight.features.get(NAME)
        return commit if limited is None else limited.committing(commit)

    def ending(self, turn: Claimed, release: Release, error: OverBudget) -> Release:
        """The release of a turn that a limit has ended."""
        limited: LimitedTurn = turn.flight.features[NAME]
        return limited.ending(release, error)

    async def fields(self, session: Session) -> dict[str, Any]:
        """What `GET /sessions/{id}` says of the budgets that hold for the session."""
        if not session.budgets:
            return {}
        told = []
        for one in await self.held(session):
            used, limits = await self._used(one), one.budget.limits
            seconds = max(self._services.clock() - one.created_at, 0.0)
            told.append(
                {
                    "session_id": one.budget.session_id,
                    "limits": limits,
                    "used": {"turns": used.turns, "tokens": used.tokens, "seconds": round(seconds, 3)},
                    "in_flight": {"turns": used.open_turns, "tokens": used.reserved},
                    "left": left(limits, used, round(seconds, 3)),
                }
            )
        newest = next(reversed(session.reached.values()), None)
        return {"budgets": told, "limit": newest}

    async def _used(self, held: Held) -> Used:
        return await self._services.database.read(partial(read_used, budget=held.budget))


class LimitedTurn:
    """The limits of one turn, which continues turn `parent`. `wanted`: what its client asked for at most.

    `_most` is what it may sample, and `_cut_by` the limit that made that less than its client wants.
    """

    def __init__(
        self, services: Services, held: Sequence[Held], session: Session, parent: int, wanted: int | None
    ) -> None:
        self._services = services
        self._held = held
        self._session_id = session.session_id
        self._ends_as_length = all(one.on_limit == "length" for one in held)
        self._wanted = wanted
        self.parent = parent
        self._most: int | None = None
        self._cut_by: LimitName | None = None
        self.is_late = False
        self._aborting: asyncio.Task[None] | None = None
        self._ended_by: LimitName | None = None

    # a claim

    def claimed(self, turn: Claimed) -> None:
        """The request asks for no more than what was reserved."""
        reserved = turn.opened.reserved
        if reserved:
            self._cut(turn, reserved, "tokens")

    def _cut(self, turn: Claimed, most: int, by: LimitName) -> None:
        if self._most is not None and most >= self._most:
            return
        if self._most is None and self._wanted is not None and most >= self._wanted:
            self._most = self._wanted
            return
        self._most, self._cut_by = most, by
        self._ask_for(turn, most)

    def _ask_for(self, turn: Claimed, most: int) -> None:
        """Let the request, and the call if that is made already, ask for at most so many tokens."""
        turn.request = msgspec.structs.replace(turn.request, params=_with_most(turn.request.params, most))
        if turn.call is not None:
            turn.call.params = msgspec.json.encode(_with_most(_FIELDS.decode(turn.call.params), most))

    # a generation

    async def around(self, generate: Generate, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Generate within the limits. Raises as `generate`, OverBudget."""
        self._fit_context(turn, call)
        timer = self._start_timer(turn)
        try:
            generated = await generate(turn, call)
            while self._has_no_room(generated):
                self._ask_for_half(turn)
                generated = await generate(turn, call)
        except (TurnCancelled, AppError) as error:
            if self.is_late and turn.flight.cancel_reason in (None, "limit"):
                raise OverBudget.of(self._session_id, "seconds") from error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            await cancelled(self._aborting)
        return await self._settle(turn, call, generated)

    def _fit_context(self, turn: Claimed, call: EngineCall) -> None:
        """Where the prompt's ids are known, the reply has what is left of the context. Raises OverBudget."""
        most, ids = _context(self._held), call.ids
        if most is None or ids is None:
            return
        room = most - (ids.text.count(b",") + 1 if ids.text else 0)
        if room <= 0:
            raise OverBudget.of(self._session_id, "context")
        self._cut(turn, room, "context")

    def _has_no_room(self, generated: Generated | EngineReply) -> bool:
        """Has the engine's model no room for what is asked for on behalf of a client that gave no limit?"""
        if isinstance(generated, Generated) or self._wanted is not None:
            return False
        if self._most is None or self._most <= FEW_TOKENS or generated.status != 400:
            return False
        return engine_error(400, generated.body.joined()).is_context

    def _ask_for_half(self, turn: Claimed) -> None:
        assert self._most is not None
        self._most, self._cut_by = self._most // 2, None
        self._ask_for(turn, self._most)

    def _start_timer(self, turn: Claimed) -> asyncio.TimerHandle | None:
        now = self._services.clock()
        times = [seconds for one in self._held if (seconds := one.seconds_left(now)) is not None]
        if not times:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(max(min(times), 0.0), self._time_is_over, turn)

    def _time_is_over(self, turn: Claimed) -> None:
        """End the generation. An engine that has it returns the tokens so far, for which it has ABORT_S."""
        self.is_late = True
        engine = self._services.engines.engine_of(turn.rid)
        if turn.flight.task is None or engine is None:
            turn.flight.cancel("limit")  # A reply that is there already is not lost by it.
        else:
            self._aborting = asyncio.create_task(self._abort(turn, engine))

    async def _abort(self, turn: Claimed, engine: str) -> None:
        member = self._services.engines.members.get(engine)
        await self._services.control.abort(engine, [turn.rid], None if member is None else member.dialect)
        await asyncio.sleep(ABORT_S)
        if turn.flight.task is not None:
            turn.flight.cancel("limit")

    async def _settle(
        self, turn: Claimed, call: EngineCall, generated: Generated | EngineReply
    ) -> Generated | EngineReply:
        """Did a limit end the generation? Raises OverBudget if the turn ends with it."""
        if isinstance(generated, EngineReply):
            if self.is_late:
                raise OverBudget.of(self._session_id, "seconds")
            return generated
        reply = generated.reply
        if self.is_late and reply.finish_reason == "abort":
            self._ended_by = "seconds"
        elif reply.finish_reason == "length" and self._cut_by is not None and reply.output_tokens >= (self._most or 0):
            self._ended_by = self._cut_by
        if self._ended_by is None:
            return generated
        if not self._ends_as_length or not reply.output_tokens or generated.answer.is_native:
            raise OverBudget.of(self._session_id, self._ended_by, reply.output_tokens)
        return await self._as_length(turn, call, generated) if reply.finish_reason == "abort" else generated

    async def _as_length(self, turn: Claimed, call: EngineCall, generated: Generated) -> Generated:
        """What an engine returned of a generation that it was told to end becomes a reply that ended as `length`."""
        reply = generated.reply
        body = _ended_as_length(generated.answer.body.joined(), reply.output_tokens)
        answer = msgspec.structs.replace(generated.answer, body=Body([body]))
        ended = await self._services.engine_calls.validate_body(turn, call, answer, call.stored)
        return Generated(
            answer, msgspec.structs.replace(ended, parts=reply.parts, weight_versions=reply.weight_versions)
        )

    # an end

    def committing(self, commit: Commit) -> Commit:
        """The commit that also counts what the turn has used."""
        fields = msgspec.structs.asdict(commit)
        fields["events"] = [
            msgspec.structs.replace(event, limit=self._ended_by) if isinstance(event, TurnCommitted) else event
            for event in commit.events
        ]
        return BudgetCommit(**fields)

    def ending(self, release: Release, error: OverBudget) -> Release:
        """The release of a turn that a limit has ended, with what was generated in vain."""
        reached = LimitReached(error.limit, self.parent, error.sampled)
        ended = EndAtLimit(**msgspec.structs.asdict(release), sampled=error.sampled)
        return msgspec.structs.replace(ended, then=[reached])


def _is_over(held: Sequence[Held], now: float) -> bool:
    """Is the time of one of the budgets over?"""
    return any((seconds := one.seconds_left(now)) is not None and seconds <= 0 for one in held)


def _context(held: Sequence[Held]) -> int | None:
    return min((most for one in held if (most := one.budget.limits.context) is not None), default=None)


def _with_most(params: Any, most: int) -> dict[str, msgspec.Raw]:
    """The parameters with at most so many tokens, under the names that they have."""
    cut = dict(params)
    named = [name for name in NAMES if value_of(cut.get(name), name) is not None]
    for name in named or NAMES[:1]:
        value = value_of(cut.get(name), name)
        cut[name] = msgspec.Raw(str(most if value is None else min(value, most)).encode())
    return cut


def _ended_as_length(body: bytes, tokens: int) -> bytes:
    """A reply of either engine with another finish reason."""
    root = _FIELDS.decode(body)
    choice = msgspec.json.decode(root["choices"], type=list[dict[str, msgspec.Raw]])[0]
    choice["finish_reason"] = msgspec.Raw(b'"length"')
    for name in ("matched_stop", "stop_reason"):
        if name in choice:
            choice[name] = msgspec.Raw(b"null")
    meta = _FIELDS.decode(choice["meta_info"]) if "meta_info" in choice else {}
    if "finish_reason" in meta:
        meta["finish_reason"] = as_raw({"type": "length", "length": tokens})
        choice["meta_info"] = as_raw(meta)
    return msgspec.json.encode({**root, "choices": [choice]})
