"""Sending a whole reply over ASGI, and errors as the OpenAI SDKs read them."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from app.errors import AppError
from app.upstream.headers import Headers

PIECE = 1 << 20
"""A large body goes out in pieces, so that the loop serves others between them."""


async def start_reply(send: Send, status: int, headers: Headers) -> None:
    """Status and headers, as ASGI wants them."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await start_reply(send, status, [*headers, ("content-length", str(len(body)))])
    for start in range(0, max(len(body), 1), PIECE):
        piece = body if len(body) <= PIECE else body[start : start + PIECE]
        more = start + PIECE < len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


def error_parts(error: AppError) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error reply."""
    headers = [("content-type", "application/json"), *error.headers().items()]
    return error.status, headers, msgspec.json.encode(error.body())
