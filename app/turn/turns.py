"""The turns of one process: who is in flight, and one turn from its request to its reply.

    step        state on disk behind it                      after a crash there
    read        as before                                    the retry is a new turn
    join        as before: a retry waits for the turn in flight, or gets the stored reply
    gate        as before: while a gate is shut, no claim stands
    claim       open_turns row, TurnOpened                   the dead claim is abandoned, the retry generates anew
    generate    same (`generation.py`)                       same
    commit      TurnCommitted, content, no open_turns row    the retry gets the stored reply
    refusal     TurnRejected, no open_turns row              the retry generates anew

No transaction is open and no lock is held while an engine works. The claim keeps two turns of a session apart; its
fence keeps out one that comes too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.completion import IncomingPrompt
from app.domain.events import Protocol
from app.domain.history import Incoming
from app.domain.holding import require_own
from app.domain.request import ChatRequest, parse_chat, parse_completion
from app.domain.rids import rid_of
from app.domain.session import Session
from app.errors import (
    AppError,
    ClaimLost,
    ClientGone,
    IdempotencyMismatch,
    InvalidRequest,
    SessionBusy,
    SessionClosed,
    Unsupported,
)
from app.fleet.gates import GatePass
from app.sessions import transcript
from app.sessions.cache import CacheEntry
from app.sessions.lifecycle import refusal
from app.store.log import Refused, StoredChunk, size_of
from app.store.log_sessions import Settled
from app.store.log_turns import Commit, Stage
from app.turn.claims import repeated_turn
from app.turn.context import ClaimedTurn, Request, RequestHistory, Template, TurnContext
from app.turn.engine_request import adapter_of, shown_kinds
from app.turn.generation import EngineRefusal, GeneratedTurn, Generation
from app.turn.in_flight import InFlightTurn, RetryMark, TurnCut, TurnReply, Waiter
from app.turn.large_bodies import large_bytes
from app.turn.services import TurnServices
from app.turn.session_control import ControlledTurn
from app.turn.stages import Stages, TurnStage
from app.turn.token_in import added_text
from app.turn.validation import stored_chunks
from app.upstream.dialects import asked_for, takes_rid
from app.upstream.headers import Headers

STAGE_BYTES = 512 << 10
"""Chunks of more than this are written before the commit: about two milliseconds of one transaction."""


class Turns:
    """The turns of this process."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services
        self._in_flight: dict[str, InFlightTurn] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self.large_bodies = services.large_bodies

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def held(self) -> dict[str, bool]:
        """Sessions whose turn waits here at a gate; does it have its claim already?"""
        return {name: flight.fence is not None for name, flight in self._in_flight.items() if flight.is_held}

    def close(self, session_id: str, ended: Sequence[int]) -> None:
        """The session was closed, which ended turns under these fences: end the work on them, here or elsewhere."""
        flight = self._in_flight.get(session_id)
        if flight is not None:
            flight.cut_off("session_closed")
        for fence in ended:
            if flight is None or flight.fence != fence:
                self._abort(rid_of(session_id, fence))

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._in_flight.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()

    async def take(
        self,
        session_id: str,
        protocol: Protocol,
        body: bytes,
        client: Headers,
        mark: RetryMark,
        waiter: Waiter,
        stages: Stages,
    ) -> TurnReply:
        """One turn. Raises AppError in the order 404, 400, 409, 400 (history), then what the engine did."""
        try:
            return await self._take(session_id, protocol, body, client, mark, waiter, stages)
        except (InvalidRequest, SessionBusy, IdempotencyMismatch):
            # Another process may have closed the session, which comes before anything that is wrong with a request.
            entry = await self._services.cache.current(session_id)
            decide.require_open(entry.session if entry else None, session_id)
            raise

    async def _take(
        self,
        session_id: str,
        protocol: Protocol,
        body: bytes,
        client: Headers,
        mark: RetryMark,
        waiter: Waiter,
        stages: Stages,
    ) -> TurnReply:
        """Read the request, find out whether it repeats a turn, and if not take a turn."""
        services = self._services
        large = large_bytes(body)
        entry = await self._open_entry(session_id)
        request = await services.large_bodies.run(large, lambda: _parsed(protocol, body, not large))
        adapter = self._admitted(request, entry.session, waiter.token_session)
        while True:
            history, template = await services.large_bodies.run(large, lambda: self._read(request, entry.session))  # noqa: B023
            in_flight = self._in_flight.get(session_id)
            if in_flight is not None:
                reply = await self._joined(in_flight, session_id, request, mark, waiter)
            elif (repeated := repeated_turn(entry, mark, request)) is not None:
                reply = await self._replayed(session_id, repeated, request, waiter)
            else:
                services.engines.require_some()
                gate = services.gates.arrive(adapter)
                flight = self._in_flight[session_id] = InFlightTurn(mark, request.body_hash)
                context = TurnContext(
                    session_id, request, history, template, adapter, client, mark, waiter, stages, flight, gate, large
                )
                reply = await self._taken(entry, context)
            if reply is not None:
                return reply
            entry = await self._open_entry(session_id)

    # read

    async def _open_entry(self, session_id: str) -> CacheEntry:
        """Raises SessionNotFound, SessionClosed."""
        entry = await self._services.cache.get(session_id)
        decide.require_open(entry.session if entry else None, session_id)
        assert entry is not None
        return entry

    def _admitted(self, request: Request, session: Session, token_session: str | None) -> str | None:
        """The turn's adapter. Raises Unsupported for a chat's own ids where engines ignore them, InvalidRequest,
        Forbidden for what `token_session`, whose token came with the request, may not ask for."""
        settings = self._services.settings
        if settings.upstream_dialect == "vllm" and isinstance(request, ChatRequest) and request.ids is not None:
            raise Unsupported("input_ids: vLLM's chat route takes no token ids; /v1/completions does")
        adapter = adapter_of(session, request, self._services.fleet.fleet)
        if token_session is not None:
            require_own(request, session.session_id, token_session, settings.session_params)
        return adapter

    def _read(self, request: Request, session: Session) -> tuple[RequestHistory, Template | None]:
        """Its history, and what its prompt will be rendered with, if it will. Raises InvalidRequest, Unsupported."""
        history: RequestHistory
        if isinstance(request, ChatRequest):
            history = Incoming(request.messages, session.config.matcher)
        else:
            history = IncomingPrompt(request)
        history.check(session.leaf)
        return history, self._services.token_in.template_of(request)

    # join or replay

    async def _joined(
        self, flight: InFlightTurn, session_id: str, request: Request, mark: RetryMark, waiter: Waiter
    ) -> TurnReply | None:
        """The reply of a turn in flight that the request repeats; None if that did not commit. Raises SessionBusy."""
        if not mark.repeats(flight.mark.key, flight.body_hash, request.body_hash):
            raise SessionBusy(f"session {session_id} has a turn in flight")
        joined = await waiter.join(flight)
        return None if joined is None else msgspec.structs.replace(joined, replayed=True, joined=True)

    async def _replayed(self, session_id: str, number: int, request: Request, waiter: Waiter) -> TurnReply:
        """A committed turn's reply, to the byte, unless the session was closed meanwhile."""
        cache, writer = self._services.cache, self._services.writer
        entry = await cache.current(session_id)
        session = decide.require_open(entry.session if entry else None, session_id)
        if not cache.database.is_sqlite:
            await writer.submit(Settled(session_id))
        kinds = shown_kinds(asked_for(request.params), self._services.settings)
        status, headers, body = await transcript.stored_reply(cache.database, session, number, kinds)
        waiter.grow(len(body))
        superseded = session.superseded_by(number)
        return TurnReply(status, headers, [body], turn=number, replayed=True, rolled_back=superseded)

    # gate and claim

    async def _taken(self, entry: CacheEntry, context: TurnContext) -> TurnReply | None:
        """A turn of its own; None where the claim finds that it is committed already."""
        flight, stages, services = context.flight, context.stages, self._services
        context.waiter.wait_for(flight)
        reply: TurnReply | None = None
        try:
            if not context.gate.admits_at_once:
                stages.enter(TurnStage.GATE)
                await self._held_back(context.gate, flight, context.session_id)
                stages.enter(TurnStage.CLAIM)
            claimed = await services.claims.take(entry, context, is_alone=len(self._in_flight) == 1)
            if claimed is not None:
                flight.fence = claimed.fence
                stages.enter(TurnStage.PREPARE)
                reply = await self._settled(context, claimed)
            return reply
        finally:
            del self._in_flight[context.session_id]
            flight.land(reply if reply is not None and reply.turn is not None else None)

    async def _held_back(self, gate: GatePass, flight: InFlightTurn, session_id: str) -> None:
        """Before the claim, so that none stands while a gate is shut.

        Raises SessionClosed, ClientGone, Overloaded, StoreUnavailable.
        """
        try:
            with flight.held(), flight.may_be_cut():
                await gate.wait()
        except TurnCut:
            raise _why_cut(flight, session_id) from None

    # generate, commit, or release the claim

    async def _settled(self, context: TurnContext, claimed: ClaimedTurn) -> TurnReply:
        """A turn that holds its claim: whatever happens, its end is a commit, a refusal or a release."""
        services, control = self._services, context.request.control
        controlled = None if control is None else services.controls.turn(control, context.session_id)
        is_settled = False
        try:
            reply = await self._generated(context, claimed, controlled)
            is_settled = True
            return reply
        except AppError:
            is_settled = True
            raise
        finally:
            if not is_settled:
                await services.claims.abandon(claimed, "not_released")
            if controlled is not None:
                controlled.finish(frozenset(self._aborting) if context.flight.cut else frozenset())

    async def _generated(
        self, context: TurnContext, claimed: ClaimedTurn, controlled: ControlledTurn | None
    ) -> TurnReply:
        claims = self._services.claims
        generation = Generation(self._services, context, claimed, controlled)
        try:
            made = await generation.run()
        except TurnCut:
            raise await self._cut(context.flight, claimed) from None
        except AppError as error:
            await claims.fail(claimed, error, str(error), generation.received)
            raise
        if isinstance(made, EngineRefusal):
            await claims.reject(claimed, "engine_error", made.status)
            return TurnReply(made.status, made.headers, made.body.pieces)
        stages = context.stages
        stages.enter(TurnStage.COMMIT)
        await self._commit(context, claimed, made)
        stages.enter(TurnStage.REPLY)
        return self._reply(claimed, made)

    async def _cut(self, flight: InFlightTurn, claimed: ClaimedTurn) -> AppError:
        """The turn was ended from outside: tell the engine, release the claim, and say why."""
        if flight.asked:
            self._abort(claimed.rid)
        if flight.cut != "session_closed":
            await self._services.claims.abandon(claimed, "disconnect")
        return _why_cut(flight, claimed.session.session_id)

    def _abort(self, rid: str) -> None:
        """Have the engine end a generation, without waiting for it."""
        if takes_rid(self._services.settings.upstream_dialect):
            task = asyncio.create_task(self._services.engines.abort(rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _commit(self, context: TurnContext, claimed: ClaimedTurn, made: GeneratedTurn) -> None:
        """On disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable, StoreFull."""
        services, session_id = self._services, claimed.session.session_id
        result, chunks = made.reply.result, stored_chunks(made.reply.result)
        context.stages.reply_bytes = len(made.body)
        context.stages.stored_bytes = len(result.facts) + len(result.wire) + size_of(chunks)
        events = decide.commit_turn(
            claimed.session,
            claimed.opened,
            claimed.fence,
            claimed.plan,
            context.history,
            made.reply,
            blobs=made.request.blobs,
            binding=services.placement.binding(claimed.session, made.choice, made.reply.engine),
            timing=context.stages.timing(),
        )
        try:
            operation = Commit(
                session_id,
                claimed.fence,
                services.claims.incarnation,
                services.clock(),
                events,
                result.facts,
                result.wire,
                made.request.new_blobs,
                await self._staged(claimed, chunks),
                is_alone=len(self._in_flight) == 1,
            )
            reach("before_commit")
            outcome = await services.writer.submit(operation)
            reach("after_commit")
        except AppError as error:
            services.cache.drop(session_id)
            await services.claims.fail(claimed, error)
            raise
        if isinstance(outcome, Refused):
            services.cache.drop(session_id)
            if outcome.status == "open":
                # The claim is still held where only what was staged is gone.
                await services.claims.reject(claimed, ClaimLost.code)
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        services.claims.appended(session_id, outcome)
        prompt = made.prompt
        tokens = None if prompt is None else added_text(prompt, result.base, result.output_ids)
        messages = b",".join((*made.new, result.message))
        services.cache.remember(session_id, claimed.opened.turn, messages, tokens)
        services.cache.snapshot_if_due(claimed.fence - 1, session_id)

    async def _staged(self, claimed: ClaimedTurn, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write large chunks ahead of the commit, a few at a time; returns those that are left for it."""
        if size_of(chunks) <= STAGE_BYTES:
            return chunks
        services, session_id = self._services, claimed.session.session_id
        for chunk in chunks:
            if not await services.writer.submit(Stage(session_id, claimed.fence, services.claims.incarnation, [chunk])):
                break
            reach("after_staged")
        return ()

    # reply

    def _reply(self, claimed: ClaimedTurn, made: GeneratedTurn) -> TurnReply:
        """The engine's reply, without the payloads that the client did not ask for."""
        shown: Collection[str] = shown_kinds(made.options.clients, self._services.settings)
        result = made.reply.result
        hidden = [(place.start, place.end) for place in result.places if place.kind not in shown]
        return TurnReply(
            200,
            made.headers,
            made.body.without(hidden),
            turn=claimed.opened.turn,
            is_aborted=result.finish_reason == "abort",
            rolled_back=len(claimed.plan.discarded),
        )


def _why_cut(flight: InFlightTurn, session_id: str) -> AppError:
    if flight.cut == "session_closed":
        return SessionClosed(f"session {session_id} was closed during the turn")
    return ClientGone("the client disconnected, which ended its turn")


def _parsed(protocol: Protocol, body: bytes, holds_few: bool) -> Request:
    return parse_chat(body, holds_few) if protocol == "chat" else parse_completion(body, holds_few)
