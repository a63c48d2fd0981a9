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
import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.completion import IncomingPrompt
from app.domain.events import Protocol, TurnAbandoned
from app.domain.history import Incoming
from app.domain.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from app.domain.session import Session
from app.errors import (
    AppError,
    ClaimLost,
    ClientGone,
    IdempotencyMismatch,
    InvalidRequest,
    SessionBusy,
    SessionClosed,
    TokenPrefixMismatch,
    Unsupported,
    UpstreamInvalid,
)
from app.service import transcript
from app.service.asking import Ask, Outgoing, Prompt, first_ask, outgoing, shown_kinds
from app.service.cache import SessionCache
from app.service.claims import RID_CHARACTERS, RID_MARK, Arrival, Claims, Opening, Request, repeated_turn, rid_of
from app.service.flights import Cut, Flight, Reader, RetryMark, TurnReply
from app.service.judge import Judge, Judged
from app.service.sessions import Clock, refusal
from app.service.token_in import Template, TokenIn, added_text
from app.settings import Settings
from app.store.log import Refused, StoredChunk
from app.store.log_sessions import Settled
from app.store.log_turns import Commit, Stage
from app.store.ports import Writer
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import asked_for, takes_rid
from app.upstream.engines import Engines
from app.upstream.headers import Headers
from workers import codec
from workers.codec import Facts
from workers.job import Place

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
        token_in: TokenIn,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._judge = judge
        self._token_in = token_in
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

    def close(self, session_id: str, ended: Sequence[int]) -> None:
        """The session was closed, which ended turns under these fences: end the work on them, here or elsewhere."""
        flight = self._flights.get(session_id)
        if flight is not None:
            flight.cut_off("session_closed")
        for fence in ended:
            if flight is None or flight.fence != fence:
                self._abort(session_id, rid_of(session_id, fence))

    async def take(
        self, session_id: str, protocol: Protocol, body: bytes, client: Headers, mark: RetryMark, reader: Reader
    ) -> TurnReply:
        """One turn. Raises AppError in the order 404, 400, 409, 400 (history), then what the engine did."""
        try:
            return await self._take(session_id, protocol, body, client, mark, reader)
        except (InvalidRequest, SessionBusy, IdempotencyMismatch):
            # Another process may have closed the session, which comes before anything that is wrong with a request.
            live = await self._cache.current(session_id)
            decide.require_open(live.session if live else None, session_id)
            raise

    async def _take(
        self, session_id: str, protocol: Protocol, body: bytes, client: Headers, mark: RetryMark, reader: Reader
    ) -> TurnReply:
        request: Request | None = None
        while True:
            live = await self._cache.get(session_id)
            session = decide.require_open(live.session if live else None, session_id)
            assert live is not None
            if request is None:
                request = await _beside(len(body), lambda: _parsed(protocol, body))
                self._require_takes_ids(request)
            incoming = _arrival(request, session)
            await _beside(len(body), lambda: incoming.check(session.leaf))  # noqa: B023
            template = self._token_in.check(request)
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
                    flight.fence = opening.fence
                    reply = await self._settled(_Taken(flight, opening, request, template, incoming, client, reader))
                    return reply
            finally:
                del self._flights[session_id]
                flight.land(reply if reply is not None and reply.turn is not None else None)

    def _require_takes_ids(self, request: Request) -> None:
        """Raises Unsupported for a chat's own ids where the engines are known to ignore them."""
        if self._settings.upstream_dialect == "vllm" and isinstance(request, ChatRequest) and request.ids is not None:
            raise Unsupported("input_ids: vLLM's chat route takes no token ids; /v1/completions does")

    async def _settled(self, taken: _Taken) -> TurnReply:
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

    async def _generate(self, taken: _Taken) -> TurnReply:
        opening, incoming, request = taken.opening, taken.incoming, taken.request
        requested_at = self._clock()
        refused: Body | None = None
        try:
            sending = outgoing(opening.session, request, self._settings)
            stored = await self._stored_messages(opening)
            new = incoming.new(opening.plan)
            with taken.flight.may_be_cut():
                prompt = await self._prompt(taken, sending)
                text = request.text if isinstance(request, CompletionRequest) else None

                def body(ask: Ask) -> bytes:
                    return sending.body(ask, [*stored, *new], text, prompt)

                ask, engine, reply = await self._ask(taken, prompt, body)
            reply = msgspec.structs.replace(reply, headers=http_headers.to_client(reply.headers))
            if reply.status != 200:
                await self._claims.reject(opening, "engine_error", reply.status)
                return TurnReply(reply.status, reply.headers, reply.body.pieces)
            refused = reply.body
            _require_own(reply.body, opening.rid)
            judged = await self._judge.judge(opening, incoming, new, engine, reply, requested_at, ask, prompt)
            reach("after_judged")
            await self._require_no_drift(opening, judged, prompt)
        except Cut:
            raise await self._cut(taken.flight, opening) from None
        except AppError as error:
            await self._claims.reject(opening, error.code, None, str(error), refused)
            raise
        await self._commit(taken, judged, sending, new, prompt)
        shown = self._shown(ask.clients)
        parts = _without(reply.body, [place for place in judged.places if place.kind not in shown])
        return TurnReply(200, reply.headers, parts, turn=opening.event.turn)

    def _shown(self, clients: Collection[str]) -> Collection[str]:
        return shown_kinds(clients, self._settings)

    async def _stored_messages(self, opening: Opening) -> list[bytes]:
        if opening.plan.base_messages == 0 or opening.event.protocol != "chat":
            return []
        return [await self._cache.messages(opening.live, opening.plan.parent)]

    async def _prompt(self, taken: _Taken, sending: Outgoing) -> Prompt | None:
        """The ids to send, if any: the client's own, or those of a chat where there is a tokenizer."""
        if taken.request.ids is not None:
            return await self._token_in.given(taken.opening, taken.request.ids)
        if taken.template is None or not isinstance(taken.incoming, Incoming):
            return None
        return await self._token_in.built(taken.opening, taken.template, taken.incoming, sending)

    async def _ask(
        self, taken: _Taken, prompt: Prompt | None, body: Callable[[Ask], bytes]
    ) -> tuple[Ask, str, EngineReply]:
        """What was asked in the end, which engine answered, and how. Raises as `Engines.generate`."""
        opening, grow = taken.opening, taken.reader.grow
        session_id, protocol = opening.session.session_id, opening.event.protocol
        headers = http_headers.to_engine(taken.client, session_id, self._settings.upstream_api_key)
        ask = first_ask(opening, taken.request, prompt, self._settings)
        taken.flight.asked = True
        reach("before_engine")
        engine, reply = await self._engines.generate(session_id, protocol, body(ask), headers, grow)
        reach("after_engine")
        if reply.status == 400 and ask.own:
            # A prompt that drifted may be shorter than the row asked for, which engines refuse.
            ask = msgspec.structs.replace(ask, own=b"", first_row=0)
            engine, reply = await self._engines.generate(session_id, protocol, body(ask), headers, grow)
        return ask, engine, reply

    async def _require_no_drift(self, opening: Opening, judged: Judged, prompt: Prompt | None) -> None:
        """Raises TokenPrefixMismatch where the prompt does not continue the stored tokens but should.

        It should where it was built on them, and where the session rejects drift.
        """
        parent = decide.token_parent(opening.session, opening.plan)
        if parent is None or judged.reply.base:
            return
        if opening.session.config.on_drift != "reject" and not (prompt is not None and prompt.extends):
            return
        at = await self._token_in.first_difference(
            opening, parent, lambda: memoryview(codec.unpack(judged.facts, Facts).suffix_ids).cast("i")
        )
        raise TokenPrefixMismatch(
            f"the prompt's {judged.reply.suffix_tokens} tokens do not continue the {parent.token_count} stored ones: "
            f"they differ at position {at}"
        )

    async def _cut(self, flight: Flight, opening: Opening) -> AppError:
        """The turn was ended from outside: tell the engine, let go of the claim, and say why."""
        session_id = opening.session.session_id
        if flight.asked:
            self._abort(session_id, opening.rid)
        if flight.cut == "session_closed":
            return SessionClosed(f"session {session_id} was closed during the turn")
        await self._claims.release(
            session_id, opening.fence, TurnAbandoned(opening.event.turn, opening.fence, "disconnect")
        )
        return ClientGone("the client went away and TURNLOG_ON_DISCONNECT ended its turn")

    def _abort(self, session_id: str, rid: str) -> None:
        """Have the engine end a generation, without waiting for it."""
        if takes_rid(self._settings.upstream_dialect) and self._engines.base_urls:
            task = asyncio.create_task(self._engines.abort(session_id, rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _commit(
        self, taken: _Taken, judged: Judged, sending: Outgoing, new: Sequence[bytes], prompt: Prompt | None
    ) -> None:
        """On disk when this returns. Raises ClaimLost, SessionClosed, StoreUnavailable, StoreFull."""
        opening = taken.opening
        session_id = opening.session.session_id
        blobs = sending.blobs
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
            await self._claims.reject(opening, error.code, None)
            raise
        if isinstance(outcome, Refused):
            self._cache.drop(session_id)
            if outcome.status == "open":
                await self._claims.reject(
                    opening, ClaimLost.code
                )  # where it is still held, but what was staged is gone
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        self._claims.appended(session_id, outcome)
        tokens = None if prompt is None else added_text(prompt, judged.reply.base, judged.output_ids)
        self._cache.remember(session_id, opening.event.turn, b",".join((*new, judged.message)), tokens)
        self._cache.snapshot_if_due(opening.fence - 1, session_id)

    async def _staged(self, opening: Opening, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
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
        return TurnReply(status, headers, [body], turn=number, replayed=True)

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._flights.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


class _Taken(msgspec.Struct, frozen=True):
    """A turn that holds its claim, and for whom it works."""

    flight: Flight
    opening: Opening
    request: Request
    template: Template | None
    incoming: Arrival
    client: Headers
    reader: Reader


def _parsed(protocol: Protocol, body: bytes) -> Request:
    return parse_chat(body) if protocol == "chat" else parse_completion(body)


def _arrival(request: Request, session: Session) -> Arrival:
    if isinstance(request, ChatRequest):
        return Incoming(request.messages, session.config.matcher)
    return IncomingPrompt(request)


_REPLY_ID = re.compile(rb'"id"\s*:\s*"(%b[0-9a-f]{%d})"' % (RID_MARK.encode(), RID_CHARACTERS))
_REPLY_ID_WITHIN = 512
"""SGLang begins a reply with its id, which is the request's `rid`."""


def _require_own(body: Body, rid: str) -> None:
    """Raises UpstreamInvalid for a reply to another of our requests, which an engine sent on this one's connection."""
    found = _REPLY_ID.search(body.beginning(_REPLY_ID_WITHIN))
    if found is not None and found[1] != rid.encode():
        raise UpstreamInvalid("the reply is that of another request")


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
