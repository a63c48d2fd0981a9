"""Routes that ask an engine and commit nothing: for its models, as clients of OpenAI and Anthropic request them, and
how many tokens a Messages request has."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import msgspec
from fastapi import Path
from starlette.responses import JSONResponse, Response

from app.api.limits import read_body
from app.api.parameters import SessionId
from app.api.requests import Request
from app.api.routes import ANYTHING, BODY, ENGINE, JSON, READ, SESSION, Reply, Routes, json_reply
from app.domain.events import DEFAULT_RUN
from app.domain.request import ChatRequest, fields_of, join_object
from app.domain.surrogates import mended
from app.errors import InvalidRequest, NotFound, Unsupported, UpstreamInvalid
from app.fleet.engines import COUNT_TOKENS
from app.logs import request_id
from app.protocols.errors import engine_error
from app.protocols.messages.parse import parse_messages
from app.protocols.registry import PROTOCOLS
from app.turn.large_bodies import large_bytes
from app.upstream import headers as http_headers
from app.upstream.client import EngineReply
from turnlog import replies as reply_types

route = Routes("Turns")

ModelId = Annotated[str, Path(description="A model's id, as the list has it; slashes may be percent-encoded.")]

_MODEL = Reply("The model, as the engine lists it, or as Anthropic's API does (`anthropic-version`).", {JSON: ANYTHING})


class _Listing(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str
    created: int | float | None = None


@route(
    "GET /sessions/{session_id}/v1/models",
    "The models of the session's engine",
    "session",
    Reply("The engine's reply.", {JSON: ANYTHING}),
    errors=(*SESSION, *READ, *ENGINE),
    passes_engines_errors=True,
    of_run="session",
)
async def session_models(request: Request, session_id: SessionId) -> Response:
    """The models of the session's engine; in a session with capture "text", its upstream's."""
    config = (await request.services.sessions.require(session_id)).session.config
    if config.upstream is not None:
        return JSONResponse({"object": "list", "data": [{"id": config.model, "object": "model", "created": 0}]})
    return await models_reply(request, config.of_run, session_id)


@route(
    "GET /sessions/{session_id}/v1/models/{model_id:path}",
    "One model of the session's engine",
    "session",
    _MODEL,
    errors=(*SESSION, *READ, *ENGINE, NotFound),
    passes_engines_errors=True,
    of_run="session",
)
async def session_model(request: Request, session_id: SessionId, model_id: ModelId) -> Response:
    """One of the models that the session's list has."""
    return _one_of(await session_models(request, session_id), model_id, request)


@route(
    "GET /v1/models",
    "The models of an engine",
    "session",
    Reply("The engine's reply.", {JSON: ANYTHING}),
    errors=(InvalidRequest, *READ, *ENGINE),
    passes_engines_errors=True,
    of_run="header",
)
async def models(request: Request) -> Response:
    """The models of an engine of the run."""
    return await models_reply(request, await _run_of(request), "")


@route(
    "GET /v1/models/{model_id:path}",
    "One model of an engine",
    "session",
    _MODEL,
    errors=(InvalidRequest, *READ, *ENGINE, NotFound),
    passes_engines_errors=True,
    of_run="header",
)
async def model(request: Request, model_id: ModelId) -> Response:
    """One of the models that the list has."""
    return _one_of(await models(request), model_id, request)


async def _run_of(request: Request) -> str:
    """The run of a request without a session in its path: that of the token's session, else the one that it names."""
    session_id = request.token_session
    entry = None if session_id is None else await request.services.cache.current(session_id)
    return (request.head.run or DEFAULT_RUN) if entry is None else entry.session.config.of_run


async def models_reply(request: Request, run: str, session_id: str) -> Response:
    app = request.services
    headers = http_headers.to_engine((), session_id, app.settings.upstream_api_key)
    reply = await app.engines.models(run, session_id, headers)
    return Response(reply.body.joined(), reply.status, dict(http_headers.to_client(reply.headers)))


def _one_of(listed: Response, model_id: str, request: Request) -> Response:
    """The model of a list, or an engine's error instead of one. Raises NotFound, UpstreamInvalid."""
    if listed.status_code != 200:
        return listed
    try:
        raws = msgspec.json.decode(listed.body, type=_Listing).data
        raw, created = next(
            ((raw, one.created) for raw in raws if (one := msgspec.json.decode(raw, type=_Model)).id == model_id),
            (None, 0),
        )
        at = datetime.fromtimestamp(created or 0, UTC)
    except (msgspec.MsgspecError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise UpstreamInvalid("the engine returned a malformed list of models") from error
    if raw is None:
        raise NotFound("no model has this id; GET /v1/models lists them")
    if b"anthropic-version" not in request.head.headers:
        return Response(bytes(raw), media_type=JSON)
    named = {"id": model_id, "display_name": model_id, "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return JSONResponse({"type": "model", **named})


NOT_COUNTING = frozenset({404, 405, 501})
"""How engines answer where they do not count: SGLang and vLLM have no code for it, nor for an unknown model."""

COUNTED = frozenset(
    ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
)
"""The fields that make the prompt. No other goes to an engine: some are not a session's to set."""

_COUNTING = (*BODY, Unsupported, *READ, *ENGINE)


@route(
    f"POST /sessions/{{session_id}}{COUNT_TOKENS}",
    "Count the tokens of a Messages request, in a session",
    "session",
    json_reply(reply_types.TokenCount, "The count."),
    errors=(*_COUNTING, *SESSION),
    passes_engines_errors=True,
    of_run="session",
)
async def count_in_session(request: Request, session_id: SessionId) -> object:
    """The tokens of the prompt that the request makes, exact with a tokenizer, else the count of the session's engine.

    The body is that of `POST /v1/messages`; `max_tokens` is not needed. Nothing is generated or stored.
    """
    session = (await request.services.sessions.require(session_id)).session
    if session.is_text:
        raise Unsupported('tokens cannot be counted in a session with capture "text"')
    return await _count(request, session.config.of_run, session_id)


@route(
    f"POST {COUNT_TOKENS}",
    "Count the tokens of a Messages request",
    "session",
    json_reply(reply_types.TokenCount, "The count."),
    errors=_COUNTING,
    passes_engines_errors=True,
    of_run="header",
)
async def count(request: Request) -> object:
    """The same without a session: an engine's count is that of any engine of the run."""
    return await _count(request, await _run_of(request), "")


async def _count(request: Request, of_run: str, session_id: str) -> object:
    """The body's memory is reserved until the count is known: large bodies wait for each other."""
    app, session = request.services, request.token_session or session_id or None
    with app.inflight.reserve(session, request.head.peer) as reservation:
        limit = app.settings.max_request_bytes
        body = await read_body(request.receive, request.headers.items(), limit, reservation) or b""
        run, large = app.turns.large_bodies.run, large_bytes(body)
        body, parsed = await run(large, partial(_parsed_count, body))
        tokens = await app.token_in.count(parsed)
        if tokens is not None:
            return {"input_tokens": tokens}
        headers = http_headers.to_engine(request.headers.items(), session_id, app.settings.upstream_api_key)
        counted = await run(large, lambda: _counted(body))
        return _passed_count(await app.engines.count_tokens(of_run, session_id, counted, headers))


def _parsed_count(body: bytes) -> tuple[bytes, ChatRequest]:
    """The body as it is read, and its request. Raises as `parse_messages`."""
    try:
        return body, parse_messages(body, generates=False)
    except InvalidRequest:
        if (read := mended(body)) is None:
            raise
    return read.body, parse_messages(read.body, generates=False)


def _counted(body: bytes) -> bytes:
    fields, _ = fields_of(body)
    return join_object({name: raw for name, raw in fields.items() if name in COUNTED})


def _passed_count(reply: EngineReply) -> Response:
    """The engine's answer, its error in the shape of the protocol. Raises Unsupported."""
    content = reply.body.joined()
    if reply.status in NOT_COUNTING:
        raise Unsupported(
            f"the engine answered {reply.status} to {COUNT_TOKENS}: it cannot count tokens, or does not know "
            "the model; with TURNLOG_TOKENIZER set, Turnlog counts them itself"
        )
    passed = dict(http_headers.to_client(reply.headers))
    if reply.status != 200:
        content = PROTOCOLS["messages"].error(engine_error(reply.status, content, request_id()))
        passed["content-type"] = "application/json"
    return Response(content, reply.status, passed)
