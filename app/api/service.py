"""Routes of the service itself: health, readiness, the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pathlib
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.types import Receive

from app.api.describe import ANYTHING, JSON, TEXT, Reply, Schema, describe, json_reply
from app.api.direct import DirectRoute, flag
from app.api.head import Head
from app.api.openapi import document
from app.errors import AppError
from app.store import feed
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Service"])


def _explorer() -> tuple[bytes, int, dict[str, str]]:
    """The page of `/docs`: its bytes, the status and the headers, which allow the scripts and styles in it alone."""
    text = pathlib.Path(__file__).with_name("explorer.html").read_bytes()
    sources = {
        name: base64.b64encode(hashlib.sha256(text.partition(b"<%s>" % name)[2].partition(b"</%s>" % name)[0]).digest())
        for name in (b"script", b"style")
    }
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    allowed = [f"{name.decode()}-src 'sha256-{digest.decode()}'" for name, digest in sources.items()]
    return text, 200, {"content-security-policy": "; ".join([policy, *allowed])}


EXPLORER = _explorer()


@router.head("/", include_in_schema=False)
@router.get("/", response_model=None)
@describe(
    "What is here?",
    "anyone",
    json_reply(reply_types.Root, "Where to go on."),
    Reply("A browser: the page.", {}, status=307),
)
async def root(request: Request) -> Response:
    """Paths of the page, of this document and of the check of health. A browser is sent to the page."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("ui/")
    return JSONResponse({"service": "turnlog", "page": "/ui", "routes": "/docs", "health": "/health"})


@describe("Is the process alive?", "anyone", json_reply(reply_types.Health, "It is alive."))
async def health(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Answers at once while the process is alive; it does not wait for the database or an engine."""
    return 200, {
        "status": "ok",
        "session_server_instance_id": app.instance_id,
        "in_flight": app.turns.in_flight,
        "writer": app.writer.counters,
        "pool": app.pool.counters(),
    }


@describe(
    "Can the process serve?",
    "anyone",
    json_reply(reply_types.Readiness, "It can."),
    json_reply(reply_types.Readiness, "It cannot; `checks` says why.", 503),
)
async def ready(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Does the database answer, are its events read in the order of commits, are a worker and an engine alive?

    A store that takes no writes, such as a full one, is ready for reads: `writable` is false. With `writes=1` that is
    503 too. Every ten seconds a write is tried; `read_only` is why it failed. `warnings` concern the settings and do
    not change the status.
    """
    read_only = app.registration.read_only or app.proof.unwritable
    checks = {
        "database": app.proof.is_ordered,
        "writable": read_only is None,
        "pool": app.pool.counters().alive > 0,
        # Who has no engine, but upstreams of text, has sessions of these alone.
        "engine": await app.health.any_alive() if app.engines.members else bool(app.text_upstreams),
    }
    try:
        await app.database.read(feed.epoch)
    except AppError:
        checks["database"] = False
    needed = checks if flag(head, "writes") else checks.keys() - {"writable"}
    is_ready = all(checks[name] for name in needed)
    return 200 if is_ready else 503, {
        "status": "ready" if is_ready else "not_ready",
        "checks": checks,
        "read_only": read_only,
        "warnings": app.settings.warnings,
    }


WRITES: Schema = {
    "name": "writes",
    "in": "query",
    "required": False,
    "schema": {"type": "boolean", "default": False},
    "description": "Not ready either while the store takes no writes.",
}

DIRECT_ROUTES = (
    DirectRoute("GET", False, "/health", health, "Service"),
    DirectRoute("GET", False, "/ready", ready, "Service", (WRITES,)),
)


@router.get("/docs")
@describe("This document, as a page from which routes can be tried", "anyone", Reply("The page.", {"text/html": TEXT}))
async def explorer() -> Response:
    """The document as a page. It loads nothing but `/openapi.json`, which needs a token where the server does."""
    return Response(*EXPLORER, media_type="text/html; charset=utf-8")


@router.get("/openapi.json")
@describe("This document", "page", Reply("OpenAPI 3.1.", {JSON: ANYTHING}))
async def openapi_json(request: Request) -> Response:
    """The OpenAPI document, built on a thread at the first request."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = await asyncio.to_thread(document, app)
    return Response(msgspec.json.encode(app.openapi_schema), media_type="application/json")
