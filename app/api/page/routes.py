"""What the page asks for: everything under `/ui/api`, to be looked at and nothing else."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from app.api.describe import ANYTHING, JSON, READ, SESSION, Reply, describe
from app.api.engines import engine_fields
from app.api.exports import ExportParameters
from app.api.parameters import LIMIT, PageCursor, SessionId, require_known
from app.api.state import Services, services
from app.domain.patterns import MAX_INTEGER
from app.errors import InvalidRequest, NotFound
from app.sessions.session_list import SessionQuery

router = APIRouter(prefix="/ui/api", tags=["Page"])

MAX_PAGE = 500
MAX_TOKENS = 10_000
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

for_the_page = describe(
    "For the page",
    "page",
    Reply("What the page shows.", {JSON: ANYTHING}),
    errors=(InvalidRequest, NotFound, *SESSION, *READ),
)
"""What lies under `/ui/api/`: it goes with the page's files and may change with them."""


class SessionListParameters(SessionQuery):
    """What the list holds, and which part of it."""

    limit: int = Field(default=100, ge=1, le=MAX_PAGE, description=LIMIT)
    cursor: PageCursor = None


def reply(found: object) -> Response:
    """Encoded as it is: FastAPI would make Python objects of a whole session first."""
    return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)


@router.get("/me")
@for_the_page
async def me(request: Request) -> Response:
    """Must one sign in? Where one must and has not, this is answered 401 before it comes here."""
    auth = "token" if services(request).tokens.are_needed else "none"
    return reply({"signed_in": True, "auth": auth, "release": request.app.version, "now": time.time()})


@router.get("/overview")
@for_the_page
async def overview(request: Request) -> Response:
    return reply(await overview_of(services(request)))


async def overview_of(app: Services) -> dict[str, Any]:
    """Raises StoreUnavailable."""
    found = msgspec.structs.asdict(await (await app.page()).overviews.now())
    return {**found, "engines": [engine_fields(app, listed) for listed in app.engine_pool.listed()]}


@router.get("/sessions")
@for_the_page
async def list_sessions(request: Request, query: Annotated[SessionListParameters, Query()]) -> Response:
    """Sessions by any filter, in any order; `sort=claimed_since` lists those with a turn in flight alone."""
    return reply(await (await services(request).page()).sessions.page(query, query.cursor, query.limit))


Seq = Annotated[
    int | None,
    Query(ge=1, le=MAX_INTEGER, description="The state after this event; the last where it is left out."),
]


@router.get("/sessions/{session_id}")
@for_the_page
async def session(request: Request, session_id: SessionId, seq: Seq = None) -> Response:
    """A session in whatever state, as of event `seq`."""
    return reply(await (await services(request).page()).views.at(session_id, seq))


@router.get("/sessions/{session_id}/conversation")
@for_the_page
async def conversation(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    turn: Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="A turn's number, from 1.")] = None,
) -> Response:
    """What was said up to a turn, a discarded one perhaps."""
    return reply(await (await services(request).page()).conversations.at(session_id, seq, turn))


@router.get("/sessions/{session_id}/tokens")
@for_the_page
async def tokens(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    segment: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="Which segment.")] = None,
    start: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Where to begin.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_TOKENS, description=LIMIT)] = 2000,
) -> Response:
    """A live segment's tokens, as an export gives them."""
    return reply(await (await services(request).page()).tokens.at(session_id, seq, segment, start, limit))


@router.get("/groups")
@for_the_page
async def list_groups(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description=LIMIT)] = 100,
    cursor: PageCursor = None,
) -> Response:
    """Groups in the order of their ids."""
    return reply(await (await services(request).page()).groups.page(cursor, limit))


@router.get("/exports")
@for_the_page
async def preview_export(request: Request, query: Annotated[ExportParameters, Query()]) -> Response:
    """What `/export` with the same parameters would hold, and why not the rest; a part of it at a time."""
    require_known(request, ExportParameters)
    return reply(await (await services(request).page()).previews.of(query, query.cursor))
