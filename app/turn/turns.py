"""The turns of one process, and the steps of one turn from its request to its reply.

    step        state on disk after it                   after a crash there
    read        unchanged                                the retry is a new turn
    join        unchanged: a retry waits for the turn in flight, or gets the stored reply
    gate        unchanged: while a gate is shut, there is no claim
    claim       open_turns row, TurnOpened               the dead claim is abandoned, the retry generates again
    generate    same (`generation.py`)                   same
    commit      TurnCommitted, content, no open_turns row    the retry gets the stored reply
    refusal     TurnRejected, no open_turns row          the retry generates again

No transaction is open and no lock is held while an engine works. In a linear session the claim prevents two turns at
the same time. In any session its fence rejects a commit that comes too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from app.domain.completion import IncomingPrompt
from app.domain.history import Incoming
from app.domain.known_body import ContinuedBody
from app.domain.pinned import with_pinned
from app.domain.proofs import HeldProofs
from app.domain.request import ChatRequest, canonical_hash, require_own
from app.domain.rids import rid_of
from app.domain.rules import RULES
from app.domain.session import Session
from app.domain.split import ITEMS
from app.domain.turns import Turn
from app.errors import (
    AppError,
    ClientGone,
    InvalidRequest,
    Restored,
    SessionBusy,
    SessionClosed,
)
from app.fleet.gates import GatePass
from app.protocols.base import StoredTurn, WireProtocol
from app.protocols.registry import PROTOCOLS
from app.sessions import transcript
from app.sessions.cache import CacheEntry, require_open
from app.store.log import VoidedClaim
from app.store.log_sessions import Settled
from app.turn.client_reply import shown, shown_kinds
from app.turn.commits import Commits
from app.turn.context import ClaimedTurn, Request, RequestHistory, TemplateInputs, TurnContext
from app.turn.dispatch import EngineRefusal, GeneratedTurn
from app.turn.engine_request import adapter_of
from app.turn.generation import Generation
from app.turn.in_flight import Identity, InFlightTurn, Sender, TurnCancelled, TurnReply, Waiter
from app.turn.large_bodies import large_bytes, large_history
from app.turn.session_control import ControlledTurn
from app.turn.stages import Stages, TurnStage
from app.upstream.dialects import asked_for
from app.upstream.headers import Headers

if TYPE_CHECKING:
    from app.services import Services


class Turns:
    """The turns of this process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._in_flight: dict[str, list[InFlightTurn]] = {}
        self.in_flight = 0
        self._commits = Commits(services, lambda: self.in_flight == 1)
        self._aborting: set[asyncio.Task[None]] = set()
        self.large_bodies = services.large_bodies

    def held(self) -> dict[str, bool]:
        """Sessions with a turn that waits here at a gate; True if such a turn has its claim already."""
        held = {name: [one for one in flights if one.is_held] for name, flights in self._in_flight.items()}
        return {name: any(one.fence is not None for one in flights) for name, flights in held.items() if flights}

    def close(self, session_id: str, ended: Sequence[VoidedClaim]) -> None:
        """The session was closed, which ended these claims: cancel their work, here or elsewhere."""
        flights = self._in_flight.get(session_id, ())
        for flight in flights:
            flight.cancel("session_closed")
        own = {flight.fence for flight in flights}
        for fence, incarnation in ended:
            if fence not in own:
                self._abort(rid_of(session_id, fence, incarnation))

    async def drain(self, grace_s: float) -> None:
        """Wait at most `grace_s` for the turns in flight; the rest are abandoned when the process ends."""
        finished = [flight.finished for flights in self._in_flight.values() for flight in flights]
        if finished:
            await asyncio.wait(finished, timeout=grace_s)
        for task in self._aborting:
            task.cancel()

    async def take(
        self,
        session_id: str,
        protocol: WireProtocol,
        body: bytes,
        client: Headers,
        sender: Sender,
        waiter: Waiter,
        stages: Stages,
        continued: ContinuedBody | None = None,
    ) -> TurnReply:
        """Take one turn. `continued`: what the cache knows of the body (`SessionCache.continued`).

        Raises AppError in the order 404, 400, 409, 400 (history), then the engine's failures.
        """
        services, cache = self._services, self._services.cache
        entry = await cache.get(session_id)
        flight: InFlightTurn | None = None
        is_newest = cache.database.is_sqlite
        while True:
            known = None if entry is None else entry.session
            try:
                entry = require_open(entry, session_id)
                if continued is not None and continued.known not in entry.bodies:
                    continued = None
                large = large_bytes(body, continued)
                request = await self.large_bodies.run(large, partial(protocol.parse, body, not large, continued))
                if isinstance(request, ChatRequest) and (request.continues is not None or request.needs):
                    request = protocol.complete(request, await self._stored_turns(entry, request))
                if continued is not None:
                    large = large or large_history(body, request, entry.index)
                self._admit(request, session_id, waiter.token_session)
                config = entry.session.config
                if config.params or config.model is not None:
                    request = with_pinned(request, config)
                adapter = adapter_of(entry.session, request, services.fleet.fleet)
                while True:
                    await cache.read_odd_calls(entry)
                    read = partial(self._read, request, entry, sender)
                    history, template, identity = await self.large_bodies.run(large, read)
                    flights = self._in_flight.get(session_id, [])
                    in_flight = services.retries.joinable(entry, flights, identity)
                    if in_flight is not None:
                        reply = await self._join(in_flight, waiter)
                    elif (repeated := await services.retries.repeated(entry, identity)) is not None:
                        reply = await self._replay(session_id, repeated, request, waiter)
                    else:
                        if request.refusal is not None:
                            raise InvalidRequest(request.refusal)
                        self._require_free(session_id, entry.session, sender)
                        services.engines.require_some()
                        gate = services.gates.arrive(adapter)
                        flight = InFlightTurn(identity)
                        self._in_flight.setdefault(session_id, []).append(flight)
                        self.in_flight += 1
                        context = TurnContext(
                            session_id,
                            request,
                            history,
                            template,
                            adapter,
                            client,
                            identity,
                            sender.history,
                            waiter,
                            stages,
                            flight,
                            gate,
                            large,
                        )
                        reply = await self._take_new(entry, context)
                    if reply is not None:
                        return reply if request.echo is None else msgspec.structs.replace(reply, echo=request.echo)
                    entry = require_open(await cache.get(session_id), session_id)
            except AppError as error:
                # Nobody asks again after such an answer, and another process may have outdated what it rests on.
                if error.retry is not False or (flight is not None and flight.fence is not None):
                    raise
                entry = await cache.current(session_id)
                if is_newest or entry is None or entry.session is known:
                    require_open(entry, session_id)
                    raise
                is_newest = True

    # read

    def _admit(self, request: Request, session_id: str, token_session: str | None) -> None:
        """Raises Forbidden for what `token_session`, the session of the request's token, may not ask for."""
        if token_session is not None:
            require_own(request, session_id, token_session, self._services.settings.session_params)

    async def _stored_turns(self, entry: CacheEntry, request: ChatRequest) -> dict[str, StoredTurn]:
        """The session's turns that the request continues or needs, by proof. Raises SessionUnreadable.

        Of those that it needs only the replies are read: the histories of a session's turns grow with their square.
        """
        cache, session = self._services.cache, entry.session
        needed = {proof: turn.number for proof in request.needs if (turn := self._proven_chat(session, proof))}
        messages = await transcript.reply_messages(cache.database, session, list(needed.values())) if needed else {}
        found = {proof: StoredTurn([msgspec.Raw(messages[number])]) for proof, number in needed.items()}
        if request.continues is not None and (turn := self._proven_chat(session, request.continues)):
            history = ITEMS.decode(b"[" + await cache.messages(entry, turn.number) + b"]")
            found[request.continues] = StoredTurn(history, await transcript.echo(cache.database, session, turn))
        return found

    def _proven_chat(self, session: Session, proof: str) -> Turn | None:
        """Raises Restored if it is undone."""
        number = self._services.proofs.turn_of(session.session_id, proof) or 0
        if number in session.undone:
            raise Restored.of(session.session_id, number)
        turn = session.turns.get(number)
        return turn if turn is not None and turn.shape == "chat" else None

    def _read(
        self, request: Request, entry: CacheEntry, sender: Sender
    ) -> tuple[RequestHistory, TemplateInputs | None, Identity]:
        """The request's history, the template inputs if the prompt is rendered here, and what it is told by.

        Raises InvalidRequest, Unsupported.
        """
        history: RequestHistory
        if isinstance(request, ChatRequest):
            proven = HeldProofs(self._services.proofs, entry.session.session_id, request.proofs)
            history = Incoming(
                request.messages,
                entry.session.config.matcher,
                proven,
                trusts_ids=request.has_object_arguments,
                prefix=request.prefix,
            )
        else:
            history = IncomingPrompt(request)
        history.check(entry.index, entry.session, sender.agent_id)
        begun = history.hash_before_last if history.begun_reply is not None else None
        identity = Identity(
            sender.mark,
            canonical_hash(request, history.whole_hash),
            sender.agent_id,
            history.begun_reply,
            None if begun is None else canonical_hash(request, begun),
        )
        return history, self._services.token_in.template_of(request), identity

    def _require_free(self, session_id: str, session: Session, sender: Sender) -> None:
        """Raises SessionBusy if the session is linear and has a turn in flight here."""
        is_tree = session.is_tree or (session.history is None and sender.history == "tree")
        if not is_tree and self._in_flight.get(session_id):
            raise SessionBusy(f"session {session_id} has a turn in flight")

    # join or replay

    async def _join(self, flight: InFlightTurn, waiter: Waiter) -> TurnReply | None:
        """The reply of the turn in flight, which the request repeats; None if it did not commit."""
        reply = await waiter.join(flight)
        return None if reply is None else msgspec.structs.replace(reply, replayed=True, joined=True)

    async def _replay(self, session_id: str, number: int, request: Request, waiter: Waiter) -> TurnReply:
        """A committed turn's reply, byte for byte. Raises SessionClosed if the session was closed meanwhile."""
        self._services.retries.giving(session_id, number)
        try:
            return await self._stored_reply(session_id, number, request, waiter)
        except BaseException:
            self._services.retries.not_given(session_id, number)
            raise

    async def _stored_reply(self, session_id: str, number: int, request: Request, waiter: Waiter) -> TurnReply:
        cache, writer = self._services.cache, self._services.writer
        session = require_open(await cache.current(session_id), session_id).session
        if not cache.database.is_sqlite:
            await writer.submit(Settled(session_id))
        mode = self._services.settings.client_reply
        kinds = shown_kinds(asked_for(request.params), mode)
        status, headers, body = await transcript.stored_reply(cache.database, session, number, kinds)
        waiter.grow(len(body))
        return TurnReply(
            status,
            headers,
            shown([body], request.params, mode),
            turn=number,
            replayed=True,
            rolled_back=RULES[session.history].rolled_back(session, number),
            left_out=session.turn(number).left_out,
            given_ids=session.turn(number).given_ids,
        )

    # gate and claim

    async def _take_new(self, entry: CacheEntry, context: TurnContext) -> TurnReply | None:
        """Take a new turn; None if the claim finds that the turn is already committed."""
        flight, stages, services = context.flight, context.stages, self._services
        context.waiter.wait_for(flight)
        reply: TurnReply | None = None
        try:
            if not context.gate.admits_at_once:
                stages.marks.append((TurnStage.GATE, stages.clock()))
                await self._wait_at_gate(context.gate, flight, context.session_id)
                stages.marks.append((TurnStage.CLAIM, stages.clock()))
            claimed = await services.claims.take(entry, context, is_alone=self.in_flight == 1)
            if claimed is not None:
                flight.fence = claimed.fence
                context.gate.has_claim = True
                stages.marks.append((TurnStage.PREPARE, stages.clock()))
                reply = await self._run_claimed(context, claimed)
            return reply
        finally:
            services.claims.forget(context.session_id, flight)
            self._in_flight[context.session_id].remove(flight)
            self.in_flight -= 1
            if not self._in_flight[context.session_id]:
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
        stages.marks.append((TurnStage.COMMIT, stages.clock()))
        await self._commits.commit(context, claimed, generated)
        stages.marks.append((TurnStage.REPLY, stages.clock()))
        return self._reply(context.request, claimed, generated)

    async def _cancelled(self, flight: InFlightTurn, claimed: ClaimedTurn) -> AppError:
        """The turn was cancelled: tell the engine, release the claim, and return the error."""
        if flight.engine_asked:
            self._abort(claimed.rid)
        if flight.cancel_reason != "session_closed":
            await self._services.claims.abandon(claimed, "disconnect")
        return _cancel_error(flight, claimed.session.session_id)

    def _abort(self, rid: str) -> None:
        """Have the engine end a generation, without waiting for it."""
        task = asyncio.create_task(self._services.engines.abort(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    # reply

    def _reply(self, request: Request, claimed: ClaimedTurn, generated: GeneratedTurn) -> TurnReply:
        """The engine's reply without what the client did not ask for, or what no other protocol has."""
        mode = self._services.settings.client_reply
        kinds = shown_kinds(generated.options.clients, mode)
        result = generated.reply.result
        hidden = [(place.start, place.end) for place in result.places if place.kind not in kinds]
        if result.prompt is not None and not PROTOCOLS[request.protocol].is_native:
            hidden.append((result.prompt.start, result.prompt.end))
        return TurnReply(
            200,
            generated.headers,
            shown(generated.body.without(hidden), request.params, mode),
            turn=claimed.opened.turn,
            is_aborted=result.finish_reason == "abort",
            rolled_back=len(claimed.plan.discarded),
            left_out=generated.left_out,
            given_ids=generated.given_ids,
        )


def _cancel_error(flight: InFlightTurn, session_id: str) -> AppError:
    if flight.cancel_reason == "session_closed":
        return SessionClosed(f"session {session_id} was closed during the turn")
    return ClientGone("the client disconnected, which ended its turn")
