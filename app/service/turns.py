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
import logging
from collections.abc import Sequence
from typing import Literal

import msgspec

from app.domain import decide
from app.domain.events import BlobRef, Event, Matcher, TurnAbandoned, TurnOpened, TurnRejected, VersionSpan
from app.domain.history import Incoming, Plan, canonical_hash, decode_message, match
from app.domain.request import ChatRequest, join_object, parse_chat
from app.domain.session import Session, apply
from app.errors import (
    AppError,
    ClaimLost,
    ClientGone,
    HistoryMismatch,
    IdempotencyMismatch,
    RollbackTooDeep,
    SessionBusy,
    SessionClosed,
    UpstreamInvalid,
)
from app.service import transcript
from app.service.cache import Live, SessionCache
from app.service.follow import Followers
from app.service.sessions import Clock, refusal
from app.settings import Settings
from app.store import codec
from app.store.log import Appended, Busy, Claim, Commit, Refused, Release, StoredBlob
from app.store.writer import Writer
from app.upstream import headers as http_headers
from app.upstream.client import EngineReply
from app.upstream.dialects import DialectChoice, complete, takes_rid
from app.upstream.engines import Engines
from app.upstream.headers import Headers
from workers.parse import Parsed, Rejected, parse_reply

log = logging.getLogger("turnlog.turns")

CLAIM_TRIES = 8
"""How often a claim is tried again because another process moved the session; more is a storm."""

CutReason = Literal["session_closed", "disconnect"]


class RetryMark(msgspec.Struct, frozen=True):
    """How a client says that a request repeats one: a key (hashed), or the OpenAI SDKs' retry count."""

    key: str | None = None
    is_retry: bool = False

    def repeats(self, key: str | None, body_hash: str, own_body: str) -> bool:
        """Is the request with `own_body` the one with `key` and `body_hash` again? A key of its own decides alone.

        Raises IdempotencyMismatch where the key is that of another body.
        """
        if self.key is None:
            return self.is_retry and body_hash == own_body
        if self.key != key:
            return False
        if body_hash != own_body:
            raise IdempotencyMismatch("the idempotency key was used with another request body")
        return True


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class TurnReply(msgspec.Struct, frozen=True):
    """What goes back to the client. `turn` is None for an engine's own error, which committed nothing."""

    status: int
    headers: Headers
    body: bytes
    turn: int | None = None
    replayed: bool = False


class Flight:
    """A turn in flight in this process; a marked retry joins it."""

    def __init__(self, mark: RetryMark, body_hash: str) -> None:
        self.mark = mark
        self.body_hash = body_hash
        self.cut: CutReason | None = None
        self.at_engine: asyncio.Task[object] | None = None
        self.landing: asyncio.Future[TurnReply | None] = asyncio.get_running_loop().create_future()

    def land(self, reply: TurnReply | None) -> None:
        """The turn has ended, with `reply` if it committed."""
        if not self.landing.done():
            self.landing.set_result(reply)

    async def join(self) -> TurnReply | None:
        return await asyncio.shield(self.landing)

    def cut_off(self, reason: CutReason) -> None:
        """End the engine's work, if it is still at it; a turn that is past it is judged by its fence."""
        self.cut = self.cut or reason
        if self.at_engine is not None:
            self.at_engine.cancel()


class Cut(Exception):
    """The engine's work was ended by `Flight.cut_off`."""


class Opening(msgspec.Struct, frozen=True):
    """A claim that was taken. `session` is the state at the claim; while it stands, its turns cannot change."""

    live: Live
    session: Session
    plan: Plan
    event: TurnOpened
    fence: int

    @property
    def rid(self) -> str:
        """The generation's id at the engine: of one length, so that none is another's prefix."""
        return hashlib.sha256(f"{self.session.session_id}\0{self.fence}".encode()).hexdigest()[:32]


class Judged(msgspec.Struct, frozen=True):
    """An engine's sound reply, ready to be committed."""

    reply: decide.Reply
    tokens: decide.Tokens
    message: bytes
    facts: bytes
    wire: bytes


class Turns:
    """The turns of this process, which is `incarnation` to the store."""

    def __init__(
        self,
        *,
        cache: SessionCache,
        writer: Writer,
        engines: Engines,
        followers: Followers,
        settings: Settings,
        clock: Clock,
        incarnation: int,
    ) -> None:
        self._cache = cache
        self._writer = writer
        self._engines = engines
        self._followers = followers
        self._settings = settings
        self._clock = clock
        self._incarnation = incarnation
        self._lease_s = settings.lease_s
        self._flights: dict[str, Flight] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def cut_off(self, session_id: str, reason: CutReason) -> None:
        flight = self._flights.get(session_id)
        if flight is not None:
            flight.cut_off(reason)

    async def chat(self, session_id: str, body: bytes, client: Headers, mark: RetryMark) -> TurnReply:
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
                joined = await flight.join()
                if joined is not None:
                    return msgspec.structs.replace(joined, replayed=True)
                continue
            repeated = _repeated(live, mark, request)
            if repeated is not None:
                return await self._replay(live.session, repeated)
            flight = self._flights[session_id] = Flight(mark, request.body_hash)
            reply: TurnReply | None = None
            try:
                opening = await self._open(live, request, incoming, mark)
                if opening is not None:
                    reply = await self._generate(flight, opening, request, incoming, client)
                    return reply
            finally:
                del self._flights[session_id]
                flight.land(reply if reply is not None and reply.turn is not None else None)

    async def _open(self, live: Live, request: ChatRequest, incoming: Incoming, mark: RetryMark) -> Opening | None:
        """Claim the session at a version at which the request fits; None if the turn is found committed."""
        session_id = live.session.session_id
        for _ in range(CLAIM_TRIES):
            session = live.session
            plan = await self._match(session, incoming)
            if plan is not None:
                self._engines.order(session_id)
                event = decide.open_turn(
                    session,
                    plan,
                    incarnation=self._incarnation,
                    body_hash=request.body_hash,
                    retry_key=mark.key,
                )
                claim = Claim(session_id, session.version, self._clock(), event, self._lease_s)
                outcome = await self._writer.submit(claim)
                if isinstance(outcome, Appended):
                    self._appended(session_id, outcome)
                    claimed = apply(session, outcome.events[0], session_id)
                    return Opening(live, claimed, plan, event, session.version + 1)
                if isinstance(outcome, Refused):
                    self._cache.drop(session_id)
                    raise refusal(session_id, outcome.status)
                if isinstance(outcome, Busy):
                    await self._held(session_id, outcome, request, mark)
            fresh = await self._cache.refresh(session_id)
            decide.require_open(fresh.session if fresh else None, session_id)
            assert fresh is not None
            live = fresh
            if _repeated(live, mark, request) is not None:
                return None
        busy = SessionBusy(f"session {session_id} changed {CLAIM_TRIES} times while it was being claimed")
        busy.retry = True
        raise busy

    async def _match(self, session: Session, incoming: Incoming) -> Plan | None:
        """Where the request joins; None if the session has moved on since it was read.

        Raises SessionBusy, which comes before a history that does not fit, RollbackTooDeep, HistoryMismatch.
        """
        try:
            return match(session, incoming)
        except (RollbackTooDeep, HistoryMismatch):
            fresh = await self._cache.current(session.session_id)
            if fresh is not None and fresh.session.version != session.version:
                return None
            if fresh is not None and self._cache.held_elsewhere(fresh.session, self._incarnation):
                raise SessionBusy(f"session {session.session_id} has a turn in flight") from None
            raise

    async def _held(self, session_id: str, held: Busy, request: ChatRequest, mark: RetryMark) -> None:
        """The session's open turn is another process's, or one that this process failed to let go."""
        if held.incarnation == self._incarnation:
            await self._release(session_id, held.fence, TurnAbandoned(held.turn, held.fence, "owner_dead"))
            return
        busy = SessionBusy(f"session {session_id} has a turn in flight")
        if mark.repeats(held.retry_key, held.body_hash, request.body_hash):
            busy.retry, busy.retry_after_s = True, 1
        raise busy

    async def _generate(
        self, flight: Flight, opening: Opening, request: ChatRequest, incoming: Incoming, client: Headers
    ) -> TurnReply:
        requested_at = self._clock()
        try:
            blobs, params, tools = _blobs(opening.session, request, self._settings.upstream_dialect)
            stored = await self._stored_messages(opening)
            new = [bytes(raw) for raw in request.messages[opening.plan.base_messages :]]
            body = transcript.request_body(params, tools, [*stored, *new], self._rid(opening))
            engine, reply = await self._ask(flight, opening, body, client)
            if reply.status != 200:
                await self._reject(opening, "engine_error", reply.status)
                return TurnReply(reply.status, http_headers.to_client(reply.headers), reply.body)
            judged = await self._judge(opening, incoming, new, engine, reply, requested_at)
        except Cut:
            raise await self._cut(flight, opening) from None
        except AppError as error:
            await self._reject(opening, error.code, None, str(error))
            raise
        await self._commit(opening, incoming, judged, blobs, new)
        headers = http_headers.to_client(reply.headers)
        return TurnReply(200, headers, reply.body, turn=opening.event.turn)

    def _rid(self, opening: Opening) -> str | None:
        return opening.rid if takes_rid(self._settings.upstream_dialect) else None

    async def _stored_messages(self, opening: Opening) -> list[bytes]:
        if opening.plan.base_messages == 0:
            return []
        chain = [turn for turn in opening.session.history() if turn.message_count <= opening.plan.base_messages]
        return await self._cache.messages(opening.live, chain)

    async def _ask(self, flight: Flight, opening: Opening, body: bytes, client: Headers) -> tuple[str, EngineReply]:
        session_id = opening.session.session_id
        headers = http_headers.to_engine(client, session_id, self._settings.upstream_api_key)
        if flight.cut is not None:
            raise Cut
        flight.at_engine = task = asyncio.current_task()
        try:
            return await self._engines.chat(session_id, body, headers)
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
        rid = self._rid(opening)
        if rid is not None:
            task = asyncio.create_task(self._engines.abort(session_id, rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        if flight.cut == "session_closed":
            return SessionClosed(f"session {session_id} was closed during the turn")
        await self._release(session_id, opening.fence, TurnAbandoned(opening.event.turn, opening.fence, "disconnect"))
        return ClientGone("the client went away and TURNLOG_ON_DISCONNECT ended its turn")

    async def _judge(
        self,
        opening: Opening,
        incoming: Incoming,
        new: Sequence[bytes],
        engine: str,
        reply: EngineReply,
        requested_at: float,
    ) -> Judged:
        """Validate and compress; large bodies off the loop. Raises UpstreamInvalid."""

        def work() -> Judged:
            parsed = parse_reply(reply.body, self._settings.upstream_dialect)
            return _judged(opening, incoming.matcher, new, engine, reply, parsed, requested_at, self._rid(opening))

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
            judged.tokens,
            blobs=decide.TurnBlobs(
                codec.content_hash(judged.facts, judged.wire), blobs.params, blobs.tools, blobs.refs
            ),
        )
        operation = Commit(
            session_id,
            opening.fence,
            self._incarnation,
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
            await self._reject(opening, error.code, None)
            raise
        if isinstance(outcome, Refused):
            self._cache.drop(session_id)
            if outcome.status == "open":
                raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
            raise refusal(session_id, outcome.status)
        self._appended(session_id, outcome)
        messages = b",".join((*new, judged.message))
        self._cache.remember(session_id, opening.event.turn, messages)

    async def _reject(self, opening: Opening, reason: str, status: int | None, detail: str | None = None) -> None:
        await self._release(
            opening.session.session_id,
            opening.fence,
            TurnRejected(opening.event.turn, opening.fence, reason, status, detail),
        )

    async def _release(self, session_id: str, fence: int, event: Event) -> None:
        """Let go of a claim. A store that cannot take it is not an error of the turn: the next claim finds it."""
        try:
            outcome = await self._writer.submit(Release(session_id, fence, self._incarnation, self._clock(), event))
        except AppError as error:
            log.warning("session %s: the claim %d could not be released: %s", session_id, fence, error)
            return
        if isinstance(outcome, Appended):
            self._appended(session_id, outcome)
        else:
            self._cache.drop(session_id)

    def _appended(self, session_id: str, outcome: Appended) -> None:
        self._cache.advance(session_id, outcome.events)
        self._followers.notify(session_id)

    async def _replay(self, session: Session, number: int) -> TurnReply:
        """A committed turn's reply, to the byte."""
        status, headers, body = await transcript.stored_reply(self._cache.database, session, number)
        return TurnReply(status, headers, body, turn=number, replayed=True)

    async def drain(self, grace_s: float) -> None:
        """Wait for the turns in flight, at most `grace_s`; what is left then is abandoned with the process."""
        landing = [flight.landing for flight in self._flights.values()]
        if landing:
            await asyncio.wait(landing, timeout=grace_s)
        for task in self._aborting:
            task.cancel()


def _repeated(live: Live, mark: RetryMark, request: ChatRequest) -> int | None:
    """The committed turn that the request is a marked retry of."""
    if mark.key is not None and mark.key in live.keyed:
        number = live.keyed[mark.key]
        turn = live.session.turn(number)
    elif live.session.leaf is not None:
        turn = live.session.leaf
    else:
        return None
    return turn.number if mark.repeats(turn.retry_key, turn.body_hash, request.body_hash) else None


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


def _judged(
    opening: Opening,
    matcher: Matcher,
    new: Sequence[bytes],
    engine: str,
    reply: EngineReply,
    parsed: Parsed,
    requested_at: float,
    rid: str | None,
) -> Judged:
    tokens = decide.place_tokens(opening.session, opening.plan, parsed.prompt_ids, parsed.output_ids)
    message = decode_message(parsed.message, "the reply's message")
    facts = codec.Facts(
        suffix_ids=parsed.prompt_ids[tokens.base * decide.TOKEN_BYTES :],
        output_ids=parsed.output_ids,
        logprobs=parsed.logprobs,
    )
    count = len(parsed.prompt_ids) // decide.TOKEN_BYTES
    skeleton, at, separator = codec.cut_prompt_ids(reply.body, parsed.prompt_text, count)
    wire = codec.Wire(
        messages=list(new),
        message=parsed.message,
        reply=skeleton,
        headers=http_headers.to_client(reply.headers),
        status=reply.status,
        prompt_ids_at=at,
        separator=separator,
        rid=rid or "",
    )
    kept = decide.Reply(
        dialect=parsed.dialect,
        engine=engine,
        prompt_ids=parsed.prompt_ids,
        output_ids=parsed.output_ids,
        finish_reason=parsed.finish_reason,
        weight_versions=tuple(VersionSpan(span.version, span.start, span.end) for span in parsed.weight_versions),
        message_hash=canonical_hash(message, matcher),
        requested_at=requested_at,
    )
    return Judged(kept, tokens, parsed.message, codec.pack(facts), codec.pack(wire))
