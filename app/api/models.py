"""Routes that list an engine's models, or show one of them, as clients of OpenAI and Anthropic request them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse

from app.api.describe import ANYTHING, ENGINE, JSON, READ, SESSION, Reply, describe
from app.api.error_handlers import speaks_messages
from app.api.parameters import SessionId
from app.api.path_names import ANY
from app.api.state import services
from app.errors import NotFound, UpstreamInvalid
from app.upstream import headers as http_headers

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Turns"])

ModelId = Annotated[str, Path(description="A model's id, as the list has it; slashes may be percent-encoded.")]

_MODEL = Reply("The model, as the engine lists it, or as Anthropic's API does (`anthropic-version`).", {JSON: ANYTHING})


class _Listing(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str
    created: int | float | None = None


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


@router.get(f"/sessions/{{session_id}}/v1/models/{{model_id:{ANY}}}")
@describe(
    "One model of the session's engine",
    "session",
    _MODEL,
    errors=(*SESSION, *READ, *ENGINE, NotFound),
    passes_engines_errors=True,
)
async def session_model(request: Request, session_id: SessionId, model_id: ModelId) -> Response:
    """One of the models that the session's list has."""
    return _one_of(await session_models(request, session_id), model_id, request)


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


@router.get(f"/v1/models/{{model_id:{ANY}}}")
@describe("One model of an engine", "session", _MODEL, errors=(*ENGINE, NotFound), passes_engines_errors=True)
async def model(request: Request, model_id: ModelId) -> Response:
    """One of the models that the list has."""
    return _one_of(await models(request), model_id, request)


async def models_reply(app: Services, session_id: str) -> Response:
    headers = http_headers.to_engine((), session_id, app.settings.upstream_api_key)
    reply = await app.engines.models(session_id, headers)
    return Response(reply.body.joined(), reply.status, dict(http_headers.to_client(reply.headers)))


def _one_of(listed: Response, model_id: str, request: Request) -> Response:
    """The model of a list; the list itself for no id: a slash behind it. Raises NotFound, UpstreamInvalid."""
    if listed.status_code != 200 or not model_id:
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
        raise NotFound("there is no model of this id; GET /v1/models lists them")
    if not speaks_messages(request):
        return Response(bytes(raw), media_type=JSON)
    named = {"id": model_id, "display_name": model_id, "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return JSONResponse({"type": "model", **named})
