"""The routes that generate, as plain ASGI endpoints: this path carries all the load.

A turn outlives its client. A stream is rendered from the committed reply and sent at once; while the engine
works, comments keep it alive.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.types import Receive, Scope, Send

from app.api.auth import TOKEN_SESSION, route_path
from app.api.header_sessions import HeaderSession, named
from app.api.limits import BodyReservation, peer_of, read_body
from app.api.replies import ROLLED_BACK, error_parts, send_reply, start_reply
from app.api.sessions import SESSION_ID
from app.api.state import Services, of_scope
from app.domain.events import Protocol
from app.errors import AppError, SessionNotFound
from app.fleet.engines import PATHS
from app.logs import about_session
from app.protocols.stream import DONE, KEEPALIVE, as_comment, as_error_event, as_stream, wants_stream
from app.turn.in_flight import RetryMark, TurnReply, Waiter, hash_key
from app.turn.large_bodies import INLINE_BYTES
from app.turn.stages import ABORTED, COMMITTED, ENGINE_ERROR, JOINED, REPLAYED, WELL, Stages, TurnStage
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.chat")

_PREFIX = "/sessions/"
RENDER_INLINE = 64 << 10
INTERNAL = "an internal error; the server's log has it"


def protocol_of(path: str) -> Protocol | None:
    """Which of the generating routes a path ends in."""
    return next((protocol for protocol, route in PATHS.items() if path.endswith(route)), None)


class TurnRoutes:
    """`POST /sessions/{id}/v1/chat/completions` and `…/v1/completions`, and both with the session in a header."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request; False if it is not for these routes."""
        path = route_path(scope)
        protocol = protocol_of(path)
        if scope["method"] != "POST" or protocol is None:
            return False
        route = PATHS[protocol]
        in_path = path[len(_PREFIX) : -len(route)] if path.startswith(_PREFIX) else None
        if in_path is None and path != route:
            return False
        if in_path is not None and (not in_path or "/" in in_path):
            return False
        app = of_scope(scope)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        token_session: str | None = scope.get(TOKEN_SESSION)
        stages = Stages(time.perf_counter)
        try:
            with app.inflight.room(token_session or in_path, peer_of(scope)) as room:
                outcome = await self._answer(
                    app, protocol, in_path, token_session, headers, stages, receive, send, room
                )
        except AppError as error:
            outcome = error.code
            await send_reply(send, *error_parts(error))
            stages.end()
        except Exception:
            outcome = AppError.code
            log.exception("an unexpected fault in a turn")
            await send_reply(send, *error_parts(AppError(INTERNAL)))
            stages.end()
        if outcome is not None:
            app.metrics.turn_ended(outcome, stages)
            _tell(outcome, stages)
        return True

    async def _answer(
        self,
        app: Services,
        protocol: Protocol,
        in_path: str | None,
        token_session: str | None,
        headers: Headers,
        stages: Stages,
        receive: Receive,
        send: Send,
        room: BodyReservation,
    ) -> str | None:
        """How it ended; None where the client left before there was a request. Raises AppError."""
        body = await read_body(receive, headers, app.settings.max_request_bytes, room)
        if body is None:
            return None
        stages.begin()
        stages.request_bytes = len(body)
        exchange = _Exchange(app, protocol, token_session, stages, receive, send, room)
        if in_path is None:
            session = await app.turns.large_bodies.run(_long(body), lambda: named(headers, body))
            await session.ensure(app, token_session)
            about_session(session.session_id)
            outcome = await exchange.run(session.session_id, body, headers, session)
            await session.end(app)
            return outcome
        if not re.fullmatch(SESSION_ID, in_path):
            raise SessionNotFound("no session has an id of this form")
        return await exchange.run(in_path, body, headers)


def _long(body: bytes) -> int:
    """Its size, where even looking for one field takes the loop too long."""
    return len(body) if len(body) > INLINE_BYTES else 0


class _Exchange:
    """One request and its reply."""

    def __init__(
        self,
        app: Services,
        protocol: Protocol,
        token_session: str | None,
        stages: Stages,
        receive: Receive,
        send: Send,
        room: BodyReservation,
    ) -> None:
        self._protocol = protocol
        self._stages = stages
        self._token_session = token_session
        self._room = room
        self._turns = app.turns
        self._keepalive_s = app.settings.stream_keepalive_s or None
        self._abort_after_s = app.settings.abort_after_s
        self._receive = receive
        self._send = send
        self._watching: asyncio.Task[None] | None = None

    async def run(self, session_id: str, body: bytes, headers: Headers, session: HeaderSession | None = None) -> str:
        """How it ended. Raises AppError."""
        streams = await self._turns.large_bodies.run(_long(body), lambda: wants_stream(body))
        reader = Waiter(self._room.grow, self._watch, self._token_session)
        if self._abort_after_s is not None:
            self._watch(reader)
        call = self._turns.take(session_id, self._protocol, body, headers, retry_mark(headers), reader, self._stages)
        if session is not None:
            call = session.explained(call)
        try:
            if streams:
                outcome = await self._stream(asyncio.ensure_future(call))
                self._stages.end()
                return outcome
            reply = await call
        finally:
            if self._watching is not None:
                self._watching.cancel()
        await send_reply(self._send, reply.status, _marked(reply), *reply.parts)
        self._stages.end()
        return _outcome(reply)

    async def _stream(self, task: asyncio.Task[TurnReply]) -> str:
        """How it ended. Errors keep their status, unless a comment has gone out already."""
        began = False
        while not (await asyncio.wait({task}, timeout=self._keepalive_s))[0]:
            if not began:
                began = True
                await _start_stream(self._send, [])
            await self._event(KEEPALIVE, more=True)
        try:
            reply = task.result()
        except AppError as error:
            if not began:
                raise
            await self._event(as_error_event(error.body()) + DONE)
            return error.code
        except Exception:
            if not began:
                raise
            log.exception("an unexpected fault in a streamed turn")
            await self._event(as_error_event(AppError(INTERNAL).body()) + DONE)
            return AppError.code
        if reply.turn is not None:
            if not began:
                await _start_stream(self._send, [h for h in _marked(reply) if h[0] != "content-type"])
            elif reply.rolled_back:
                await self._event(as_comment(f"{ROLLED_BACK}: {reply.rolled_back}"), more=True)
            await self._event(await _rendered(reply))
        elif began:
            await self._event(as_error_event(b"".join(reply.parts)) + DONE)
        else:
            await send_reply(self._send, reply.status, reply.headers, *reply.parts)
        return _outcome(reply)

    async def _event(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _watch(self, reader: Waiter) -> None:
        """Notice when the client goes. `receive` must not have two who wait for it."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._until_gone(reader))

    async def _until_gone(self, reader: Waiter) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        reader.hang_up()
        if self._abort_after_s is not None:
            await asyncio.sleep(self._abort_after_s)
            reader.leave()


async def _start_stream(send: Send, headers: Headers) -> None:
    head = [*headers, ("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
    await start_reply(send, 200, head)


async def _rendered(reply: TurnReply) -> bytes:
    """The committed reply as a stream's events; a large one is rendered beside the loop."""
    if sum(map(len, reply.parts)) <= RENDER_INLINE:
        return as_stream(b"".join(reply.parts))
    return await asyncio.to_thread(lambda: as_stream(b"".join(reply.parts)))


def _marked(reply: TurnReply) -> Headers:
    """The engine's headers, which turn this is, and what it superseded when it committed."""
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


def _tell(outcome: str, stages: Stages) -> None:
    """One line for each turn that failed."""
    if outcome in WELL:
        if log.isEnabledFor(logging.DEBUG):
            times = {stage.name.lower(): round(stages.seconds[stage] * 1000, 3) for stage in TurnStage}
            log.debug("turn %s", outcome, extra={"stages_ms": times})
        return
    stage, took = stages.stage.name.lower(), round(stages.total * 1000, 3)
    log.info("turn failed: %s", outcome, extra={"code": outcome, "stage": stage, "duration_ms": took})


def retry_mark(headers: Headers) -> RetryMark:
    """`Idempotency-Key`, or `x-stainless-retry-count` of at least 1."""
    key = None
    is_retry = False
    for name, value in headers:
        if name == "idempotency-key" and value:
            key = hash_key(value)
        elif name == "x-stainless-retry-count":
            is_retry = not value.strip("0123456789") and bool(value.strip("0"))
    return RetryMark(key, is_retry)
