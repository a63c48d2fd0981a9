"""What replies have in common: their headers, how large ones are rendered, and errors as the OpenAI SDKs read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Send

from app.errors import AppError
from app.protocols.base import WireProtocol
from app.protocols.errors import own_error
from app.upstream.headers import Headers

INTERNAL = "an internal error; the server's log has it"

RENDER_INLINE = 64 << 10
"""Bytes. What is rendered from a larger body is rendered on a thread."""

ROLLED_BACK = "x-turnlog-rolled-back"
"""Header with the number of live turns that the reply's turn superseded when it was committed."""

LEFT_OUT = "x-turnlog-left-out"
"""Header with what of the request the engine was not sent (`app.domain.left_out`)."""


def left_out_header(left_out: Sequence[str]) -> Headers:
    return [(LEFT_OUT, ", ".join(left_out))] if left_out else []


async def start_reply(send: Send, status: int, headers: Headers) -> None:
    """Send status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def rendered(size: int, render: Callable[[], bytes]) -> bytes:
    """What `render` makes of a stored body of `size` bytes."""
    return render() if size <= RENDER_INLINE else await asyncio.to_thread(render)


def error_parts(
    error: AppError, protocol: WireProtocol | None = None, request_id: str | None = None
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error reply, in the shape of `protocol` or else OpenAI's."""
    headers = [("content-type", "application/json"), *error.headers().items()]
    if protocol is None or protocol.is_native:
        return error.status, headers, msgspec.json.encode(error.body())
    return error.status, headers, protocol.error(own_error(error, request_id))
