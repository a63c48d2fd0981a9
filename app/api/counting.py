"""Routes that count a Messages request's tokens. They generate and commit nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from app.api.describe import BODY, ENGINE, READ, SESSION, describe, json_reply
from app.api.head import TOKEN_SESSION
from app.api.limits import peer_of, read_body
from app.api.parameters import SessionId
from app.api.state import services
from app.domain.request import ChatRequest, fields_of, join_object
from app.domain.surrogates import mended
from app.errors import InvalidRequest, Unsupported
from app.fleet.engines import COUNT_TOKENS
from app.logs import request_id
from app.protocols.errors import engine_error
from app.protocols.messages.parse import parse_count
from app.protocols.registry import PROTOCOLS
from app.turn.large_bodies import large_bytes
from app.upstream import headers as http_headers
from app.upstream.client import EngineReply
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Turns"])

UNKNOWN = frozenset({404, 405, 501})
"""How engines answer where they do not count: SGLang and vLLM have no code for it, nor for an unknown model."""

COUNTED = frozenset(
    ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
)
"""The fields that make the prompt. No other goes to an engine: some are not a session's to set."""

_ERRORS = (*BODY, Unsupported, *READ, *ENGINE)


@router.post("/sessions/{session_id}" + COUNT_TOKENS)
@describe(
    "Count the tokens of a Messages request, in a session",
    "session",
    json_reply(reply_types.TokenCount, "The count."),
    errors=(*_ERRORS, *SESSION),
    passes_engines_errors=True,
)
async def count_in_session(request: Request, session_id: SessionId) -> Response:
    """The tokens of the prompt that the request makes, exact with a tokenizer, else the count of the session's engine.

    The body is that of `POST /v1/messages`; `max_tokens` is not needed. Nothing is generated or stored.
    """
    app = services(request)
    if (await app.sessions.require(session_id)).session.is_text:
        raise Unsupported("the upstream of a session of text counts no tokens")
    return await _count(request, app, session_id)


@router.post(COUNT_TOKENS)
@describe(
    "Count the tokens of a Messages request",
    "session",
    json_reply(reply_types.TokenCount, "The count."),
    errors=_ERRORS,
    passes_engines_errors=True,
)
async def count(request: Request) -> Response:
    """The same without a session: an engine's count is that of any engine."""
    return await _count(request, services(request), "")


async def _count(request: Request, app: Services, session_id: str) -> Response:
    """The body's memory is reserved until the count is known: large bodies wait for each other."""
    session = request.scope.get(TOKEN_SESSION) or session_id or None
    with app.inflight.reserve(session, peer_of(request.scope)) as reservation:
        limit = app.settings.max_request_bytes
        body = await read_body(request.receive, request.headers.items(), limit, reservation) or b""
        run, large = app.turns.large_bodies.run, large_bytes(body)
        body, parsed = await run(large, partial(_parsed, body))
        tokens = await app.token_in.count(parsed)
        if tokens is not None:
            return Response(msgspec.json.encode({"input_tokens": tokens}), media_type="application/json")
        headers = http_headers.to_engine(request.headers.items(), session_id, app.settings.upstream_api_key)
        counted = await run(large, lambda: _counted(body))
        return _passed(await app.engines.count_tokens(session_id, counted, headers))


def _parsed(body: bytes) -> tuple[bytes, ChatRequest]:
    """The body as it is read, and its request. Raises as `parse_count`."""
    try:
        return body, parse_count(body)
    except InvalidRequest:
        if (read := mended(body)) is None:
            raise
    return read.body, parse_count(read.body)


def _counted(body: bytes) -> bytes:
    fields, _ = fields_of(body)
    return join_object({name: raw for name, raw in fields.items() if name in COUNTED})


def _passed(reply: EngineReply) -> Response:
    """The engine's answer, its error in the shape of the protocol. Raises Unsupported."""
    content = reply.body.joined()
    if reply.status in UNKNOWN:
        raise Unsupported(
            f"the engine answered {reply.status} to {COUNT_TOKENS}: it counts no tokens, or does not know the model; "
            "with TURNLOG_TOKENIZER Turnlog counts them itself"
        )
    passed = dict(http_headers.to_client(reply.headers))
    if reply.status != 200:
        content = PROTOCOLS["messages"].error(engine_error(reply.status, content, request_id()))
        passed["content-type"] = "application/json"
    return Response(content, reply.status, passed)
