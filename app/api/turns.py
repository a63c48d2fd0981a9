"""Serves the routes that generate, as plain ASGI endpoints, since they carry all the load.

A turn continues if its client disconnects. A stream is rendered from the committed reply and sent at once; until then,
comments keep the connection alive.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.types import Receive, Scope, Send

from app.api.auth import TOKEN_SESSION, route_path
from app.api.header_sessions import HeaderSession, session_of_request
from app.api.limits import BodyReservation, peer_of, read_body
from app.api.replies import ROLLED_BACK, error_parts, send_reply, start_reply
from app.api.state import Services
from app.domain.events import Protocol
from app.domain.patterns import ID
from app.errors import AppError, SessionNotFound
from app.fleet.engines import PATHS
from app.logs import set_log_session
from app.protocols.stream import DONE, KEEPALIVE, as_comment, as_error_event, as_stream, wants_stream
from app.turn.in_flight import RetryMark, TurnReply, Waiter, hash_key
from app.turn.large_bodies import INLINE_BYTES
from app.turn.stages import ABORTED, COMMITTED, ENGINE_ERROR, JOINED, REPLAYED, SUCCEEDED, Stages, TurnStage
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.chat")

_PREFIX = "/sessions/"
RENDER_INLINE = 64 << 10
INTERNAL = "an internal error; the server's log has it"


def protocol_of(path: str) -> Protocol | None:
    """The protocol of the generating route with which a path ends, or None."""
    return next((protocol for protocol, route in PATHS.items() if path.endswith(route)), None)


async def serve_turn(app: Services, scope: Scope, receive: Receive, send: Send) -> bool:
    """Answer a request for a turn; False if the request is for another route.

    The routes are `POST /sessions/{id}/v1/chat/completions` and `…/v1/completions`, and both without `/sessions/{id}`,
    with the session in a header.
    """
    path = route_path(scope)
    protocol = protocol_of(path)
    if scope["method"] != "POST" or protocol is None:
        return False
    route = PATHS[protocol]
    path_session = path[len(_PREFIX) : -len(route)] if path.startswith(_PREFIX) else None
    if path_session is None and path != route:
        return False
    if path_session is not None and (not path_session or "/" in path_session):
        return False
    await _TurnRequest(app, protocol, path_session, scope, receive, send).run()
    return True


class _TurnRequest:
    """One request for a turn and its reply. `path_session` is the session in the path, or None."""

    def __init__(
        self, app: Services, protocol: Protocol, path_session: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app = app
        self._protocol = protocol
        self._path_session = path_session
        self._token_session: str | None = scope.get(TOKEN_SESSION)
        self._peer = peer_of(scope)
        self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self._receive = receive
        self._send = send
        self._stages = Stages(time.perf_counter)
        self._watch_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer the request, also after an unexpected exception; then count its outcome."""
        app, stages = self._app, self._stages
        try:
            with app.inflight.reserve(self._token_session or self._path_session, self._peer) as reservation:
                outcome = await self._answer(reservation)
        except AppError as error:
            outcome = error.code
            await send_reply(self._send, *error_parts(error))
            stages.end()
        except Exception:
            outcome = AppError.code
            log.exception("an unexpected fault in a turn")
            await send_reply(self._send, *error_parts(AppError(INTERNAL)))
            stages.end()
        if outcome is not None:
            app.metrics.turn_ended(outcome, stages)
            _log_outcome(outcome, stages)

    async def _answer(self, reservation: BodyReservation) -> str | None:
        """The outcome; None if the client disconnected before the end of its request. Raises AppError."""
        app = self._app
        body = await read_body(self._receive, self._headers, app.settings.max_request_bytes, reservation)
        if body is None:
            return None
        self._stages.begin()
        self._stages.request_bytes = len(body)
        if self._path_session is not None:
            if not re.fullmatch(ID, self._path_session):
                raise SessionNotFound("the session id is invalid")
            return await self._turn(self._path_session, body, reservation)
        session = await app.turns.large_bodies.run(_large_size(body), lambda: session_of_request(self._headers, body))
        await session.ensure(app, self._token_session)
        set_log_session(session.session_id)
        outcome = await self._turn(session.session_id, body, reservation, session)
        await session.end(app)
        return outcome

    async def _turn(
        self, session_id: str, body: bytes, reservation: BodyReservation, session: HeaderSession | None = None
    ) -> str:
        """The outcome. Raises AppError."""
        turns, settings = self._app.turns, self._app.settings
        streams = await turns.large_bodies.run(_large_size(body), lambda: wants_stream(body))
        waiter = Waiter(reservation.grow, self._watch, self._token_session)
        if settings.abort_after_s is not None:
            self._watch(waiter)
        mark = retry_mark(self._headers)
        call = turns.take(session_id, self._protocol, body, self._headers, mark, waiter, self._stages)
        if session is not None:
            call = session.with_hint(call)
        try:
            if streams:
                outcome = await self._stream(asyncio.ensure_future(call))
                self._stages.end()
                return outcome
            reply = await call
        finally:
            if self._watch_task is not None:
                self._watch_task.cancel()
        await send_reply(self._send, reply.status, _turn_headers(reply), *reply.parts)
        self._stages.end()
        return _outcome(reply)

    async def _stream(self, task: asyncio.Task[TurnReply]) -> str:
        """The outcome. Raises AppError if nothing has been sent yet; later an error is sent as an event."""
        has_begun = False
        keepalive_s = self._app.settings.stream_keepalive_s or None
        while not (await asyncio.wait({task}, timeout=keepalive_s))[0]:
            if not has_begun:
                has_begun = True
                await _start_stream(self._send, [])
            await self._event(KEEPALIVE, more=True)
        try:
            reply = task.result()
        except AppError as error:
            if not has_begun:
                raise
            await self._event(as_error_event(error.body()) + DONE)
            return error.code
        except Exception:
            if not has_begun:
                raise
            log.exception("an unexpected fault in a streamed turn")
            await self._event(as_error_event(AppError(INTERNAL).body()) + DONE)
            return AppError.code
        if reply.turn is not None:
            if not has_begun:
                await _start_stream(self._send, [h for h in _turn_headers(reply) if h[0] != "content-type"])
            elif reply.rolled_back:
                await self._event(as_comment(f"{ROLLED_BACK}: {reply.rolled_back}"), more=True)
            await self._event(await _render(reply))
        elif has_begun:
            await self._event(as_error_event(b"".join(reply.parts)) + DONE)
        else:
            await send_reply(self._send, reply.status, reply.headers, *reply.parts)
        return _outcome(reply)

    async def _event(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _watch(self, waiter: Waiter) -> None:
        """Start watching for the client's disconnect, once: only one task may wait for `receive`."""
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._wait_for_disconnect(waiter))

    async def _wait_for_disconnect(self, waiter: Waiter) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        waiter.client_disconnected()
        abort_after_s = self._app.settings.abort_after_s
        if abort_after_s is not None:
            await asyncio.sleep(abort_after_s)
            waiter.leave()


def _large_size(body: bytes) -> int:
    """The body's size if even searching it for one field would block the event loop too long, else 0."""
    return len(body) if len(body) > INLINE_BYTES else 0


async def _start_stream(send: Send, headers: Headers) -> None:
    head = [*headers, ("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
    await start_reply(send, 200, head)


async def _render(reply: TurnReply) -> bytes:
    """The committed reply as a stream's events; a large one is rendered on a thread."""
    if sum(map(len, reply.parts)) <= RENDER_INLINE:
        return as_stream(b"".join(reply.parts))
    return await asyncio.to_thread(lambda: as_stream(b"".join(reply.parts)))


def _turn_headers(reply: TurnReply) -> Headers:
    """The engine's headers, the turn's number, and the number of turns that it superseded."""
    if reply.turn is None:
        return reply.headers
    headers = [*reply.headers, ("x-turnlog-turn", str(reply.turn))]
    if reply.replayed:
        headers.append(("x-turnlog-replayed", "true"))
    if reply.rolled_back:
        headers.append((ROLLED_BACK, str(reply.rolled_back)))
    return headers


def _outcome(reply: TurnReply) -> str:
    if reply.turn is None:
        return ENGINE_ERROR
    if reply.replayed:
        return JOINED if reply.joined else REPLAYED
    return ABORTED if reply.is_aborted else COMMITTED


def _log_outcome(outcome: str, stages: Stages) -> None:
    """Log a failed turn; with `debug` also the stages of a successful one."""
    if outcome in SUCCEEDED:
        if log.isEnabledFor(logging.DEBUG):
            times = {stage.name.lower(): round(stages.seconds[stage] * 1000, 3) for stage in TurnStage}
            log.debug("turn %s", outcome, extra={"stages_ms": times})
        return
    stage, took = stages.stage.name.lower(), round(stages.total * 1000, 3)
    log.info("turn failed: %s", outcome, extra={"code": outcome, "stage": stage, "duration_ms": took})


def retry_mark(headers: Headers) -> RetryMark:
    """How the request is marked as a retry: `Idempotency-Key`, or `x-stainless-retry-count` of at least 1."""
    key = None
    is_retry = False
    for name, value in headers:
        if name == "idempotency-key" and value:
            key = hash_key(value)
        elif name == "x-stainless-retry-count":
            is_retry = not value.strip("0123456789") and bool(value.strip("0"))
    return RetryMark(key, is_retry)
