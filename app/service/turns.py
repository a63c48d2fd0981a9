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
from collections.abc import Sequence
from typing import Literal

import msgspec

from app.domain import decide
from app.domain.events import BlobRef, TurnAbandoned
from app.domain.history import Incoming
from app.domain.request import ChatRequest, join_object, parse_chat
from app.domain.session import Session
from app.errors import AppError, ClaimLost, ClientGone, SessionBusy, SessionClosed, UpstreamInvalid
from app.service import transcript
from app.service.cache import SessionCache
from app.service.claims import Claims, Opening, repeated_turn
from app.service.flights import Cut, Flight, Reader, RetryMark, TurnReply
from app.service.judge import Judged, judged
from app.service.sessions import Clock, refusal
from app.settings import Settings
from app.store import codec
from app.store.log import Commit, Refused, StoredBlob
from app.store.writer import Writer
from app.upstream import headers as http_headers
from app.upstream.client import EngineReply
from app.upstream.dialects import DialectChoice, complete, takes_rid
from app.upstream.engines import Engines
from app.upstream.headers import Headers
from workers.parse import Known, Rejected, parse_reply


class Turns:
    """The turns of this process. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        *,
        cache: SessionCache,
        claims: Claims,
        writer: Writer,
        engines: Engines,
        settings: Settings,
        clock: Clock,
    ) -> None:
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
                request = parse_chat(body)
            incoming = Incoming(request.messages, session.config.matcher)
            incoming.check(session.leaf)
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
                return await self._replay(session_id, repeated)
            self._engines.order(session_id)
            flight = self._flights[session_id] = Flight(mark, request.body_hash)
            reader.wait_for(flight)
            reply: TurnReply | None = None
            try:
                opening = await self._claims.open(live, request, incoming, mark)
                if opening is not None:
                    reply = await self._generate(flight, opening, request, incoming, client, reader)
                    return reply
            finally:
                del self._flights[session_id]
                flight.land(reply if reply is not None and reply.turn is not None else None)

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
        try:
            blobs, params, tools = _blobs(opening.session, request, self._settings.upstream_dialect)
            stored = await self._stored_messages(opening)
            new = [bytes(raw) for raw in request.messages[opening.plan.base_messages :]]
            rid = opening.rid if takes_rid(self._settings.upstream_dialect) else None
            body = transcript.request_body(params, tools, [*stored, *new], rid)
            engine, reply = await self._ask(flight, opening, body, client, reader)
            reply = msgspec.structs.replace(reply, headers=http_headers.to_client(reply.headers))
            if reply.status != 200:
                await self._claims.reject(opening, "engine_error", reply.status)
                return TurnReply(reply.status, reply.headers, reply.body)
            judged = await self._judge(opening, incoming, new, engine, reply, requested_at, rid)
        except Cut:
            raise await self._cut(flight, opening) from None
        except AppError as error:
            await self._claims.reject(opening, error.code, None, str(error))
            raise
        await self._commit(opening, incoming, judged, blobs, new)
        return TurnReply(200, reply.headers, reply.body, turn=opening.event.turn)

    async def _stored_messages(self, opening: Opening) -> list[bytes]:
        if opening.plan.base_messages == 0:
            return []
        return [await self._cache.messages(opening.live, opening.plan.parent)]

    async def _ask(
        self, flight: Flight, opening: Opening, body: bytes, client: Headers, reader: Reader
    ) -> tuple[str, EngineReply]:
        session_id = opening.session.session_id
        headers = http_headers.to_engine(client, session_id, self._settings.upstream_api_key)
        if flight.cut is not None:
            raise Cut
        flight.at_engine = task = asyncio.current_task()
        try:
            return await self._engines.chat(session_id, body, headers, reader.grow)
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

    async def _judge(
        self,
        opening: Opening,
        incoming: Incoming,
        new: Sequence[bytes],
        engine: str,
        reply: EngineReply,
        requested_at: float,
        rid: str | None,
    ) -> Judged:
        """Validate and compress; large bodies off the loop. Raises UpstreamInvalid."""
        parent = decide.token_parent(opening.session, opening.plan)
        known = None if parent is None else Known(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)

        def work() -> Judged:
            parsed = parse_reply(reply.body, self._settings.upstream_dialect, known)
            return judged(opening, incoming.matcher, new, engine, reply, parsed, requested_at, rid)

        try:
            if len(reply.body) <= self._settings.inline_max_bytes:
                return work()
            return await asyncio.to_thread(work)
        except Rejected as error:
            raise UpstreamInvalid(f"{engine} returned a malformed reply: {error}") from error

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
                codec.content_hash(judged.facts, judged.wire), blobs.params, blobs.tools, blobs.refs
            ),
        )
        operation = Commit(
            session_id,
            opening.fence,
            self._claims.incarnation,
            self._clock(),
            events,
            judged.facts,
            judged.wire,
            blobs.rows,
        )
        try:
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

    async def _replay(self, session_id: str, number: int) -> TurnReply:
        """A committed turn's reply, to the byte, unless the session was closed meanwhile."""
        live = await self._cache.current(session_id)
        session = decide.require_open(live.session if live else None, session_id)
        status, headers, body = await transcript.stored_reply(self._cache.database, session, number)
        return TurnReply(status, headers, body, turn=number, replayed=True)

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._flights.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


class _Blobs(msgspec.Struct, frozen=True):
    """The per-session blobs of a turn: their numbers, and the rows of those that are new."""

    params: int
    tools: int | None
    refs: tuple[BlobRef, ...]
    rows: tuple[StoredBlob, ...]


def _blobs(session: Session, request: ChatRequest, dialect: DialectChoice) -> tuple[_Blobs, bytes, bytes | None]:
    """Store the parameters and tools once a session, however many turns send them again."""
    params = join_object(complete(request.params, dialect))
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
