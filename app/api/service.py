"""Routes about the service itself: alive, ready, what it offers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from app.api.describe import ANYTHING, JSON, Reply, describe, json_reply
from app.api.state import services
from app.errors import AppError
from app.store import reads

router = APIRouter(tags=["Service"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
@describe("Does the process answer? Waits for nothing", "anyone", json_reply("Health", "It does."))
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
@describe(
    "Can a turn be taken?",
    "anyone",
    json_reply("Readiness", "It can."),
    json_reply("Readiness", "It cannot; `checks` says why.", 503),
)
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


@router.get("/openapi.json")
@describe("This document", "page", Reply("OpenAPI 3.1.", {JSON: ANYTHING}))
async def openapi_json(request: Request) -> Response:
    """Made when it is first asked for, on a thread: it takes a while."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = await asyncio.to_thread(_document, app)
    return Response(msgspec.json.encode(app.openapi_schema), media_type="application/json")


def _document(app: FastAPI) -> dict[str, Any]:
    from app.api.openapi import document  # most processes are never asked

    return document(app)
