"""Routes about the service itself: alive, ready, export."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from app.errors import AppError, InvalidRequest, Unsupported
from app.http.sessions import NO_NUL
from app.http.state import begun, services
from app.service.export import Filters, Wish
from app.store import reads

router = APIRouter()

BUILT = {"format": "ndjson", "shape": "turnlog"}
LATER = frozenset({"advantage"})
"""Documented parameters of `/export` that this version lacks; ignoring one would change the rows' meaning."""


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


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Can a turn be taken: does the database answer, is there a worker, does an engine answer?"""
    app = services(request)
    checks = {
        "database": True,
        "pool": app.pool.counters().alive > 0,
        "engine": bool(app.engines.base_urls) and await app.engines.any_healthy(),
    }
    try:
        await app.database.read(reads.epoch)
    except AppError:
        checks["database"] = False
    good = all(checks.values())
    return JSONResponse({"status": "ready" if good else "not_ready", "checks": checks}, 200 if good else 503)


@router.get("/export")
async def export(
    request: Request,
    format: str = "ndjson",
    shape: str = "turnlog",
    session_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    group_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    status: Literal["completed", "truncated", "aborted"] | None = None,
    session_status: Literal["open", "closed", "erased"] | None = None,
    since: str | None = None,
    until: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    cursor: str | None = None,
    limit: Annotated[int | None, Query(ge=1)] = None,
    explain: bool = False,
    replay: bool = False,
    max_seq_len: Annotated[int | None, Query(ge=1)] = None,
) -> StreamingResponse:
    """Training rows as NDJSON, in the order of commit.

    `x-turnlog-cursor` repeats this export, each row's `cursor` continues behind that row, and
    `x-turnlog-next-cursor` continues behind the whole; with a `limit` it is there once nothing is left.
    """
    _require_known(request, {"format": format, "shape": shape})
    filters = Filters(
        session_id=session_id,
        group_id=group_id,
        status=status,
        session_status=session_status,
        since=_seconds("since", since),
        until=_seconds("until", until),
        min_reward=min_reward,
        max_reward=max_reward,
    )
    started = await services(request).exporter.start(Wish(filters, limit, explain, replay, max_seq_len), cursor)
    rows, empty = await begun(started.rows)
    headers = {"x-turnlog-cursor": started.cursor}
    if limit is None or empty:
        headers["x-turnlog-next-cursor"] = started.next_cursor
    return StreamingResponse(rows, media_type="application/x-ndjson", headers=headers)


def _require_known(request: Request, chosen: dict[str, str]) -> None:
    for name, value in chosen.items():
        if value != BUILT[name]:
            raise Unsupported(f"{name}={value} is not built; this version has {name}={BUILT[name]}")
    parameters = {*Filters.__struct_fields__, *BUILT, "cursor", *Wish.__struct_fields__} - {"filters"}
    for name in request.query_params:
        if name in LATER:
            raise Unsupported(f"{name} is not built in this version")
        if name not in parameters:
            raise InvalidRequest(f"{name} is not a parameter of /export; there are {', '.join(sorted(parameters))}")


def _seconds(name: str, text: str | None) -> float | None:
    """Seconds since the epoch, or ISO 8601 (UTC where it names no zone). Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be seconds since the epoch or ISO 8601") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
