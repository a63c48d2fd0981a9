"""One turn: exists, parsed, claimed, matched, forwarded, validated, committed, replied - in this order.

    state on disk after each step           after a crash there
    claim: open_turns row, TurnOpened       the dead claim is abandoned, the retry generates anew
    engine call: nothing                    same
    commit: TurnCommitted, content, no      the retry gets the stored reply
      open_turns row
    refusal: TurnRejected, no row           the retry generates anew

No transaction is open and no lock is held while an engine works. What keeps two turns of a session apart
is the claim; what keeps a late one out is its fence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.completion import IncomingPrompt
from app.domain.events import Protocol, TurnAbandoned
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
from app.fleet.engines import Engines
from app.fleet.gates import Gates
from app.fleet.state import FleetState
from app.sessions import transcript
from app.sessions.cache import SessionCache
from app.sessions.lifecycle import Clock, refusal
from app.settings import Settings
from app.store.log import Refused, StoredChunk
from app.store.log_sessions import Settled
from app.store.log_turns import Commit, Stage
from app.store.ports import Writer
from app.turn.claims import ClaimedTurn, Claims, Request, RequestHistory, repeated_turn
from app.turn.engine_request import adapter_of, shown_kinds
from app.turn.generation import EngineRefusal, GeneratedTurn, Generator, TurnContext
from app.turn.in_flight import InFlightTurn, RetryMark, TurnCut, TurnReply, Waiter
from app.turn.large_bodies import LargeBodies, large_bytes
from app.turn.placement import Placement
from app.turn.session_control import SessionControls
from app.turn.stages import Stages, TurnStage
from app.turn.token_in import TokenIn, added_text
from app.turn.validation import ReplyValidator
from app.upstream.body import Body
from app.upstream.dialects import asked_for, takes_rid
from app.upstream.headers import Headers
from workers import codec
from workers.job import PayloadRange

STAGE_BYTES = 512 << 10
"""Chunks of more than this are written before the commit: about two milliseconds of one transaction."""


class Turns:
    """The turns of this process. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        *,
        cache: SessionCache,
        claims: Claims,
        writer: Writer,
        engines: Engines,
        fleet: FleetState,
        gates: Gates,
        judge: ReplyValidator,
        token_in: TokenIn,
        controls: SessionControls,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._token_in = token_in
        self._controls = controls
        self._fleet = fleet
        self._gates = gates
        self._placement = Placement(engines, cache, settings, clock)
        self.large_bodies = LargeBodies()
        self._generator = Generator(
            large_bodies=self.large_bodies,
            cache=cache,
            engines=engines,
            placement=self._placement,
            gates=gates,
            judge=judge,
            token_in=token_in,
            settings=settings,
            clock=clock,
        )
        self._cache = cache
        self._claims = claims
        self._writer = writer
        self._engines = engines
        self._settings = settings
        self._clock = clock
        self._flights: dict[str, InFlightTurn] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def held(self) -> dict[str, bool]:
        """Sessions whose turn waits here at a gate; does it have its claim already?"""
        return {name: flight.fence is not None for name, flight in self._flights.items() if flight.is_held}

    def close(self, session_id: str, ended: Sequence[int]) -> None:
        """The session was closed, which ended turns under these fences: end the work on them, here or elsewhere."""
        flight = self._flights.get(session_id)
        if flight is not None:
            flight.cut_off("session_closed")
        for fence in ended:
            if flight is None or flight.fence != fence:
                self._abort(session_id, rid_of(session_id, fence))

    async def take(
        self,
        session_id: str,
        protocol: Protocol,
        body: bytes,
        client: Headers,
        mark: RetryMark,
        reader: Waiter,
        stages: Stages,
    ) -> TurnReply:
        """One turn. Raises AppError in the order 404, 400, 409, 400 (history), then what the engine did."""
        try:
            return await self._take(session_id, protocol, body, client, mark, reader, stages)
        except (InvalidRequest, SessionBusy, IdempotencyMismatch):
            # Another process may have closed the session, which comes before anything that is wrong with a request.
            live = await self._cache.current(session_id)
            decide.require_open(live.session if live else None, session_id)
            raise

    async def _take(
        self,
        session_id: str,
        protocol: Protocol,
        body: bytes,
        client: Headers,
        mark: RetryMark,
        reader: Waiter,
        stages: Stages,
    ) -> TurnReply:
        request: Request | None = None
        large = large_bytes(body)
        while True:
            live = await self._cache.get(session_id)
            session = decide.require_open(live.session if live else None, session_id)
            assert live is not None
            if request is None:
                request = await self.large_bodies.run(large, lambda: _parsed(protocol, body, not large))
                self._require_takes_ids(request)
                adapter = adapter_of(session, request, self._fleet.fleet)
                if reader.token_session is not None:
                    require_own(request, session_id, reader.token_session, self._settings.session_params)
            incoming = await self.large_bodies.run(large, lambda: _arrival(request, session))  # noqa: B023
            template = await self.large_bodies.run(large, lambda: self._token_in.check(request))  # noqa: B023
            flight = self._flights.get(session_id)
            if flight is not None:
                if not mark.repeats(flight.mark.key, flight.body_hash, request.body_hash):
                    raise SessionBusy(f"session {session_id} has a turn in flight")
                joined = await reader.join(flight)
                if joined is not None:
                    return msgspec.structs.replace(joined, replayed=True, joined=True)
                continue
            repeated = repeated_turn(live, mark, request)
            if repeated is not None:
                again = await self._replay(session_id, repeated, self._shown(asked_for(request.params)))
                reader.grow(sum(map(len, again.parts)))
                return again
            self._engines.require_some()
            flight = self._flights[session_id] = InFlightTurn(mark, request.body_hash)
            reader.wait_for(flight)
            reply: TurnReply | None = None
            try:
                ticket = self._gates.ticket()
                if not self._gates.may_enter(adapter):
                    stages.enter(TurnStage.GATE)
                    await self._held_back(flight, adapter, ticket, session_id)
                    stages.enter(TurnStage.CLAIM)
                opening = await self._claims.open(live, request, incoming, mark, adapter)
                if opening is not None:
                    flight.fence = opening.fence
                    stages.enter(TurnStage.PREPARE)
                    control = None if request.control is None else self._controls.turn(request.control, session_id)
                    reply = await self._settled(
                        TurnContext(
                            flight, opening, request, template, incoming, client, reader, stages, ticket, control, large
                        )
                    )
                    return reply
            finally:
                del self._flights[session_id]
                flight.land(reply if reply is not None and reply.turn is not None else None)

    def _require_takes_ids(self, request: Request) -> None:
        """Raises Unsupported for a chat's own ids where the engines are known to ignore them."""
        if self._settings.upstream_dialect == "vllm" and isinstance(request, ChatRequest) and request.ids is not None:
            raise Unsupported("input_ids: vLLM's chat route takes no token ids; /v1/completions does")

    async def _held_back(self, flight: InFlightTurn, adapter: str | None, ticket: int, session_id: str) -> None:
        """Before the claim, so that none stands while a gate is shut.

        Raises SessionClosed, ClientGone, Overloaded, StoreUnavailable.
        """
        try:
            with flight.held(), flight.may_be_cut():
                await self._gates.wait(adapter, ticket)
        except TurnCut:
            raise _why_cut(flight, session_id) from None

    async def _settled(self, taken: TurnContext) -> TurnReply:
        """As `_generate`; a fault of ours, or being cancelled, leaves no claim behind either."""
        opening = taken.opening
        settled = False
        try:
            reply = await self._generate(taken)
            settled = True
            return reply
        except AppError:
            settled = True
            raise
        finally:
            if not settled:
                event = TurnAbandoned(opening.event.turn, opening.fence, "not_released")
                await self._claims.release(opening.session.session_id, opening.fence, event)
            if taken.control is not None:
                taken.control.finish(frozenset(self._aborting) if taken.flight.cut else frozenset())

    async def _generate(self, taken: TurnContext) -> TurnReply:
        opening = taken.opening
        try:
            made = await self._generator.generate(taken)
        except TurnCut:
            raise await self._cut(taken.flight, opening) from None
        except AppError as error:
            await self._claims.fail(opening, error, str(error), taken.received)
            raise
        if isinstance(made, EngineRefusal):
            await self._claims.reject(opening, "engine_error", made.status)
            return TurnReply(made.status, made.headers, made.body.pieces)
        stages, judged = taken.stages, made.judged
        stages.reply_bytes = len(made.body)
        stages.stored_bytes = len(judged.facts) + len(judged.wire) + sum(len(chunk.data) for chunk in judged.chunks)
        stages.enter(TurnStage.COMMIT)
        await self._commit(taken, made)
        stages.enter(TurnStage.REPLY)
        shown = self._shown(made.ask.clients)
        parts = _without(made.body, [place for place in judged.places if place.kind not in shown])
        is_aborted, gone = judged.reply.finish_reason == "abort", len(opening.plan.discarded)
        return TurnReply(200, made.headers, parts, turn=opening.event.turn, is_aborted=is_aborted, rolled_back=gone)

    def _shown(self, clients: Collection[str]) -> Collection[str]:
        return shown_kinds(clients, self._settings)

    async def _cut(self, flight: InFlightTurn, opening: ClaimedTurn) -> AppError:
        """The turn was ended from outside: tell the engine, let go of the claim, and say why."""
        session_id = opening.session.session_id
        if flight.asked:
            self._abort(session_id, opening.rid)
        if flight.cut != "session_closed":
            await self._claims.release(
                session_id, opening.fence, TurnAbandoned(opening.event.turn, opening.fence, "disconnect")
            )
        return _why_cut(flight, session_id)

    def _abort(self, session_id: str, rid: str) -> None:
        """Have the engine end a generation, without waiting for it."""
        if takes_rid(self._settings.upstream_dialect):
            task = asyncio.create_task(self._engines.abort(rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _commit(self, taken: TurnContext, made: GeneratedTurn) -> None:
        """On disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable, StoreFull."""
        opening, judged, prompt = taken.opening, made.judged, made.prompt
        session_id = opening.session.session_id
        blobs = made.sending.blobs
        events = decide.commit_turn(
            opening.session,
            opening.event,
            opening.fence,
            opening.plan,
            taken.incoming,
            judged.reply,
            blobs=decide.TurnBlobs(
                codec.content_hash(judged.facts, judged.wire), blobs.params, blobs.tools, blobs.refs, judged.payloads
            ),
            binding=self._placement.binding(opening.session, made.place, judged.reply.engine),
            timing=taken.stages.timing(),
        )
        try:
            operation = Commit(
                session_id,
                opening.fence,
                self._claims.incarnation,
                self._clock(),
                events,
                judged.facts,
                judged.wire,
                blobs.rows,
                await self._staged(opening, judged.chunks),
            )
            reach("before_commit")
            outcome = await self._writer.submit(operation)
            reach("after_commit")
        except AppError as error:
            self._cache.drop(session_id)
            await self._claims.fail(opening, error)
            raise
        if isinstance(outcome, Refused):
            self._cache.drop(session_id)
            if outcome.status == "open":
                # The claim is still held where only what was staged is gone.
                await self._claims.reject(opening, ClaimLost.code)
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        self._claims.appended(session_id, outcome)
        tokens = None if prompt is None else added_text(prompt, judged.reply.base, judged.output_ids)
        self._cache.remember(session_id, opening.event.turn, b",".join((*made.new, judged.message)), tokens)
        self._cache.snapshot_if_due(opening.fence - 1, session_id)

    async def _staged(self, opening: ClaimedTurn, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write large chunks ahead of the commit, a few at a time; returns those that are left for it."""
        if sum(len(chunk.data) for chunk in chunks) <= STAGE_BYTES:
            return chunks
        session_id, fence = opening.session.session_id, opening.fence
        for chunk in chunks:
            if not await self._writer.submit(Stage(session_id, fence, self._claims.incarnation, [chunk])):
                break
            reach("after_staged")
        return ()

    async def _replay(self, session_id: str, number: int, kinds: Collection[str]) -> TurnReply:
        """A committed turn's reply, to the byte, unless the session was closed meanwhile."""
        live = await self._cache.current(session_id)
        session = decide.require_open(live.session if live else None, session_id)
        if not self._cache.database.is_sqlite:
            await self._writer.submit(Settled(session_id))
        status, headers, body = await transcript.stored_reply(self._cache.database, session, number, kinds)
        return TurnReply(status, headers, [body], turn=number, replayed=True, rolled_back=session.superseded_by(number))

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._flights.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


def _why_cut(flight: InFlightTurn, session_id: str) -> AppError:
    if flight.cut == "session_closed":
        return SessionClosed(f"session {session_id} was closed during the turn")
    return ClientGone("the client went away, which ended its turn")


def _parsed(protocol: Protocol, body: bytes, brief: bool) -> Request:
    return parse_chat(body, brief) if protocol == "chat" else parse_completion(body, brief)


def _arrival(request: Request, session: Session) -> RequestHistory:
    """Raises InvalidRequest."""
    made: RequestHistory
    if isinstance(request, ChatRequest):
        made = Incoming(request.messages, session.config.matcher)
    else:
        made = IncomingPrompt(request)
    made.check(session.leaf)
    return made


def _without(body: Body, places: Sequence[PayloadRange]) -> Sequence[bytes | memoryview]:
    """The body with null for the values in these places; everything else is untouched."""
    if not places:
        return body.pieces
    parts: list[bytes | memoryview] = []
    done = 0
    for place in sorted(places, key=lambda place: place.start):
        parts += [*body.slices(done, place.start), b"null"]
        done = place.end
    return [*parts, *body.slices(done, len(body))]
