"""Serves the routes that generate, as plain ASGI endpoints, since they carry all the load.

A turn continues if its client disconnects. A stream is rendered from the committed reply and sent at once; until then,
comments keep the connection alive. A live one begins before the commit (`client_stream.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import Receive, Send

from app.api.client_stream import ClientStream
from app.api.head import RUN, TOKEN_SESSION, Head, generation_in, invalid_session_id
from app.api.header_sessions import (
    AGENT,
    AGENT_HEADERS,
    FINAL,
    HARNESSES,
    PARENT,
    HeaderSession,
    agent_of,
    session_of_request,
)
from app.api.of_run import hide, require_own
from app.api.replies import INTERNAL, LEFT_OUT, ROLLED_BACK, error_parts, left_out_header, rendered
from app.api.requests import arrived_body, disconnected
from app.api.routes import (
    ANYTHING,
    BODY,
    ENGINE,
    EVENTS,
    JSON,
    PAYLOADS,
    SESSION,
    WRITE,
    Errors,
    Reply,
    Route,
)
from app.crash_points import reach
from app.domain.known_body import LONG_BODY
from app.errors import (
    AppError,
    ClaimLost,
    ClientGone,
    GenerationAborted,
    GenerationEnded,
    HistoryMismatch,
    IdempotencyMismatch,
    OverBudget,
    PreviousResponseNotFound,
    Restored,
    RollbackTooDeep,
    RunClosed,
    RunOverBudget,
    SessionBusy,
    SessionNotFound,
    SessionOpenFailed,
    TokenPrefixMismatch,
    TooManySessions,
    TooManyTurns,
    Unsupported,
    WorkerCrash,
    forget_frames,
)
from app.protocols.base import CommittedReply, WireProtocol
from app.protocols.errors import ErrorFields, engine_error, own_error
from app.protocols.registry import ROUTES
from app.protocols.sse import SEARCHED, is_set, wants_stream
from app.request_memory import BodyReservation
from app.services import Services
from app.turn.in_flight import (
    ABORTED,
    COMMITTED,
    ENGINE_ERROR,
    JOINED,
    REPLAYED,
    SUCCEEDED,
    InFlightTurn,
    Stages,
    TurnReply,
    TurnStage,
    Waiter,
    hash_key,
)
from app.turn.large_bodies import INLINE_BYTES
from app.turn.live import LiveStream
from app.upstream.body import pieces_of
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.chat")


COUNT_DIGITS = 9
"""Digits of a retry count that are read: what they say fits the database's integers."""

SMALL_BODY = 64 << 10
"""Bytes of a body that is sent in one piece."""

TOLD = HARNESSES[0].session
"""The header that tells a client the id of its session."""


class TurnRequest:
    """One request for a turn and its reply.

    Each protocol's route is below `/sessions/{id}`, and also by itself, with the session in a header.
    """

    def __init__(self, app: Services, protocol: WireProtocol, head: Head, receive: Receive, send: Send) -> None:
        self._app = app
        self._protocol = protocol
        self._head = head
        self._token_session: str | None = head.scope.get(TOKEN_SESSION)
        self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.scope["headers"]]
        self._receive = receive
        self._send = send
        self._stages = Stages(time.perf_counter)
        self._watch_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer the request, also after an unexpected exception; then count its outcome."""
        app, head, stages = self._app, self._head, self._stages
        session_id, limit = head.path_session, app.settings.max_request_bytes
        reservation = BodyReservation(app.inflight, self._token_session or session_id, head.peer)
        try:
            body = await arrived_body(head, self._receive, self._headers, limit, reservation)
            if body is None:
                return  # the client disconnected before the end of its request
            # The request has arrived: its time counts from now on.
            stages.marks[0] = (TurnStage.CLAIM, stages.clock())
            stages.request_bytes = len(body)
            if session_id is None:
                outcome = await self._turn_of_header_session(body, reservation)
            elif (invalid := invalid_session_id(session_id)) is not None:
                raise invalid
            elif self._token_session is not None:  # It is that of one generation.
                if (run := head.run) is not None:
                    await app.names.require_run(session_id, run)
                outcome = await self._turn(session_id, body, reservation)
            else:
                outcome = await self._turn_of_path(session_id, body, reservation)
        except AppError as raised:
            reservation.release()
            error = await app.explained(raised)
            forget_frames(raised)
            forget_frames(error)
            outcome = error.code
            await self._send_error(error)
            stages.ended_at = stages.clock()
        except Exception as fault:
            reservation.release()
            outcome = AppError.code
            log.exception("unexpected error in a turn")
            forget_frames(fault)
            await self._send_error(AppError(INTERNAL))
            stages.ended_at = stages.clock()
        finally:
            reservation.release()
        seconds = stages.seconds()
        app.metrics.turn_ended(outcome, seconds, stages)
        if outcome not in SUCCEEDED:
            stage, took = stages.marks[-1][0].name.lower(), round(sum(seconds) * 1000, 3)
            log.info("turn failed: %s", outcome, extra={"code": outcome, "stage": stage, "duration_ms": took})
        elif log.isEnabledFor(logging.DEBUG):
            times = {stage.name.lower(): round(seconds[stage] * 1000, 3) for stage in TurnStage}
            log.debug("turn %s", outcome, extra={"stages_ms": times})

    async def _turn_of_header_session(self, body: bytes, reservation: BodyReservation) -> str:
        """A turn whose path names no session. The outcome. Raises AppError."""
        app, head = self._app, self._head
        fields, unnamed = app.settings.session_from_body, app.settings.without_session
        session = await app.turns.large_bodies.run(
            _large_size(body),
            lambda: session_of_request(self._headers, body, self._token_session, head.run, fields, unnamed),
        )
        if head.connection is not None and head.connection.is_gone():
            raise ClientGone("the client disconnected before its session was looked up")
        try:
            outcome = await self._turn_in_newest(session, body, reservation)
        except AppError as error:
            await hide(app, error, head.token_run, (session.session_id, session.root, session.parent))
            raise
        await session.end(app)
        return outcome

    async def _turn_in_newest(self, session: HeaderSession, body: bytes, reservation: BodyReservation) -> str:
        """The outcome. Raises AppError."""
        try:
            await session.ensure(self._app)
            return await self._turn_in(session, body, reservation)
        except (GenerationEnded, Restored) as ended:
            if self._token_session is not None:
                raise  # The token is that of one generation.
            await session.begin_next(self._app, ended)
            return await self._turn_in(session, body, reservation)

    async def _turn_in(self, session: HeaderSession, body: bytes, reservation: BodyReservation) -> str:
        """A turn of a session that the path does not name: its client is told which one, unless it has its id."""
        head = self._head
        if head.token_run is not None:
            await require_own(self._app, session.session_id, head.token_run)
        head.session_id = session.session_id
        head.own_headers = [header for header in head.own_headers if header[0] != TOLD]
        if session.is_unnamed or session.root != session.name:
            head.own_headers.append((TOLD, session.session_id))
        return await self._turn(session.session_id, body, reservation, session)

    async def _turn_of_path(self, name: str, body: bytes, reservation: BodyReservation) -> str:
        """A turn of the generation that the query asks for, else of the newest one. No path begins one. The outcome.
        Raises AppError."""
        app, head = self._app, self._head
        run = head.run
        if head.scope["query_string"] and (number := generation_in(head)) is not None:
            head.session_id = await app.names.require(run, name, number)
            return await self._turn(head.session_id, body, reservation)
        head.session_id = await app.names.at(run, name)
        try:
            return await self._turn(head.session_id, body, reservation)
        except (GenerationEnded, Restored, SessionNotFound):
            newest = await app.names.of_path(run, name)
            if newest == head.session_id:
                raise
        head.session_id = newest
        return await self._turn(newest, body, reservation)

    async def _turn(
        self, session_id: str, body: bytes, reservation: BodyReservation, session: HeaderSession | None = None
    ) -> str:
        """The outcome. Raises AppError."""
        turns, settings, protocol, head = self._app.turns, self._app.settings, self._protocol, self._head
        is_long = protocol.has_layouts and len(body) >= LONG_BODY
        continued = self._app.cache.continued(session_id, body, protocol.name) if is_long else None
        if continued is not None:
            streams = is_set(continued.fields.get("stream"))
        elif len(body) > INLINE_BYTES:
            streams = await turns.large_bodies.run(len(body), lambda: wants_stream(body))
        else:
            streams = (len(body) > SEARCHED or b'"stream"' in body) and wants_stream(body)
        live = LiveStream() if streams else None
        has_run_token = head.token_run is not None
        waiter = Waiter(reservation.grow, self._watch, self._token_session, head.connection, live, has_run_token)
        if settings.on_disconnect != "finish":
            self._watch(waiter)
        headers = head.headers
        turn = InFlightTurn(session_id, waiter, self._stages, self._headers)
        turn.new_history = settings.history or (protocol.history if session is None else "tree")
        if session is not None:
            turn.agent_id = session.agent_id
        elif not AGENT_HEADERS.isdisjoint(headers):
            turn.agent_id = agent_of(self._headers)
        if b"idempotency-key" in headers or b"x-stainless-retry-count" in headers:
            turn.retry_key, turn.retry_count = retry_mark(self._headers)
        call = turns.take(turn, protocol, body, continued)
        del turn  # It holds the engine's reply and payloads, which a client that reads slowly must not keep.
        if session is not None:
            call = session.with_hint(call)
        try:
            if live is not None:
                outcome = await self._stream(session_id, asyncio.ensure_future(call), live)
                self._stages.ended_at = self._stages.clock()
                return outcome
            reply = await call
            session_id = reply.session_id or session_id
        finally:
            if self._watch_task is not None:
                self._watch_task.cancel()
                self._watch_task = None
        is_whole = protocol.is_native and reply.given_ids is None
        parts = reply.parts if is_whole else await self._rendered(session_id, reply)
        sending = send_reply(self._send, reply.status, self._reply_headers(reply), *parts, head=head)
        await self._deliver(session_id, reply, sending)
        self._stages.ended_at = self._stages.clock()
        return _outcome(reply)

    async def _deliver(self, session_id: str, reply: TurnReply, sending: Coroutine[Any, Any, None]) -> None:
        """Send a turn's reply: whether it was delivered decides what a retry of the turn gets, unless that always gets
        it, as of an ended generation."""
        if reply.turn is None or reply.session_id is not None:
            await sending
            return
        retries = self._app.retries
        record_delivery = partial(retries.record_delivery, session_id, reply.turn, is_replay=reply.replayed)
        retries.sending(session_id, reply.turn)
        try:
            await sending
        except BaseException:
            record_delivery(delivered=False)
            raise
        if self._head.connection is None:
            record_delivery(delivered=True)
        else:
            self._head.connection.when_handed_over(record_delivery)

    def _reply_headers(self, reply: TurnReply) -> Headers:
        """The engine's headers, the turn's number, and the number of turns that it superseded."""
        headers = [*reply.headers]
        if not self._protocol.is_native:
            headers = [*(h for h in headers if h[0] != "content-type"), ("content-type", "application/json")]
        if reply.session_id is not None:
            headers.append((TOLD, reply.session_id))
        passed = dict(headers)
        headers += [header for header in self._head.own_headers if header[0] not in passed]
        if reply.turn is None:
            return headers
        headers.append(("x-turnlog-turn", str(reply.turn)))
        if reply.replayed:
            headers.append(("x-turnlog-replayed", "true"))
        if reply.rolled_back:
            headers.append((ROLLED_BACK, str(reply.rolled_back)))
        if reply.left_out:
            headers += left_out_header(reply.left_out)
        return headers

    async def _rendered(self, session_id: str, reply: TurnReply) -> Sequence[bytes | memoryview]:
        """The reply's body in the client's protocol, in parts."""
        protocol = self._protocol
        if protocol.is_native and reply.given_ids is None:
            return reply.parts
        if reply.turn is None:
            return [protocol.error(self._engine_error(reply))]
        return [await _render(reply, protocol.reply, self._app.proofs.of(session_id, reply.turn))]

    def _engine_error(self, reply: TurnReply) -> ErrorFields:
        return engine_error(reply.status, b"".join(reply.parts), self._head.request_id)

    async def _send_error(self, error: AppError) -> None:
        await send_reply(self._head.naming(self._send), *error_parts(error, self._protocol, self._head.request_id))

    async def _stream(self, session_id: str, task: asyncio.Task[TurnReply], live: LiveStream) -> str:
        """The outcome. Raises AppError if nothing has been sent yet; later an error is sent as an event."""
        proofs = self._app.proofs
        stream = ClientStream(
            self._head.naming(self._send), self._protocol, live, lambda turn: proofs.of(session_id, turn)
        )
        try:
            await stream.until_reply(task, self._app.settings.stream_keepalive_s or None)
            reply = task.result()
            session_id = reply.session_id or session_id
            if reply.turn is not None:
                events = await _render(reply, stream.render, proofs.of(session_id, reply.turn))
        except AppError as error:
            if not stream.has_begun:
                raise
            forget_frames(error)
            await stream.fail(own_error(error, self._head.request_id))
            return error.code
        except Exception as fault:
            if not stream.has_begun:
                raise
            log.exception("unexpected error in a streamed turn")
            forget_frames(fault)
            await stream.fail(own_error(AppError(INTERNAL), self._head.request_id))
            return AppError.code
        if reply.turn is not None and stream.has_begun:
            await stream.tell(reply)
            await self._deliver(session_id, reply, stream.write(events))
        elif reply.turn is not None:
            headers = stream.head(self._reply_headers(reply))
            await self._deliver(session_id, reply, send_reply(self._send, 200, headers, events, head=self._head))
        elif stream.has_begun:
            await stream.fail(self._engine_error(reply))
        else:
            parts = await self._rendered(session_id, reply)
            await send_reply(self._send, reply.status, self._reply_headers(reply), *parts)
        return _outcome(reply)

    def _watch(self, waiter: Waiter) -> None:
        """Start watching for the client's disconnect, once: only one task may wait for `receive`."""
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._wait_for_disconnect(waiter))

    async def _wait_for_disconnect(self, waiter: Waiter) -> None:
        await disconnected(self._receive)
        waiter.client_disconnected()
        abort_after_s = self._app.settings.abort_after_s
        if abort_after_s is not None:
            await asyncio.sleep(abort_after_s)
            waiter.leave()


async def send_reply(
    send: Send, status: int, headers: Headers, *parts: bytes | memoryview, head: Head | None = None
) -> None:
    """Send a complete reply; its body is `parts` joined. With the request's `head` a short one goes out in one step."""
    size = 0
    for part in parts:
        size += len(part)
    body = b"".join(parts) if size <= SMALL_BODY else None
    if (
        body is not None
        and head is not None
        and head.connection is not None
        and head.connection.answer(send, status, headers, body)
    ):
        return
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    raw.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    if body is not None:
        await send({"type": "http.response.body", "body": body})
        return
    sent = 0
    for piece in pieces_of(parts):
        sent += len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": sent < size})
        if sent < size:
            await asyncio.sleep(0)
            reach("during_reply")


def _large_size(body: bytes) -> int:
    """The body's size if even searching it for one field would block the event loop too long, else 0."""
    return len(body) if len(body) > INLINE_BYTES else 0


async def _render(reply: TurnReply, render: Callable[[CommittedReply], bytes], proof: str) -> bytes:
    """The committed reply in its protocol."""
    size = sum(map(len, reply.parts))
    return await rendered(
        size, lambda: render(CommittedReply(b"".join(reply.parts), proof, reply.echo, reply.given_ids))
    )


def _outcome(reply: TurnReply) -> str:
    if reply.turn is None:
        return ENGINE_ERROR
    if reply.replayed:
        return JOINED if reply.joined else REPLAYED
    return ABORTED if reply.is_aborted else COMMITTED


def retry_mark(headers: Headers) -> tuple[str | None, int]:
    """The marks of a retry: the hash of `Idempotency-Key`, and `x-stainless-retry-count`, 0 if that is no number."""
    key = None
    count = 0
    for name, value in headers:
        if name == "idempotency-key" and value:
            key = hash_key(value)
        elif name == "x-stainless-retry-count":
            count = 0 if value.strip("0123456789") else int(value.lstrip("0")[:COUNT_DIGITS] or 0)
    return key, count


ERRORS: Errors = (
    *BODY,
    Unsupported,
    RollbackTooDeep,
    HistoryMismatch,
    PreviousResponseNotFound,
    *SESSION,
    TooManySessions,
    TooManyTurns,
    OverBudget,
    RunOverBudget,
    RunClosed,
    SessionBusy,
    ClaimLost,
    IdempotencyMismatch,
    *ENGINE,
    WorkerCrash,
    SessionOpenFailed,
    GenerationAborted,
    *WRITE,
    *PAYLOADS,
    TokenPrefixMismatch,
)

HEADERS: Mapping[str, str] = {
    "idempotency-key": "With the key of a committed turn, the request gets that turn's reply; with that of a turn in "
    "flight, it joins that turn.",
    "x-stainless-retry-count": "Sent by the OpenAI SDKs: 1 or more marks a retry of the same body.",
    "x-request-id": "The client's own name for the request; the reply repeats it.",
}
RUN_HEADER: Mapping[str, str] = {RUN: "The session's run; a request that names another run is refused."}
SESSION_HEADERS: Mapping[str, str] = {
    **{harness.session: "Names the session; it is created on first use." for harness in HARNESSES},
    AGENT: "An agent of the session: a branch of it, or a session of its own.",
    PARENT: "The session whose agent started this one.",
    FINAL: "`true`: close the session after this turn.",
}
"""Name the session on routes without one in the path; the first header present counts."""


def entries() -> Iterator[Route]:
    """Of each protocol's route, with the session in the path and in a header."""
    told = ("x-turnlog-turn", "x-turnlog-replayed", ROLLED_BACK, LEFT_OUT)
    for protocol in ROUTES.values():
        for prefix, summary, headers, more in (
            ("/sessions/{session_id}", "", {**RUN_HEADER, **HEADERS}, ()),
            (
                "",
                ", of the session that a header, its token or the body names",
                {**SESSION_HEADERS, **RUN_HEADER, **HEADERS},
                (TOLD,),
            ),
        ):
            reply = Reply(
                "The engine's reply in the protocol's format; the turn is on disk.",
                {JSON: ANYTHING, EVENTS: {}},
                (*told, *more),
            )
            yield Route(
                methods=protocol.methods,
                path=prefix + protocol.route,
                who="session",
                tag="Turns",
                summary=f"One turn, {protocol.route.removeprefix('/v1/')}{summary}",
                protocol=protocol,
                replies=(reply,),
                errors=ERRORS,
                example=protocol.example,
                headers=headers,
                passes_engines_errors=True,
                of_run="session" if prefix else "header",
            )
