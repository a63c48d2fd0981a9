"""Routes about the service itself: alive, ready, export."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.sessions import MAX_INTEGER, NO_NUL
from app.api.state import services
from app.domain.samples import Truncate
from app.errors import AppError, InvalidRequest
from app.export.query import ExportFilters, ExportQuery
from app.store import reads

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Answers as long as the process does; waits for nothing."""
    app = services(request)
    return {
        "status": "ok",
        "in_flight": app.turns.in_flight,
        "writer": msgspec.to_builtins(app.writer.counters),
        "pool": msgspec.to_builtins(app.pool.counters()),
    }


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Can a turn be taken: does the database answer and take writes, is there a worker, does an engine live?

    `warnings` are of the settings, and no reason to stay away.
    """
    app = services(request)
    read_only = app.registration.read_only
    checks = {
        "database": True,
        "writable": read_only is None,
        "pool": app.pool.counters().alive > 0,
        "engine": await app.health.any_alive(),
    }
    try:
        await app.database.read(reads.epoch)
    except AppError:
        checks["database"] = False
    good = all(checks.values())
    found = {
        "status": "ready" if good else "not_ready",
        "checks": checks,
        "read_only": read_only,
        "warnings": app.settings.warnings,
    }
    return JSONResponse(found, 200 if good else 503)


async def export_wish(
    format: str = "ndjson",
    shape: str = "turnlog",
    session_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    group_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    status: Literal["completed", "truncated", "aborted"] | None = None,
    session_status: Literal["open", "closed", "erased"] | None = None,
    since: str | None = None,
    until: str | None = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_staleness: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    weight_version: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    limit: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    explain: bool = False,
    replay: bool = False,
    max_seq_len: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    truncate: Truncate = "turn",
    advantage: Literal["grpo"] | None = None,
) -> ExportQuery:
    """What a request's parameters ask an export for. Raises InvalidRequest."""
    filters = ExportFilters(
        session_id=session_id,
        group_id=group_id,
        status=status,
        session_status=session_status,
        since=_seconds("since", since),
        until=_seconds("until", until),
        min_reward=min_reward,
        max_reward=max_reward,
        max_staleness=max_staleness,
        weight_version=weight_version,
    )
    return ExportQuery(filters, limit, explain, replay, max_seq_len, advantage, format, shape, truncate)


ExportWish = Annotated[ExportQuery, Depends(export_wish)]


@router.get("/export")
async def export(request: Request, wish: ExportWish, cursor: str | None = None) -> StreamingResponse:
    """Training rows in the order of commit, in any format and shape.

    `x-turnlog-cursor` repeats this export, each row's `cursor` continues behind that row, and
    `x-turnlog-next-cursor` continues behind the whole; with a `limit` it is there once nothing is left.
    """
    require_known(request)
    started = await services(request).exporter.start(wish, cursor)
    headers = {
        "x-turnlog-cursor": started.cursor,
        "content-disposition": f'attachment; filename="turnlog{started.suffix}"',
    }
    if wish.limit is None or started.is_empty:
        headers["x-turnlog-next-cursor"] = started.next_cursor
    return _ClosedStream(started.pieces, started.media_type, headers)


class _ClosedStream(StreamingResponse):
    """Ends its pieces with the response, also where the client has gone: they may hold temporary files."""

    def __init__(self, pieces: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    """Made when it is first asked for, on a thread: it takes a while."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = await asyncio.to_thread(_document, app)
    return Response(msgspec.json.encode(app.openapi_schema), media_type="application/json")


def _document(app: FastAPI) -> dict[str, Any]:
    from app.api.openapi import document  # most processes are never asked

    return document(app)


def require_known(request: Request) -> None:
    """Raises InvalidRequest for a parameter that an export does not have: a filter with a slip lets everything pass."""
    parameters = {*ExportFilters.__struct_fields__, "cursor", *ExportQuery.__struct_fields__} - {"filters"}
    for name in request.query_params:
        if name not in parameters:
            raise InvalidRequest(f"{name} is not a parameter of /export; there are {', '.join(sorted(parameters))}")


def _seconds(name: str, text: str | None) -> float | None:
    """Seconds since the epoch, or ISO 8601 (UTC where it names no zone). Raises InvalidRequest."""
    if text is None:
        return None
    seconds = _number(text)
    if math.isnan(seconds):
        seconds = _moment(text)
    if not math.isfinite(seconds):
        raise InvalidRequest(f"{name}={text:.64} is neither seconds since the epoch nor a time of ISO 8601")
    return seconds


def _number(text: str) -> float:
    """NaN for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _moment(text: str) -> float:
    """NaN for a text that is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
