"""The stream of changes that the page listens to: server-sent events, coalesced, that can be resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.describe import EVENTS, READ, Reply, describe
from app.api.page.routes import HEADERS, overview_of
from app.api.page.watch import POLL_S, Listener, LiveCursor
from app.api.parameters import PageCursor
from app.api.state import Services, services
from app.errors import StoreUnavailable

router = APIRouter(prefix="/ui/api", tags=["Page"])

OVERVIEW_S = 1.0
COMMENT_S = 15.0
"""So often something is said even if nothing happens: what lies between may end a connection that is quiet."""

RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a browser that was cut off comes again."""

ROWS = 1000
"""Rows in one event."""


@router.get("/live")
@describe("Changes as they come", "page", Reply("Server-sent events.", {EVENTS: {}}), errors=READ)
async def live(request: Request, cursor: PageCursor = None) -> StreamingResponse:
    """`hello`, then `sessions` and `overview` as they come; a browser that comes again says what it saw last."""
    app = services(request)
    listener = await (await app.page()).watch.listen(request.headers.get("last-event-id") or cursor)
    return _ChangeStream(app, listener)


class _ChangeStream(StreamingResponse):
    """Whoever leaves is forgotten at once."""

    def __init__(self, app: Services, listener: Listener) -> None:
        self._listener = listener
        self._events = _events(app, listener)
        super().__init__(self._events, media_type="text/event-stream", headers=HEADERS | {"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._listener):
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


async def _events(app: Services, listener: Listener) -> AsyncGenerator[bytes]:
    clock = asyncio.get_running_loop().time
    yield RETRY + _hello(listener.began)
    rows_at = clock()
    quiet_until = clock() + COMMENT_S
    with closing(_Overviews(app, listener.wake)) as overviews:
        while not listener.is_over:
            pieces = overviews.take()
            if listener.has_news and clock() >= rows_at:
                rows_at = clock() + POLL_S
                pieces += _news(listener)
            if not pieces and clock() >= quiet_until:
                pieces = [b":\n\n"]
            for piece in pieces:
                yield piece
                quiet_until = clock() + COMMENT_S
            if listener.has_news:
                await asyncio.sleep(max(0.0, rows_at - clock()))
            else:
                await listener.wait(overviews.wait_s)


class _Overviews:
    """One a second, made beside the stream: to count a large store takes a while, and rows do not wait for that."""

    def __init__(self, app: Services, made: Callable[[], None]) -> None:
        self._app = app
        self._made = made
        self._clock = asyncio.get_running_loop().time
        self._due_at = self._clock()
        self._making: asyncio.Task[list[bytes]] | None = None

    def take(self) -> list[bytes]:
        """The one that is made; the next is begun when it is time."""
        pieces: list[bytes] = []
        if self._making is not None and self._making.done():
            pieces, self._making = self._making.result(), None
        if self._making is None and self._clock() >= self._due_at:
            self._due_at = self._clock() + OVERVIEW_S
            self._making = asyncio.create_task(_overview(self._app), name="turnlog-overview")
            self._making.add_done_callback(lambda _: self._made())
        return pieces

    @property
    def wait_s(self) -> float:
        """How long there is nothing to take, if `made` is not called before."""
        if self._making is None:
            return max(0.0, self._due_at - self._clock())
        return 0.0 if self._making.done() else COMMENT_S

    def close(self) -> None:
        if self._making is not None:
            self._making.cancel()


def _news(listener: Listener) -> list[bytes]:
    if listener.take_reset():
        return [_event("reset", {}), _hello(listener.cursor)]
    cursor, rows = listener.cursor, listener.take()
    parts = [rows[at : at + ROWS] for at in range(0, len(rows), ROWS)]
    return [_event("sessions", {"rows": part}, cursor if part is parts[-1] else None) for part in parts]


async def _overview(app: Services) -> list[bytes]:
    """Nothing while the database cannot be read: the page sees that its numbers grow old."""
    try:
        return [_event("overview", await overview_of(app))]
    except StoreUnavailable:
        return []


def _hello(cursor: LiveCursor) -> bytes:
    return _event("hello", {"cursor": cursor.encode()}, cursor)


def _event(name: str, data: object, cursor: LiveCursor | None = None) -> bytes:
    """`cursor`: a browser that has this event has seen everything up to there."""
    place = b"" if cursor is None else b"id: %b\n" % cursor.encode().encode()
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), place, msgspec.json.encode(data))
