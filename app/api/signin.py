"""Sign-in of the page: a browser sends the admin token once and gets a cookie for twelve hours,
which reads everything and writes notes."""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.bodies import read_model
from app.api.describe import BODY, describe, json_reply
from app.api.head import COOKIE, SIGN_IN, SIGN_OUT
from app.api.state import services, whole_body
from app.api.tokens import COOKIE_S
from app.errors import Forbidden, Unauthorized
from turnlog import replies as reply_types

log = logging.getLogger("turnlog.signin")

router = APIRouter(tags=["Page"])

MAX_BYTES = 4096

FAILED_S = 0.5
"""Delay of the reply to a wrong token, in seconds."""


class SignIn(BaseModel):
    """The body of `POST /ui/sign-in`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1)


@router.post(SIGN_IN)
@describe(
    "Get the page's cookie for the admin token",
    "anyone",
    json_reply(reply_types.SignedIn, "Signed in, with `set-cookie` if the server needs a token."),
    errors=(*BODY, Unauthorized, Forbidden),
    body=SignIn,
    example={"token": "…"},
)
async def sign_in(request: Request) -> Response:
    """Get the page's cookie for the admin token; no cookie if the server needs no token."""
    app = services(request)
    token = read_model(await whole_body(request, MAX_BYTES), SignIn).token
    reply = JSONResponse({"signed_in": True})
    if not app.tokens.are_needed:
        return reply
    cookie = app.tokens.cookie_for(token.encode(), time.time())
    if cookie is None:
        log.warning("a browser could not sign in: the token is unknown")
        await asyncio.sleep(FAILED_S)
        raise Unauthorized("the token is unknown")
    _set(request, reply, cookie, COOKIE_S)
    return reply


@router.post(SIGN_OUT)
@describe("Delete the page's cookie", "anyone", json_reply(reply_types.SignedIn), errors=(Forbidden,))
async def sign_out(request: Request) -> Response:
    """Delete the page's cookie in the browser."""
    reply = JSONResponse({"signed_in": False})
    _set(request, reply, "", 0)
    return reply


def _set(request: Request, reply: Response, value: str, seconds: int) -> None:
    """Set the cookie, with `Secure` if the browser uses https, also if a trusted proxy says so."""
    secure = request.url.scheme == "https"
    reply.set_cookie(COOKIE.decode(), value, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict")
