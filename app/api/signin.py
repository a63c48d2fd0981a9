"""Signing in at the page: a browser shows the admin token once, and gets a cookie that reads for twelve hours."""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.auth import COOKIE, SIGN_IN, SIGN_OUT
from app.api.bodies import read_model
from app.api.describe import BODY, describe, json_reply
from app.api.state import services, whole_body
from app.api.tokens import COOKIE_S
from app.errors import Forbidden, Unauthorized

log = logging.getLogger("turnlog.signin")

router = APIRouter(tags=["Page"])

MAX_BYTES = 4096

FAILED_S = 0.5
"""Before a wrong token is answered."""


class SignIn(BaseModel):
    """The body of `POST /ui/sign-in`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1)


@router.post(SIGN_IN)
@describe(
    "A cookie for the admin token",
    "anyone",
    json_reply("SignedIn", "`set-cookie`, where a token is needed."),
    errors=(*BODY, Unauthorized, Forbidden),
    body=SignIn,
    example={"token": "…"},
)
async def sign_in(request: Request) -> Response:
    """A cookie for the admin token; nothing, where no token is needed. Raises Unauthorized."""
    app = services(request)
    token = read_model(await whole_body(request, MAX_BYTES), SignIn).token
    reply = JSONResponse({"signed_in": True})
    if not app.tokens.are_needed:
        return reply
    cookie = app.tokens.cookie_for(token.encode(), time.time())
    if cookie is None:
        log.warning("a browser could not sign in: the token is not known")
        await asyncio.sleep(FAILED_S)
        raise Unauthorized("the token is not known")
    _set(request, reply, cookie, COOKIE_S)
    return reply


@router.post(SIGN_OUT)
@describe("Forget the cookie", "anyone", json_reply("SignedIn"), errors=(Forbidden,))
async def sign_out(request: Request) -> Response:
    """The browser forgets its cookie."""
    reply = JSONResponse({"signed_in": False})
    _set(request, reply, "", 0)
    return reply


def _set(request: Request, reply: Response, value: str, seconds: int) -> None:
    """`Secure` wherever the browser came by https, also through a proxy that says so and is believed."""
    secure = request.url.scheme == "https"
    reply.set_cookie(COOKIE.decode(), value, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict")
