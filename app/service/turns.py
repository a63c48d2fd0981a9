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
import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import msgspec

from app.domain import decide
from app.domain.events import BlobRef, TurnAbandoned
from app.domain.history import Incoming
from app.domain.request import ChatRequest, join_object, parse_chat
from app.domain.session import Session
from app.errors import AppError, ClaimLost, ClientGone, SessionBusy, SessionClosed
from app.service import transcript
from app.service.cache import SessionCache
from app.service.claims import Claims, Opening, repeated_turn
from app.service.flights import Cut, Flight, Reader, RetryMark, TurnReply
from app.service.judge import Ask, Judge, Judged
from app.service.sessions import Clock, refusal
from app.settings import Settings
from app.store.log import Refused, StoredBlob, StoredChunk
from app.store.log_turns import Commit, Stage
from app.store.writer import Writer
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import asked_for, clients_first_row, complete, from_row, takes_rid
from app.upstream.engines import Engines
from app.upstream.headers import Headers
from workers import codec
from workers.job import Place
from workers.parse import REPLAY

PARSE_INLINE = 512 << 10
"""A request up to this is read on the loop: a millisecond and a half, less than half a turn of this size."""

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
        judge: Judge,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._judge = judge
        self._cache = cache
        self._claims = claims
        self._writer = writer
        self._engines = engines
        self._settings = settings
        self._clock = clock
        self._flights: dict[str, Flight] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def close(self, session_id: str) -> None:
        """The session was closed: end the work on its turn in flight."""
        flight = self._flights.get(session_id)
        if flight is not None:
            flight.cut_off("session_closed")

    async def chat(self, session_id: str, body: bytes, client: Headers, mark: RetryMark, reader: Reader) -> TurnReply:
        """One turn. Raises AppError in the order 404, 400, 409, 400 (history), then what the engine did."""
        request: ChatRequest | None = None
        while True:
            live = await self._cache.get(session_id)
            session = decide.require_open(live.session if live else None, session_id)
            assert live is not None
            if request is None:
                request = await _beside(len(body), lambda: parse_chat(body))
            incoming = Incoming(request.messages, session.config.matcher)
            await _beside(len(body), lambda: incoming.check(session.leaf))  # noqa: B023
            flight = self._flights.get(session_id)
            if flight is not None:
                if not mark.repeats(flight.mark.key, flight.body_hash, request.body_hash):
                    raise SessionBusy(f"session {session_id} has a turn in flight")
                reader.wait_for(flight)
                joined = await flight.join()
                if joined is not None:
                    return msgspec.structs.replace(joined, replayed=True)
                continue
            repeated = repeated_turn(live, mark, request)
            if repeated is not None:
                again = await self._replay(session_id, repeated, self._shown(asked_for(request.params)))
                reader.grow(sum(map(len, again.parts)))
                return again
            self._engines.order(session_id)
            flight = self._flights[session_id] = Flight(mark, request.body_hash)
            reader.wait_for(flight)
            reply: TurnReply | None = None
            try:
                opening = await self._claims.open(live, request, incoming, mark)
                if opening is not None:
                    reply = await self._settled(flight, opening, request, incoming, client, reader)
                    return reply
            finally:
                del self._flights[session_id]
                flight.land(reply if reply is not None and reply.turn is not None else None)

    async def _settled(
        self,
        flight: Flight,
        opening: Opening,
        request: ChatRequest,
        incoming: Incoming,
        client: Headers,
        reader: Reader,
    ) -> TurnReply:
        """As `_generate`; a fault of ours, or being cancelled, leaves no claim behind either."""
        settled = False
        try:
            reply = await self._generate(flight, opening, request, incoming, client, reader)
            settled = True
            return reply
        except AppError:
            settled = True
            raise
        finally:
            if not settled:
                event = TurnAbandoned(opening.event.turn, opening.fence, "not_released")
                await self._claims.release(opening.session.session_id, opening.fence, event)

    async def _generate(
        self,
        flight: Flight,
        opening: Opening,
        request: ChatRequest,
        incoming: Incoming,
        client: Headers,
        reader: Reader,
    ) -> TurnReply:
        requested_at = self._clock()
        refused: Body | None = None
        try:
            blobs, params, tools = _blobs(opening.session, request, self._settings)
            stored = await self._stored_messages(opening)
            new = [bytes(raw) for raw in request.messages[opening.plan.base_messages :]]

            def body(ask: Ask) -> bytes:
                return transcript.request_body(params, tools, [*stored, *new], ask.rid, ask.own)

            ask, engine, reply = await self._ask(
                flight, opening, self._first_ask(opening, request), body, client, reader
            )
            reply = msgspec.structs.replace(reply, headers=http_headers.to_client(reply.headers))
            if reply.status != 200:
                await self._claims.reject(opening, "engine_error", reply.status)
                return TurnReply(reply.status, reply.headers, reply.body.pieces)
            refused = reply.body
            judged = await self._judge.judge(opening, incoming.matcher, new, engine, reply, requested_at, ask)
        except Cut:
            raise await self._cut(flight, opening) from None
        except AppError as error:
            await self._claims.reject(opening, error.code, None, str(error), refused)
            raise
        await self._commit(opening, incoming, judged, blobs, new)
        parts = _without(reply.body, [place for place in judged.places if place.kind not in self._shown(ask.clients)])
        return TurnReply(200, reply.headers, parts, turn=opening.event.turn)

    def _first_ask(self, opening: Opening, request: ChatRequest) -> Ask:
        """What is known at the parent need not be sent again, where the operator says that engines keep it."""
        settings, plan = self._settings, opening.plan
        rid = opening.rid if takes_rid(settings.upstream_dialect) else ""
        clients = asked_for(request.params)
        if "routed_experts" not in settings.replay:
            return Ask(rid, b"", clients_first_row(request.params), clients)
        before = opening.session.payload(plan.parent, "routed_experts")
        if not settings.replay_incremental or before is None or not plan.base_messages:
            return Ask(rid, b"", 0, clients)
        return Ask(rid, from_row(before.stop, settings.upstream_dialect), before.stop, clients)

    def _shown(self, clients: Collection[str]) -> Collection[str]:
        """The kinds of payload that the client's reply keeps, of those that it asked for."""
        return {"auto": clients, "verbatim": REPLAY, "lean": ()}[self._settings.client_reply]

    async def _stored_messages(self, opening: Opening) -> list[bytes]:
        if opening.plan.base_messages == 0:
            return []
        return [await self._cache.messages(opening.live, opening.plan.parent)]

    async def _ask(
        self,
        flight: Flight,
        opening: Opening,
        ask: Ask,
        body: Callable[[Ask], bytes],
        client: Headers,
        reader: Reader,
    ) -> tuple[Ask, str, EngineReply]:
        """What was asked in the end, which engine answered, and how. Raises Cut and what `Engines.chat` raises."""
        session_id = opening.session.session_id
        headers = http_headers.to_engine(client, session_id, self._settings.upstream_api_key)
        if flight.cut is not None:
            raise Cut
        flight.at_engine = task = asyncio.current_task()
        try:
            engine, reply = await self._engines.chat(session_id, body(ask), headers, reader.grow)
            if reply.status == 400 and ask.own:
                # A prompt that drifted may be shorter than the row asked for, which engines refuse.
                ask = msgspec.structs.replace(ask, own=b"", first_row=0)
                engine, reply = await self._engines.chat(session_id, body(ask), headers, reader.grow)
            return ask, engine, reply
        except asyncio.CancelledError:
            if flight.cut is None or task is None:
                raise
            task.uncancel()
            raise Cut from None
        finally:
            flight.at_engine = None

    async def _cut(self, flight: Flight, opening: Opening) -> AppError:
        """The turn was ended from outside: tell the engine, let go of the claim, and say why."""
        session_id = opening.session.session_id
        if takes_rid(self._settings.upstream_dialect):
            task = asyncio.create_task(self._engines.abort(session_id, opening.rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        if flight.cut == "session_closed":
            return SessionClosed(f"session {session_id} was closed during the turn")
        await self._claims.release(
            session_id, opening.fence, TurnAbandoned(opening.event.turn, opening.fence, "disconnect")
        )
        return ClientGone("the client went away and TURNLOG_ON_DISCONNECT ended its turn")

    async def _commit(
        self, opening: Opening, incoming: Incoming, judged: Judged, blobs: _Blobs, new: Sequence[bytes]
    ) -> None:
        """On disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable, StoreFull."""
        session_id = opening.session.session_id
        events = decide.commit_turn(
            opening.session,
            opening.event,
            opening.fence,
            opening.plan,
            incoming,
            judged.reply,
            blobs=decide.TurnBlobs(
                codec.content_hash(judged.facts, judged.wire), blobs.params, blobs.tools, blobs.refs, judged.payloads
            ),
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
            outcome = await self._writer.submit(operation)
        except AppError as error:
            self._cache.drop(session_id)
            await self._claims.reject(opening, error.code, None)
            raise
        if isinstance(outcome, Refused):
            self._cache.drop(session_id)
            if outcome.status == "open":
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        self._claims.appended(session_id, outcome)
        messages = b",".join((*new, judged.message))
        parent = opening.plan.parent if opening.plan.base_messages else 0
        self._cache.remember(session_id, parent, opening.event.turn, messages)
        self._cache.snapshot_if_due(opening.fence - 1, session_id)

    async def _staged(self, opening: Opening, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Write large chunks ahead of the commit, a few at a time; returns those that are left for it."""
        if sum(len(chunk.data) for chunk in chunks) <= STAGE_BYTES:
            return chunks
        session_id, fence = opening.session.session_id, opening.fence
        for chunk in chunks:
            if not await self._writer.submit(Stage(session_id, fence, self._claims.incarnation, [chunk])):
                break
        return ()

    async def _replay(self, session_id: str, number: int, kinds: Collection[str]) -> TurnReply:
        """A committed turn's reply, to the byte, unless the session was closed meanwhile."""
        live = await self._cache.current(session_id)
        session = decide.require_open(live.session if live else None, session_id)
        status, headers, body = await transcript.stored_reply(self._cache.database, session, number, kinds)
        return TurnReply(status, headers, [body], turn=number, replayed=True)

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._flights.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


T = TypeVar("T")


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Work on a request of so many bytes; on a thread if the loop would wait for it."""
    return work() if size <= PARSE_INLINE else await asyncio.to_thread(work)


def _without(body: Body, places: Sequence[Place]) -> Sequence[bytes | memoryview]:
    """The body with null for the values in these places; everything else is untouched."""
    if not places:
        return body.pieces
    parts: list[bytes | memoryview] = []
    done = 0
    for place in sorted(places, key=lambda place: place.start):
        parts += [*body.slices(done, place.start), b"null"]
        done = place.end
    return [*parts, *body.slices(done, len(body))]


class _Blobs(msgspec.Struct, frozen=True):
    """The per-session blobs of a turn: their numbers, and the rows of those that are new."""

    params: int
    tools: int | None
    refs: tuple[BlobRef, ...]
    rows: tuple[StoredBlob, ...]


def _blobs(session: Session, request: ChatRequest, settings: Settings) -> tuple[_Blobs, bytes, bytes | None]:
    """Store the parameters and tools once a session, however many turns send them again."""
    params = join_object(complete(request.params, settings.upstream_dialect, settings.replay))
    tools = None if request.tools is None else bytes(request.tools)
    refs: list[BlobRef] = []
    rows: list[StoredBlob] = []

    def number_of(kind: Literal["params", "tools"], raw: bytes) -> int:
        digest = hashlib.sha256(raw).hexdigest()
        for ref in session.blobs:
            if ref.kind == kind and ref.hash == digest:
                return ref.number
        ref = BlobRef(session.blob_count + len(refs), kind, len(raw), digest)
        refs.append(ref)
        rows.append(StoredBlob(ref.number, kind, ref.size, digest, codec.compress(raw)))
        return ref.number

    params_number = number_of("params", params)
    tools_number = None if tools is None else number_of("tools", tools)
    return _Blobs(params_number, tools_number, tuple(refs), tuple(rows)), params, tools
