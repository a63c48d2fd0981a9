"""The turns of one process, and the steps of one turn from its request to its reply.

    step        state on disk after it                   after a crash there
    read        unchanged                                the retry is a new turn
    join        unchanged: a retry waits for the turn in flight, or gets the stored reply
    gate        unchanged: while a gate is shut, there is no claim
    claim       open_turns row, TurnOpened               the dead claim is abandoned, the retry generates again
    generate    same (`engine_call.py`)                  same
    commit      TurnCommitted, content, no open_turns row    the retry gets the stored reply
    refusal     TurnRejected, no open_turns row          the retry generates again

No transaction is open and no lock is held while an engine works. In a linear session the claim prevents two turns at
the same time. In any session its fence rejects a commit that comes too late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Sequence
from functools import partial
from typing import Any

import msgspec
import orjson

from app.domain import prefill
from app.domain.canonical import digest
from app.domain.completion import RequestPrompt
from app.domain.events import Capture, TurnCommitted
from app.domain.history import RequestHistory
from app.domain.known_body import ContinuedBody
from app.domain.pinned import in_new_wire, with_pinned
from app.domain.proofs import HeldProofs, Proofs
from app.domain.request import ChatRequest, CompletionRequest, canonical_hash, require_own
from app.domain.rules import rolled_back, running_hash
from app.domain.session import Session, Turn, rid_of
from app.domain.split import ITEMS
from app.domain.surrogates import mended
from app.errors import AppError, GenerationEnded, InvalidRequest, NoUpstream, Restored, SessionBusy, Unsupported
from app.fleet.engines import Engines
from app.fleet.state import FleetState
from app.process import FeatureFaults
from app.protocols.base import StoredTurn, WireProtocol
from app.protocols.registry import PROTOCOLS
from app.sessions import transcript
from app.sessions.cache import CacheEntry, SessionCache, require_open
from app.settings import Settings
from app.store.log import VoidedClaim
from app.store.log_sessions import Settled
from app.store.ports import Writer
from app.turn.claims import Claims
from app.turn.client_reply import Parts, shown
from app.turn.engine_call import EngineCalls, adapter_of
from app.turn.in_flight import (
    Claimed,
    Generated,
    InFlightTurn,
    Placed,
    Request,
    TurnCancelled,
    TurnHistory,
    TurnReply,
    TurnStage,
    hash_key,
)
from app.turn.large_bodies import INLINE_BYTES, INLINE_VALUES, LargeBodies, large_bytes, large_history
from app.turn.points import Generate, TurnPoints
from app.turn.retries import Retries
from app.turn.token_in import TokenIn
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import asked_for
from workers.reply import REPLAY, PayloadRange

log = logging.getLogger("turnlog.turns")


class TurnPath:
    """What differs between turns by what their session captures: who takes part, and whom the turn asks.

    `generate` is that of `calls`; `open` puts around it what has been added to the points by then.
    """

    def __init__(self, points: TurnPoints, calls: EngineCalls) -> None:
        self.points = points
        self.calls = calls
        self.generate: Generate = calls.generate

    def open(self) -> None:
        for around in self.points.around_engine:
            self.generate = partial(around, self.generate)


class Turns:
    """The turns of this process."""

    def __init__(
        self,
        *,
        points: TurnPoints,
        calls: EngineCalls,
        settings: Settings,
        cache: SessionCache,
        writer: Writer,
        retries: Retries,
        claims: Claims,
        token_in: TokenIn,
        large_bodies: LargeBodies,
        fleet: FleetState,
        engines: Engines,
        proofs: Proofs,
        text_upstreams: Container[str],
        feature_faults: FeatureFaults,
    ) -> None:
        self._points = points
        self._settings = settings
        self._cache = cache
        self._writer = writer
        self._retries = retries
        self._claims = claims
        self._token_in = token_in
        self.large_bodies = large_bodies
        self._fleet = fleet
        self._engines = engines
        self._proofs = proofs
        self._text_upstreams = text_upstreams
        self._feature_faults = feature_faults
        self.paths: dict[Capture, TurnPath] = {"tokens": TurnPath(points, calls)}
        """By what a session captures; a feature adds that of text alone."""
        self._in_flight: dict[str, list[InFlightTurn]] = {}
        self._claimed: dict[tuple[str, int], Claimed] = {}
        self.in_flight = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._verbatim: frozenset[Capture] = frozenset({"text"})
        """Captures whose replies are not cut: a text upstream was asked for nothing but what its client asked for."""
        if settings.client_reply == "verbatim":
            self._verbatim |= {"tokens"}

    def open(self) -> None:
        """Put around the plain generation what features have added by now."""
        for path in self.paths.values():
            path.open()

    async def take(
        self, flight: InFlightTurn, protocol: WireProtocol, body: bytes, continued: ContinuedBody | None = None
    ) -> TurnReply:
        """Take one turn. `continued`: what the cache knows of the body (`SessionCache.continued`).

        Raises AppError in the order 404, 400, 409, 400 (history), then the engine's failures.
        """
        cache, session_id = self._cache, flight.session_id
        entry = await cache.get(session_id)
        is_newest = cache.database.is_sqlite
        while True:
            known = None if entry is None else entry.session
            if entry is not None and entry.session.has_next and not flight.has_waited:
                return await self._take_ended(flight, entry, protocol, body, continued)
            try:
                if entry is None or entry.session.status != "open":
                    entry = require_open(entry, session_id)
                return await self._take(flight, entry, protocol, body, continued)
            except AppError as error:
                # Nobody asks again after such an answer, and another process may have outdated what it rests on.
                if error.retry is not False or flight.claim is not None or flight.cancel_reason is not None:
                    raise
                entry = await cache.current(session_id)
                if entry is not None and entry.session.has_next and not flight.has_waited:
                    continue
                if is_newest or entry is None or entry.session is known:
                    require_open(entry, session_id)
                    raise
                is_newest = True

    async def _take_ended(
        self,
        flight: InFlightTurn,
        entry: CacheEntry,
        protocol: WireProtocol,
        body: bytes,
        continued: ContinuedBody | None,
    ) -> TurnReply:
        """The reply that an ended generation has for the request. Raises GenerationEnded if it has none: the request is
        the next one's."""
        request, large = await self._parse(flight, entry, protocol, body, continued)
        if flight.retry_key is not None or flight.retry_count:
            placed = await self._look_at(flight, entry, request, large)
            if (reply := await self._replay_ended(placed, entry)) is not None:
                return reply
        raise GenerationEnded.of(flight.session_id, "is closed")

    async def _take(
        self,
        flight: InFlightTurn,
        entry: CacheEntry,
        protocol: WireProtocol,
        body: bytes,
        continued: ContinuedBody | None,
    ) -> TurnReply:
        """A turn of an open session: parse, match, an earlier reply or a new turn."""
        session_id, retries = flight.session_id, self._retries
        request, large = await self._parse(flight, entry, protocol, body, continued)
        while True:
            # Where does the request join the session, and does it repeat a turn, in flight or committed?
            if entry.index.has_odd_calls or entry.session.undone.count or large:
                placed = await self._look_at(flight, entry, request, large)
            else:
                placed = self._place(flight, entry, request, large)
            reply: TurnReply | None
            flights = self._in_flight.get(session_id)
            if flights and (other := retries.joinable(entry, flights, flight)) is not None:
                reply = await self._join(flight, other)
            elif (flight.retry_key is not None or entry.index.knows_body(flight.body_hash, placed.partial_hash)) and (
                number := await retries.repeated(entry, placed)
            ) is not None:
                reply = await self._replay(placed, number)
            elif (flight.retry_key is not None or flight.retry_count) and (
                ended := await self._replay_ended(placed, entry)
            ) is not None:
                reply = ended
            else:
                if request.refusal is not None:
                    raise InvalidRequest(request.refusal)
                # Another turn may have begun while an earlier reply was looked for, perhaps the one that is repeated.
                if flights := self._in_flight.get(session_id):
                    if retries.joinable(entry, flights, flight) is not None:
                        continue
                    if (entry.session.history or flight.new_history) != "tree":
                        raise SessionBusy(f"session {session_id} has a turn in flight")
                upstream = entry.session.config.upstream
                if upstream is not None:
                    if upstream not in self._text_upstreams:
                        raise NoUpstream(f"session {session_id}: TURNLOG_TEXT_UPSTREAMS has no {upstream}")
                else:
                    self._engines.require_some(flight.run)
                reply = await self._take_new(placed, entry)
            if reply is not None:
                return reply if request.echo is None else msgspec.structs.replace(reply, echo=request.echo)
            entry = require_open(await self._cache.get(session_id), session_id)

    async def _take_new(self, placed: Placed, entry: CacheEntry) -> TurnReply | None:
        """Gate, claim, engine, commit, reply; None if the claim finds that the request must be read again.

        Whatever happens, a claim ends with a commit, a rejection or a release.
        """
        path, claims, flight = self.paths[entry.session.config.capture], self._claims, placed.flight
        points, stages, session_id = path.points, flight.stages, flight.session_id
        flight.waiter.flight = flight
        flight.waiters = [flight.waiter]
        self._in_flight.setdefault(session_id, []).append(flight)
        self.in_flight += 1
        reply: TurnReply | None = None
        has_waited = False
        try:
            for gate in points.before_claim:
                if (wait := gate(flight)) is not None:
                    await self._wait_at_gate(placed, wait)
                    has_waited = True
            turn = await claims.take(placed, entry, has_waited=has_waited, is_alone=self.in_flight == 1)
            if turn is None:
                return None
            stages.marks.append((TurnStage.PREPARE, stages.clock()))
            self._claimed[session_id, turn.opened.turn] = turn
            holds_claim, is_judged = True, False
            try:
                for claimed in points.claimed:
                    claimed(turn)
                call = turn.call = await path.calls.prepare(turn)
                if self._points.limits is not None and turn.session.budgets:
                    generated = await self._points.limits.around(path.generate, turn, call)
                else:
                    generated = await path.generate(turn, call)
                if isinstance(generated, EngineReply):  # its own error, which is passed to the client
                    turn.answer, is_judged = generated, True
                    await claims.reject(turn, "engine_error", generated.status)
                    holds_claim = False
                    reply = TurnReply(generated.status, generated.headers, generated.body.pieces)
                else:
                    turn.generated = generated
                    await path.calls.finish(turn, call, generated)
                    is_judged = True
                    stages.marks.append((TurnStage.COMMIT, stages.clock()))
                    committed = await claims.commit(turn, call, generated, is_alone=self.in_flight == 1)
                    holds_claim = False
                    stages.marks.append((TurnStage.REPLY, stages.clock()))
                    reply = await self._reply(turn, generated, committed)
            except TurnCancelled:
                error = await self._cancelled(turn)
                turn.failure = error.code, str(error)
                holds_claim = False
                raise error from None
            except AppError as error:
                turn.failure = error.code, str(error)
                if not is_judged:
                    await claims.fail(turn, error, str(error), turn.received)
                holds_claim = False  # `commit` and `reject` have ended it, or will.
                raise
            finally:
                if self._claimed.get((session_id, turn.opened.turn)) is turn:
                    del self._claimed[session_id, turn.opened.turn]  # After a crash that undid it another may have it.
                if holds_claim:
                    await claims.abandon(turn, "not_released")
                for ended in points.ended:
                    try:
                        ended(turn)
                    except Exception:  # noqa: BLE001 - the turn is on disk: a feature's fault may not cost its reply
                        self._feature_faults.note(ended)
            return reply
        finally:
            claims.forget(flight)
            flights = self._in_flight[session_id]
            flights.remove(flight)
            if not flights:
                del self._in_flight[session_id]
            self.in_flight -= 1
            flight.finish(reply if reply is not None and reply.turn is not None else None)

    # read

    async def _parse(
        self,
        flight: InFlightTurn,
        entry: CacheEntry,
        protocol: WireProtocol,
        body: bytes,
        continued: ContinuedBody | None,
    ) -> tuple[Request, int]:
        """The request, and the body's size if the event loop must not process it, else 0. Sets what the request is
        known by to others. Raises InvalidRequest, Unsupported; Forbidden for what its token may not ask for."""
        config = entry.session.config
        if continued is not None and continued.known not in entry.bodies:
            continued = None
        large = large_bytes(body, continued) if len(body) > INLINE_VALUES else 0
        try:
            if large:
                request = await self.large_bodies.run(large, partial(protocol.parse, body, False, continued))
            else:
                request = protocol.parse(body, True, continued)
        except InvalidRequest:
            continued, large = None, large_bytes(body) if len(body) > INLINE_VALUES else 0
            # Not with the error as an argument: its traceback has the frames that run this, and it would hold itself.
            read = await self.large_bodies.run(large, partial(_parse_mended, protocol, body))
            if read is None:
                raise
            request = read
        if isinstance(request, ChatRequest) and (request.continues is not None or request.needs):
            request = protocol.complete(request, await self._stored_turns(entry, request))
        if continued is not None:
            large = large or large_history(body, request, entry.index)
        waiter = flight.waiter
        if waiter.token_session is not None or waiter.has_run_token:
            token_session = waiter.token_session or flight.session_id
            require_own(request, flight.session_id, token_session, self._settings.session_params)
        if config.params or config.model is not None:
            request = with_pinned(request, config)
        if config.evaluation is not None:
            request = in_new_wire(request, evaluation=config.evaluation)
        if config.capture == "text" and request.ids is not None:
            raise Unsupported('a session with capture "text" does not accept token ids')
        if prefill.CONTINUES in request.params and isinstance(request, ChatRequest):
            request = prefill.with_beginning(request)
        if request.key is not None and flight.retry_key is None:
            flight.retry_key = hash_key(request.key)
        flight.run, flight.adapter = config.of_run, adapter_of(entry.session, request, self._fleet.fleet)
        return request, large

    async def _look_at(self, flight: InFlightTurn, entry: CacheEntry, request: Request, large: int) -> Placed:
        """`_place`, with what it needs of the store, and off the event loop if the request is large."""
        await self._cache.read_odd_calls(entry)
        return await self.large_bodies.run(large, partial(self._place, flight, entry, request, large))

    def _place(self, flight: InFlightTurn, entry: CacheEntry, request: Request, large: int) -> Placed:
        """Compare the request with the session: its history, the template inputs if the prompt is rendered here, and
        what it is told by. Raises InvalidRequest, Unsupported."""
        session = entry.session
        if isinstance(request, ChatRequest):
            matcher, is_exact = session.config.matcher, request.has_object_arguments
            proven = HeldProofs(self._proofs, session.session_id, request.proofs) if request.proofs else ()
            history: TurnHistory = RequestHistory(
                request.messages, matcher, proven, trusts_ids=is_exact, prefix=request.prefix
            )
        else:
            history = RequestPrompt(request)
        history.check(entry.index, session, flight.agent_id)
        partial_reply = partial_hash = template = None
        if request.beginning is None:
            flight.body_hash = canonical_hash(request, history.whole_hash)
            partial_reply = history.partial_reply
            if partial_reply is not None and (before := history.hash_before_last) is not None:
                partial_hash = canonical_hash(request, before)
        else:
            # It is told by its history and by the reply's beginning, which in Messages may be what came of one.
            assert isinstance(request, ChatRequest)
            flight.body_hash = canonical_hash(request, running_hash(history.whole_hash, digest(request.beginning)))
            if request.protocol == "messages":
                partial_reply = msgspec.json.decode(request.beginning)
                partial_hash = canonical_hash(prefill.unprefilled(request), history.whole_hash)
        if self._token_in.prompts is not None and not session.is_text:
            template = self._token_in.template_of(request)
        return Placed(flight, request, large, session, history, partial_reply, partial_hash, template)

    async def _stored_turns(self, entry: CacheEntry, request: ChatRequest) -> dict[str, StoredTurn]:
        """The session's turns that the request continues or needs, by proof. Raises SessionUnreadable.

        Of those that it needs only the replies are read: the histories of a session's turns grow with their square.
        """
        cache, session = self._cache, entry.session
        needed = {proof: turn.number for proof in request.needs if (turn := self._proven_chat(session, proof))}
        messages = await transcript.reply_messages(cache.database, session, list(needed.values())) if needed else {}
        stored = {proof: StoredTurn([msgspec.Raw(messages[number])]) for proof, number in needed.items()}
        if request.continues is not None and (turn := self._proven_chat(session, request.continues)):
            history = ITEMS.decode(b"[" + await cache.messages(entry, turn.number) + b"]")
            stored[request.continues] = StoredTurn(history, await transcript.echo(cache.database, session, turn))
        return stored

    def _proven_chat(self, session: Session, proof: str) -> Turn | None:
        """Raises Restored if it is undone."""
        number = self._proofs.turn_of(session.session_id, proof) or 0
        if number in session.undone:
            raise Restored.of(session.session_id, number)
        turn = session.turns.get(number)
        return turn if turn is not None and turn.shape == "chat" else None

    # join or replay

    async def _join(self, flight: InFlightTurn, other: InFlightTurn) -> TurnReply | None:
        """The reply of the turn in flight, which the request repeats; None if it did not commit."""
        reply = await flight.waiter.join(other)
        # One that never had a claim may have found that the session was finished before it came.
        flight.has_waited |= other.has_claim or other.has_waited
        return None if reply is None else msgspec.structs.replace(reply, replayed=True, joined=True)

    async def _replay(self, placed: Placed, number: int) -> TurnReply:
        """A committed turn's reply, byte for byte. Raises SessionClosed if the session was closed meanwhile."""
        retries, session_id = self._retries, placed.flight.session_id
        retries.begin_replay(session_id, number)
        try:
            session = require_open(await self._cache.current(session_id), session_id).session
            return await self._stored_reply(placed, session, number)
        except BaseException:
            retries.cancel_replay(session_id, number)
            raise

    async def _replay_ended(self, placed: Placed, entry: CacheEntry) -> TurnReply | None:
        """The reply of a turn of an ended generation of the session's name, if the request repeats one. Raises
        as `Retries.ended`."""
        ended = await self._retries.ended(entry, placed)
        if ended is None:
            return None
        session, number = ended
        reply = await self._stored_reply(placed, session, number)
        return msgspec.structs.replace(reply, session_id=session.session_id, echo=placed.request.echo)

    async def _stored_reply(self, placed: Placed, session: Session, number: int) -> TurnReply:
        """The reply, once it is on disk. Raises SessionUnreadable, StoreUnavailable, StoreFull."""
        cache, session_id = self._cache, session.session_id
        if not cache.database.is_sqlite:
            # The commit may be another process's, and visible here before it is on disk.
            await self._writer.submit(Settled(session_id))
        kinds = self._payloads(placed.request, placed.session)
        status, headers, body = await transcript.stored_reply(cache.database, session, number, kinds)
        placed.flight.waiter.grow(len(body))
        return TurnReply(
            status,
            headers,
            await self._shown(placed.request, placed.session, Body([body]), ()),
            turn=number,
            replayed=True,
            rolled_back=rolled_back(session, number),
            left_out=session.turn(number).left_out,
            given_ids=session.turn(number).given_ids,
        )

    # wait, cancel

    async def _wait_at_gate(self, placed: Placed, wait: Callable[[InFlightTurn], Awaitable[None]]) -> None:
        """Wait before the claim, so that no claim exists while a gate is shut.

        Raises SessionClosed, ClientGone, Overloaded, StoreUnavailable.
        """
        flight, stages = placed.flight, placed.flight.stages
        stages.marks.append((TurnStage.GATE, stages.clock()))
        if placed.session.name is not None and not flight.has_waited:
            # One that was finished before the request came is told from one that is finished while it waits.
            require_open(await self._cache.current(flight.session_id), flight.session_id)
        try:
            with flight.waiting_at_gate(), flight.cancellable():
                flight.has_waited = True
                await wait(flight)
        except TurnCancelled:
            raise flight.cancel_error() from None
        stages.marks.append((TurnStage.CLAIM, stages.clock()))

    async def _cancelled(self, turn: Claimed) -> AppError:
        """The turn was cancelled: tell the engine, release the claim, and return the error."""
        flight = turn.flight
        if flight.engine_asked:
            self._abort(turn.rid, flight.session_id, flight.run)
        if flight.cancel_reason != "session_closed":
            await self._claims.abandon(turn, "disconnect")
        flight.aborts = frozenset(self._aborting)
        return flight.cancel_error()

    def _abort(self, rid: str, session_id: str, run: str | None) -> None:
        """Have the engine end a generation, without waiting for it. `run` None: the session's is to be read."""
        task = asyncio.create_task(self._abort_at_engine(rid, session_id, run))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_at_engine(self, rid: str, session_id: str, run: str | None) -> None:
        if run is None:
            try:
                entry = await self._cache.current(session_id)
            except AppError as error:
                log.warning(
                    "a generation of session %s may still run: its engine could not be looked up: %s", session_id, error
                )
                return
            if entry is None:
                return
            run = entry.session.config.of_run
        await self._engines.abort(rid, run)

    # reply

    async def _reply(self, turn: Claimed, generated: Generated, committed: TurnCommitted) -> TurnReply:
        answer, reply = generated.answer, generated.reply
        places = reply.places if reply.prompt is None else [*reply.places, reply.prompt]
        return TurnReply(
            200,
            answer.headers,
            await self._shown(turn.request, turn.session, answer.body, places, reply.plain),
            turn=committed.turn,
            is_aborted=committed.finish_reason == "abort",
            rolled_back=len(turn.plan.discarded),
            left_out=committed.left_out,
            given_ids=committed.given_ids,
        )

    def _is_verbatim(self, session: Session) -> bool:
        """Is it shown all? A session of miles' newer wire is shown what its client asked for, whatever is set."""
        config = session.config
        return config.capture in self._verbatim and (config.evaluation is None or config.capture == "text")

    def _payloads(self, request: Request, session: Session) -> Collection[str]:
        """The kinds of replay payload that the reply keeps."""
        if self._is_verbatim(session) or PROTOCOLS[request.protocol].gives_payloads:
            return REPLAY
        return asked_for(request.params)

    async def _shown(
        self, request: Request, session: Session, body: Body, places: Sequence[PayloadRange], plain: Any = None
    ) -> Parts:
        """The reply, whose long values are at these places, without what the client did not ask for, or what no other
        protocol has. `plain` as in `Read`."""
        protocol = PROTOCOLS[request.protocol]
        if not protocol.is_native:
            if plain is not None and not protocol.gives_lists and body.size <= INLINE_BYTES:
                return [orjson.dumps(plain)]  # It has all that is rendered, and none of the long lists.
            kinds = self._payloads(request, session)
            return body.without([(place.start, place.end) for place in places if place.kind not in kinds])
        if session.config.capture in self._verbatim and self._is_verbatim(session):
            return body.pieces
        decoded_bytes = body.size
        for place in places:
            decoded_bytes -= place.size
        if decoded_bytes <= INLINE_BYTES:
            return shown(body, places, request.params, plain)
        return await asyncio.to_thread(shown, body, places, request.params, plain)

    # the process's turns

    def at_gates(self) -> dict[str, bool]:
        """Sessions with a turn that waits here at a gate; True if such a turn has its claim already."""
        at_gates = {name: [turn for turn in flights if turn.is_at_gate] for name, flights in self._in_flight.items()}
        return {name: any(turn.has_claim for turn in flights) for name, flights in at_gates.items() if flights}

    def claimed(self, session_id: str, number: int) -> Claimed | None:
        """The turn with this number, if it is in flight here and has its claim."""
        return self._claimed.get((session_id, number))

    def close(self, session_id: str, ended: Sequence[VoidedClaim]) -> None:
        """The session was closed, which ended these claims: cancel their work, here or elsewhere."""
        flights = self._in_flight.get(session_id, ())
        for flight in flights:
            flight.cancel("session_closed")
        known = self._cache.known(session_id)
        if known is not None and known.is_text:
            return
        own = {flight.claim.seq for flight in flights if flight.claim is not None}
        for fence, incarnation in ended:
            if fence not in own:
                run = None if known is None else known.config.of_run
                self._abort(rid_of(session_id, fence, incarnation), session_id, run)

    async def drain(self, grace_s: float) -> None:
        """Wait at most `grace_s` for the turns in flight; the rest are abandoned when the process ends."""
        finished = [flight.joined() for flights in self._in_flight.values() for flight in flights]
        if finished:
            await asyncio.wait(finished, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


def _parse_mended(protocol: WireProtocol, body: bytes) -> ChatRequest | CompletionRequest | None:
    """The request in a body that is mended (`app.domain.surrogates`); None if there is nothing to mend.

    Raises as `protocol.parse`.
    """
    if (read := mended(body)) is None:
        return None
    request = protocol.parse(read.body)
    return msgspec.structs.replace(request, left_out=(*read.left_out(), *request.left_out))
