"""`GET /ui/api/live`: streams changes to the page as server-sent events, coalesced and resumable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.parameters import Cursor
from app.api.requests import Request
from app.api.routes import EVENTS, READ, Reply, Routes
from app.errors import InvalidRequest, StoreUnavailable
from app.features.page.routes import Run, overview_of, page_of
from app.features.page.watch import Listener
from app.sessions.log_end import POLL_S, LogPosition

if TYPE_CHECKING:
    from app.services import Services

route = Routes("Page")

OVERVIEW_S = 1.0
COMMENT_S = 15.0
"""Interval of comments while there are no events: proxies may close an idle connection."""

RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a browser reconnects."""

ROWS = 1000
"""Rows in one event."""


@route(
    "GET /ui/api/live",
    "Stream changes",
    "page",
    Reply("Server-sent events.", {EVENTS: {}}),
    errors=(InvalidRequest, *READ),
    of_run="query",
)
async def live(request: Request, cursor: Cursor = None, run: Run = None) -> StreamingResponse:
    """Sends `hello`, then `sessions` and `overview` at each change. A browser that reconnects resumes there."""
    app = request.services
    listener = await page_of(request).watch.listen(request.headers.get("last-event-id") or cursor, run)
    return _ChangeStream(app, listener, run)


class _ChangeStream(StreamingResponse):
    """Closes its listener as soon as the client disconnects."""

    def __init__(self, app: Services, listener: Listener, run: str | None) -> None:
        self._listener = listener
        self._events = _events(app, listener, run)
        super().__init__(self._events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._listener):
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


async def _events(app: Services, listener: Listener, run: str | None) -> AsyncGenerator[bytes]:
    clock = asyncio.get_running_loop().time
    yield RETRY + _hello(listener.start_cursor)
    rows_at = clock()
    comment_at = clock() + COMMENT_S
    with closing(_Overviews(app, run, listener.wake)) as overviews:
        while not listener.is_over:
            pieces = overviews.take()
            if listener.has_changes and clock() >= rows_at:
                rows_at = clock() + POLL_S
                pieces += _changes(listener)
            if not pieces and clock() >= comment_at:
                pieces = [b":\n\n"]
            for piece in pieces:
                yield piece
                comment_at = clock() + COMMENT_S
            if listener.has_changes:
                await asyncio.sleep(max(0.0, rows_at - clock()))
            else:
                await listener.wait(overviews.wait_s)


class _Overviews:
    """Makes an overview each second in a task of its own, so that rows do not wait while a large store is counted."""

    def __init__(self, app: Services, run: str | None, on_ready: Callable[[], None]) -> None:
        self._app = app
        self._run = run
        self._on_ready = on_ready
        self._clock = asyncio.get_running_loop().time
        self._due_at = self._clock()
        self._task: asyncio.Task[list[bytes]] | None = None

    def take(self) -> list[bytes]:
        """The finished overview as events, or nothing. Starts the next one when it is due."""
        pieces: list[bytes] = []
        if self._task is not None and self._task.done():
            pieces, self._task = self._task.result(), None
        if self._task is None and self._clock() >= self._due_at:
            self._due_at = self._clock() + OVERVIEW_S
            self._task = asyncio.create_task(self._overview(), name="turnlog-overview")
            self._task.add_done_callback(lambda _: self._on_ready())
        return pieces

    @property
    def wait_s(self) -> float:
        """Seconds until `take` may return something, unless `on_ready` is called earlier."""
        if self._task is None:
            return max(0.0, self._due_at - self._clock())
        return 0.0 if self._task.done() else COMMENT_S

    async def _overview(self) -> list[bytes]:
        """Nothing while the database cannot be read (the page shows the age of its numbers)."""
        try:
            return [_event("overview", await overview_of(self._app, self._run))]
        except StoreUnavailable:
            return []

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _changes(listener: Listener) -> list[bytes]:
    if listener.take_reset():
        return [_event("reset", {}), _hello(listener.cursor)]
    cursor, rows = listener.cursor, listener.take()
    parts = [rows[at : at + ROWS] for at in range(0, len(rows), ROWS)]
    return [_event("sessions", {"rows": part}, cursor if part is parts[-1] else None) for part in parts]


def _hello(cursor: LogPosition) -> bytes:
    return _event("hello", {"cursor": cursor.encode()}, cursor)


def _event(name: str, data: object, cursor: LogPosition | None = None) -> bytes:
    """A server-sent event. `cursor` becomes its id: a browser with this event has seen everything up to there."""
    place = b"" if cursor is None else b"id: %b\n" % cursor.encode().encode()
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), place, msgspec.json.encode(data))
