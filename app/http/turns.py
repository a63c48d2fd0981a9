"""The routes that generate, as plain ASGI endpoints: this path carries all the load.

A turn outlives its client. A stream is one chunk, rendered from the committed reply; while the engine
works, comments keep it alive.
"""

from __future__ import annotations

import asyncio
import logging
import re

from starlette.types import Receive, Scope, Send

from app.domain.events import Protocol
from app.errors import AppError, InvalidRequest, SessionNotFound
from app.http.limits import Room, read_body
from app.http.replies import error_parts, send_reply, start_reply
from app.http.sessions import SESSION_ID, CreateSession, new_session
from app.http.state import Services, of_scope
from app.http.stream import DONE, KEEPALIVE, as_error_event, as_stream, wants_stream
from app.service.flights import Reader, RetryMark, TurnReply, hash_key
from app.upstream.engines import PATHS
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
        path: str = scope["path"]
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
        try:
            await self._answer(app, protocol, in_path, headers, receive, send)
        except AppError as error:
            await send_reply(send, *error_parts(error))
        except Exception:
            log.exception("an unexpected fault in a turn")
            await send_reply(send, *error_parts(AppError(INTERNAL)))
        return True

    async def _answer(
        self,
        app: Services,
        protocol: Protocol,
        in_path: str | None,
        headers: Headers,
        receive: Receive,
        send: Send,
    ) -> None:
        with app.inflight.room() as room:
            body = await read_body(receive, headers, app.settings.max_request_bytes, room)
            if body is None:
                return
            session_id = await session_in_header(app, headers) if in_path is None else in_path
            if not re.match(SESSION_ID, session_id):
                raise SessionNotFound("no session has an id of this form")
            await _Exchange(app, protocol, receive, send, room).run(session_id, body, headers)


class _Exchange:
    """One request and its reply."""

    def __init__(self, app: Services, protocol: Protocol, receive: Receive, send: Send, room: Room) -> None:
        self._protocol = protocol
        self._room = room
        self._turns = app.turns
        self._keepalive_s = app.settings.stream_keepalive_s or None
        self._abort_after_s = app.settings.abort_after_s
        self._receive = receive
        self._send = send

    async def run(self, session_id: str, body: bytes, headers: Headers) -> None:
        reader = Reader(self._room.grow)
        call = self._turns.take(session_id, self._protocol, body, headers, retry_mark(headers), reader)
        stream = wants_stream(body)
        if not stream and self._abort_after_s is None:
            reply = await call
        else:
            task = asyncio.ensure_future(call)
            watch = asyncio.ensure_future(self._leave_on_disconnect(reader, task))
            try:
                if stream:
                    await self._stream(task)
                    return
                reply = await asyncio.shield(task)
            finally:
                watch.cancel()
        await send_reply(self._send, reply.status, _marked(reply), *reply.parts)

    async def _stream(self, task: asyncio.Task[TurnReply]) -> None:
        """Errors keep their status, unless a comment has gone out already."""
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
            return
        except Exception:
            if not began:
                raise
            log.exception("an unexpected fault in a streamed turn")
            await self._event(as_error_event(AppError(INTERNAL).body()) + DONE)
            return
        if reply.turn is not None:
            if not began:
                await _start_stream(self._send, [h for h in _marked(reply) if h[0] != "content-type"])
            await self._event(await _rendered(reply))
        elif began:
            await self._event(as_error_event(b"".join(reply.parts)) + DONE)
        else:
            await send_reply(self._send, reply.status, reply.headers, *reply.parts)

    async def _event(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _leave_on_disconnect(self, reader: Reader, task: asyncio.Task[TurnReply]) -> None:
        if self._abort_after_s is None:
            return
        while (await self._receive())["type"] != "http.disconnect":
            continue
        await asyncio.wait({task}, timeout=self._abort_after_s)
        if not task.done():
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
    """The engine's headers, and which turn this is."""
    if reply.turn is None:
        return reply.headers
    headers = [*reply.headers, ("x-turnlog-turn", str(reply.turn))]
    return [*headers, ("x-turnlog-replayed", "true")] if reply.replayed else headers


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


SESSION_HEADERS = (
    "x-turnlog-session-id",
    "x-dynamo-session-id",
    "x-session-id",
    "session-id",
    "x-claude-code-session-id",
    "x-multi-turn-session-id",
)
"""Where a harness that cannot change its path may name the session, in this order."""


async def session_in_header(app: Services, headers: Headers) -> str:
    """The session is created on its first use. Raises InvalidRequest where no header names one."""
    given = {name: value.strip() for name, value in headers if name in SESSION_HEADERS}
    name = next((name for name in SESSION_HEADERS if name in given), None)
    if name is None:
        raise InvalidRequest(f"no session: send one of the headers {', '.join(SESSION_HEADERS)}")
    session_id = given[name]
    if not re.match(SESSION_ID, session_id):
        raise InvalidRequest(f"{name} must be 1 to 128 letters, digits, dots, underscores, colons or hyphens")
    await app.sessions.ensure(new_session(CreateSession(session_id=session_id), app.settings.rollback_window))
    return session_id
