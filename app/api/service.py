"""Routes of the service itself: health, readiness, the OpenAPI document, and the page's sign-in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import pathlib
import time
from typing import Annotated, Any

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, RedirectResponse, Response

from app.api.head import COOKIE
from app.api.requests import Request
from app.api.routes import ANYTHING, BODY, JSON, TEXT, Reply, Routes, json_reply
from app.errors import AppError, Forbidden, Unauthorized
from app.store import feed
from app.tokens import COOKIE_S
from turnlog import replies as reply_types

log = logging.getLogger("turnlog.signin")

route, page_route = Routes("Service"), Routes("Page")

FAILED_S = 0.5
"""Delay of the reply to a wrong token, in seconds."""


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


@route(
    "GET, HEAD /",
    "What this server offers",
    "anyone",
    json_reply(reply_types.Root, "The paths of the page, of this document and of the health check."),
    Reply("A browser: the page.", {}, status=307),
)
async def root(request: Request) -> object:
    """Paths of the page, of this document and of the health check. A browser is sent to the page."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("ui/")
    return {"service": "turnlog", "page": "/ui", "routes": "/docs", "health": "/health"}


@route("GET, HEAD /health", "Is the process alive?", "anyone", json_reply(reply_types.Health, "It is alive."))
async def health(request: Request) -> dict[str, Any]:
    """Answers at once while the process is alive; it does not wait for the database or an engine."""
    app = request.services
    return {
        "status": "ok",
        "release": app.release,
        "session_server_instance_id": app.instance_id,
        "in_flight": app.turns.in_flight,
        "writer": app.writer.counters,
        "pool": app.pool.counters(),
    }


@route(
    "GET, HEAD /ready",
    "Is the process ready to serve?",
    "anyone",
    json_reply(reply_types.Readiness, "It is ready."),
    json_reply(reply_types.Readiness, "It is not; `checks` says why.", 503),
)
async def ready(
    request: Request,
    writes: Annotated[bool, Query(description="Also count a store that takes no writes as not ready.")] = False,
) -> Response:
    """Does the database answer, are its events read in the order of commits, are a worker and an engine alive?

    A store that takes no writes, such as a full one, is ready for reads: `writable` is false. With `writes=1` that is
    503 too. Every ten seconds a write is tried; `read_only` is why it failed. `warnings` concern the settings and do
    not change the status.
    """
    app = request.services
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
    needed = checks if writes else checks.keys() - {"writable"}
    is_ready = all(checks[name] for name in needed)
    told = {
        "status": "ready" if is_ready else "not_ready",
        "checks": checks,
        "read_only": read_only,
        "warnings": app.settings.warnings,
    }
    return Response(msgspec.json.encode(told), 200 if is_ready else 503, media_type=JSON)


@route(
    "GET, HEAD /docs",
    "This document, as a page from which routes can be tried",
    "browser",
    Reply("The page.", {"text/html": TEXT}),
)
async def explorer(request: Request) -> Response:
    """The document as a page. It loads nothing but `/openapi.json`, which needs a token where the server does."""
    return Response(*EXPLORER, media_type="text/html; charset=utf-8")


@route("GET /openapi.json", "This document", "page", Reply("OpenAPI 3.1.", {JSON: ANYTHING}), of_run="any")
async def openapi_json(request: Request) -> Response:
    """The OpenAPI document, built on a thread at the first request."""
    return Response(await asyncio.to_thread(lambda: request.app.document), media_type=JSON)


class SignIn(BaseModel):
    """The body of `POST /ui/sign-in`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1)


@page_route(
    "POST /ui/sign-in",
    "Get the page's cookie for the admin token, or a run's",
    "browser",
    json_reply(reply_types.SignedIn, "Signed in, with `set-cookie` if the server needs a token."),
    errors=(*BODY, Unauthorized, Forbidden),
    body=SignIn,
    example={"token": "…"},
    largest=4096,
)
async def sign_in(request: Request) -> Response:
    """Get the page's cookie for the admin token or that of a run; no cookie if the server needs no token."""
    app = request.services
    token = (await request.body_of(SignIn)).token
    reply = JSONResponse({"signed_in": True})
    if not app.tokens.are_needed:
        return reply
    cookie = app.tokens.cookie_for(token.encode(), time.time())
    of_run = app.tokens.run_of(token.encode())
    if of_run is not None and app.run_number is not None and await app.run_number(of_run.run) == of_run.number:
        cookie = app.tokens.cookie_of_run(of_run, time.time())
    if cookie is None:
        log.warning("sign-in refused: the token is unknown")
        await asyncio.sleep(FAILED_S)
        raise Unauthorized("the token is unknown")
    _set(request, reply, cookie, COOKIE_S)
    return reply


@page_route(
    "POST /ui/sign-out", "Delete the page's cookie", "browser", json_reply(reply_types.SignedIn), errors=(Forbidden,)
)
async def sign_out(request: Request) -> Response:
    """Delete the page's cookie in the browser."""
    reply = JSONResponse({"signed_in": False})
    _set(request, reply, "", 0)
    return reply


def _set(request: Request, reply: Response, value: str, seconds: int) -> None:
    """Set the cookie, with `Secure` if the browser uses https, also if a trusted proxy says so."""
    secure = request.url.scheme == "https"
    reply.set_cookie(COOKIE.decode(), value, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict")
