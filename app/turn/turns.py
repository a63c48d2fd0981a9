"""The turns of one process, and the steps of one turn from its request to its reply.

    step        state on disk after it                   after a crash there
    read        unchanged                                the retry is a new turn
    join        unchanged: a retry waits for the turn in flight, or gets the stored reply
    gate        unchanged: while a gate is shut, there is no claim
    claim       open_turns row, TurnOpened               the dead claim is abandoned, the retry generates again
    generate    same (`generation.py`)                   same
    commit      TurnCommitted, content, no open_turns row    the retry gets the stored reply
    refusal     TurnRejected, no open_turns row          the retry generates again

No transaction is open and no lock is held while an engine works. The claim prevents two turns of a session at the
same time; its fence rejects a commit that comes too late.
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
from app.sessions.cache import CacheEntry, require_open
from app.sessions.lifecycle import refusal
from app.store.log import Refused, StoredChunk, size_of
from app.store.log_sessions import Settled
from app.store.log_turns import Commit, Stage
from app.turn.claims import repeated_turn
from app.turn.context import ClaimedTurn, Request, RequestHistory, TemplateInputs, TurnContext
from app.turn.engine_request import adapter_of, shown_kinds
from app.turn.generation import EngineRefusal, GeneratedTurn, Generation
from app.turn.in_flight import InFlightTurn, RetryMark, TurnCancelled, TurnReply, Waiter
from app.turn.large_bodies import large_bytes
from app.turn.services import TurnServices
from app.turn.session_control import ControlledTurn
from app.turn.stages import Stages, TurnStage
from app.turn.token_in import added_text
from app.turn.validation import stored_chunks
from app.upstream.dialects import asked_for, takes_rid
from app.upstream.headers import Headers

STAGE_BYTES = 512 << 10
"""Payload chunks larger than this together are written before the commit: about 2 ms of one transaction."""


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
        """Sessions whose turn waits here at a gate; True if the turn has its claim already."""
        return {name: flight.fence is not None for name, flight in self._in_flight.items() if flight.is_held}

    def close(self, session_id: str, ended: Sequence[int]) -> None:
        """The session was closed, which ended the turns with these fences: cancel their work, here or elsewhere."""
        flight = self._in_flight.get(session_id)
        if flight is not None:
            flight.cancel("session_closed")
        for fence in ended:
            if flight is None or flight.fence != fence:
                self._abort(rid_of(session_id, fence))

    async def drain(self, grace_s: float) -> None:
        """Wait at most `grace_s` for the turns in flight; the rest are abandoned when the process ends."""
        finished = [flight.finished for flight in self._in_flight.values()]
        if finished:
            await asyncio.wait(finished, timeout=grace_s)
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
        """Take one turn. Raises AppError in the order 404, 400, 409, 400 (history), then the engine's failures."""
        services, cache, large = self._services, self._services.cache, large_bytes(body)
        entry = require_open(await cache.get(session_id), session_id)
        try:
            request = await self.large_bodies.run(large, lambda: _parse(protocol, body, not large))
            adapter = self._admit(request, entry.session, waiter.token_session)
            while True:
                history, template = await self.large_bodies.run(large, lambda: self._read(request, entry.session))  # noqa: B023
                in_flight = self._in_flight.get(session_id)
                if in_flight is not None:
                    reply = await self._join(in_flight, session_id, request, mark, waiter)
                elif (repeated := repeated_turn(entry, mark, request)) is not None:
                    reply = await self._replay(session_id, repeated, request, waiter)
                else:
                    services.engines.require_some()
                    gate = services.gates.arrive(adapter)
                    flight = self._in_flight[session_id] = InFlightTurn(mark, request.body_hash)
                    context = TurnContext(
                        session_id,
                        request,
                        history,
                        template,
                        adapter,
                        client,
                        mark,
                        waiter,
                        stages,
                        flight,
                        gate,
                        large,
                    )
                    reply = await self._take_new(entry, context)
                if reply is not None:
                    return reply
                entry = require_open(await cache.get(session_id), session_id)
        except (InvalidRequest, SessionBusy, IdempotencyMismatch):
            # If another process has closed the session, that error takes precedence.
            require_open(await cache.current(session_id), session_id)
            raise

    # read

    def _admit(self, request: Request, session: Session, token_session: str | None) -> str | None:
        """The turn's adapter. Raises Unsupported for a chat's token ids at engines that ignore them, InvalidRequest,
        and Forbidden for what `token_session`, the session of the request's token, may not ask for."""
        settings = self._services.settings
        if settings.upstream_dialect == "vllm" and isinstance(request, ChatRequest) and request.ids is not None:
            raise Unsupported("input_ids: vLLM's chat route takes no token ids; /v1/completions does")
        adapter = adapter_of(session, request, self._services.fleet.fleet)
        if token_session is not None:
            require_own(request, session.session_id, token_session, settings.session_params)
        return adapter

    def _read(self, request: Request, session: Session) -> tuple[RequestHistory, TemplateInputs | None]:
        """The request's history, and the template inputs if the prompt is rendered here. Raises InvalidRequest,
        Unsupported."""
        history: RequestHistory
        if isinstance(request, ChatRequest):
            history = Incoming(request.messages, session.config.matcher)
        else:
            history = IncomingPrompt(request)
        history.check(session.leaf)
        return history, self._services.token_in.template_of(request)

    # join or replay

    async def _join(
        self, flight: InFlightTurn, session_id: str, request: Request, mark: RetryMark, waiter: Waiter
    ) -> TurnReply | None:
        """The reply of the turn in flight, which the request repeats; None if it did not commit. Raises SessionBusy."""
        if not mark.repeats(flight.mark.key, flight.body_hash, request.body_hash):
            raise SessionBusy(f"session {session_id} has a turn in flight")
        reply = await waiter.join(flight)
        return None if reply is None else msgspec.structs.replace(reply, replayed=True, joined=True)

    async def _replay(self, session_id: str, number: int, request: Request, waiter: Waiter) -> TurnReply:
        """A committed turn's reply, byte for byte. Raises SessionClosed if the session was closed meanwhile."""
        cache, writer = self._services.cache, self._services.writer
        session = require_open(await cache.current(session_id), session_id).session
        if not cache.database.is_sqlite:
            await writer.submit(Settled(session_id))
        kinds = shown_kinds(asked_for(request.params), self._services.settings)
        status, headers, body = await transcript.stored_reply(cache.database, session, number, kinds)
        waiter.grow(len(body))
        superseded = session.superseded_by(number)
        return TurnReply(status, headers, [body], turn=number, replayed=True, rolled_back=superseded)

    # gate and claim

    async def _take_new(self, entry: CacheEntry, context: TurnContext) -> TurnReply | None:
        """Take a new turn; None if the claim finds that the turn is already committed."""
        flight, stages, services = context.flight, context.stages, self._services
        context.waiter.wait_for(flight)
        reply: TurnReply | None = None
        try:
            if not context.gate.admits_at_once:
                stages.enter(TurnStage.GATE)
                await self._wait_at_gate(context.gate, flight, context.session_id)
                stages.enter(TurnStage.CLAIM)
            claimed = await services.claims.take(entry, context, is_alone=len(self._in_flight) == 1)
            if claimed is not None:
                flight.fence = claimed.fence
                stages.enter(TurnStage.PREPARE)
                reply = await self._run_claimed(context, claimed)
            return reply
        finally:
            del self._in_flight[context.session_id]
            flight.finish(reply if reply is not None and reply.turn is not None else None)

    async def _wait_at_gate(self, gate: GatePass, flight: InFlightTurn, session_id: str) -> None:
        """Wait before the claim, so that no claim exists while a gate is shut.

        Raises SessionClosed, ClientGone, Overloaded, StoreUnavailable.
        """
        try:
            with flight.waiting_at_gate(), flight.cancellable():
                await gate.wait()
        except TurnCancelled:
            raise _cancel_error(flight, session_id) from None

    # generate, commit, or release the claim

    async def _run_claimed(self, context: TurnContext, claimed: ClaimedTurn) -> TurnReply:
        """Run a claimed turn. Whatever happens, it ends with a commit, a rejection or a release."""
        services, control = self._services, context.request.control
        controlled = None if control is None else services.controls.turn(control, context.session_id)
        is_settled = False
        try:
            reply = await self._generate_and_commit(context, claimed, controlled)
            is_settled = True
            return reply
        except AppError:
            is_settled = True
            raise
        finally:
            if not is_settled:
                await services.claims.abandon(claimed, "not_released")
            if controlled is not None:
                controlled.finish(frozenset(self._aborting) if context.flight.cancel_reason else frozenset())

    async def _generate_and_commit(
        self, context: TurnContext, claimed: ClaimedTurn, controlled: ControlledTurn | None
    ) -> TurnReply:
        claims = self._services.claims
        generation = Generation(self._services, context, claimed, controlled)
        try:
            generated = await generation.run()
        except TurnCancelled:
            raise await self._cancelled(context.flight, claimed) from None
        except AppError as error:
            await claims.fail(claimed, error, str(error), generation.received)
            raise
        if isinstance(generated, EngineRefusal):
            await claims.reject(claimed, "engine_error", generated.status)
            return TurnReply(generated.status, generated.headers, generated.body.pieces)
        stages = context.stages
        stages.enter(TurnStage.COMMIT)
        await self._commit(context, claimed, generated)
        stages.enter(TurnStage.REPLY)
        return self._reply(claimed, generated)

    async def _cancelled(self, flight: InFlightTurn, claimed: ClaimedTurn) -> AppError:
        """The turn was cancelled: tell the engine, release the claim, and return the error."""
        if flight.engine_asked:
            self._abort(claimed.rid)
        if flight.cancel_reason != "session_closed":
            await self._services.claims.abandon(claimed, "disconnect")
        return _cancel_error(flight, claimed.session.session_id)

    def _abort(self, rid: str) -> None:
        """Have the engine end a generation, without waiting for it."""
        if takes_rid(self._services.settings.upstream_dialect):
            task = asyncio.create_task(self._services.engines.abort(rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _commit(self, context: TurnContext, claimed: ClaimedTurn, generated: GeneratedTurn) -> None:
        """Commit the turn: it is on disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable,
        StoreFull."""
        services, session_id = self._services, claimed.session.session_id
        result, chunks = generated.reply.result, stored_chunks(generated.reply.result)
        context.stages.reply_bytes = len(generated.body)
        context.stages.stored_bytes = len(result.facts) + len(result.wire) + size_of(chunks)
        events = decide.commit_turn(
            claimed.session,
            claimed.opened,
            claimed.fence,
            claimed.plan,
            context.history,
            generated.reply,
            blobs=generated.request.blobs,
            binding=services.placement.binding(claimed.session, generated.choice, generated.reply.engine),
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
                generated.request.new_blobs,
                await self._stage(claimed, chunks),
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
                # The session still has the claim if only its staged chunks are gone.
                await services.claims.reject(claimed, ClaimLost.code)
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        services.claims.appended(session_id, outcome)
        prompt = generated.prompt
        tokens = None if prompt is None else added_text(prompt, result.base, result.output_ids)
        messages = b",".join((*generated.new, result.message))
        services.cache.remember(session_id, claimed.opened.turn, messages, tokens)
        services.cache.snapshot_if_due(claimed.fence - 1, session_id)

    async def _stage(self, claimed: ClaimedTurn, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write large chunks before the commit, one at a time; returns the chunks that the commit must write."""
        if size_of(chunks) <= STAGE_BYTES:
            return chunks
        services, session_id = self._services, claimed.session.session_id
        for chunk in chunks:
            if not await services.writer.submit(Stage(session_id, claimed.fence, services.claims.incarnation, [chunk])):
                break
            reach("after_staged")
        return ()

    # reply

    def _reply(self, claimed: ClaimedTurn, generated: GeneratedTurn) -> TurnReply:
        """The engine's reply without the payloads that the client did not ask for."""
        shown: Collection[str] = shown_kinds(generated.options.clients, self._services.settings)
        result = generated.reply.result
        hidden = [(place.start, place.end) for place in result.places if place.kind not in shown]
        return TurnReply(
            200,
            generated.headers,
            generated.body.without(hidden),
            turn=claimed.opened.turn,
            is_aborted=result.finish_reason == "abort",
            rolled_back=len(claimed.plan.discarded),
        )


def _cancel_error(flight: InFlightTurn, session_id: str) -> AppError:
    if flight.cancel_reason == "session_closed":
        return SessionClosed(f"session {session_id} was closed during the turn")
    return ClientGone("the client disconnected, which ended its turn")


def _parse(protocol: Protocol, body: bytes, has_few_values: bool) -> Request:
    return parse_chat(body, has_few_values) if protocol == "chat" else parse_completion(body, has_few_values)
