"""Routes that list an engine's models, as OpenAI clients request them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.describe import ANYTHING, ENGINE, JSON, READ, SESSION, Reply, describe
from app.api.parameters import SessionId
from app.api.state import services
from app.upstream import headers as http_headers

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Turns"])


@router.get("/sessions/{session_id}/v1/models")
@describe(
    "The models of the session's engine",
    "session",
    Reply("The engine's reply.", {JSON: ANYTHING}),
    errors=(*SESSION, *READ, *ENGINE),
    passes_engines_errors=True,
)
async def session_models(request: Request, session_id: SessionId) -> Response:
    """The models of the session's engine; of a session of text, its own."""
    app = services(request)
    config = (await app.sessions.require(session_id)).session.config
    if config.upstream is not None:
        return JSONResponse({"object": "list", "data": [{"id": config.model, "object": "model", "created": 0}]})
    return await models_reply(app, session_id)


@router.get("/v1/models")
@describe(
    "The models of an engine",
    "session",
    Reply("The engine's reply.", {JSON: ANYTHING}),
    errors=ENGINE,
    passes_engines_errors=True,
)
async def models(request: Request) -> Response:
    """The models of an engine."""
    return await models_reply(services(request), "")


async def models_reply(app: Services, session_id: str) -> Response:
    headers = http_headers.to_engine((), session_id, app.settings.upstream_api_key)
    reply = await app.engines.models(session_id, headers)
    return Response(reply.body.joined(), reply.status, dict(http_headers.to_client(reply.headers)))
