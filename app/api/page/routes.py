"""What the page asks for: everything under `/ui/api`, to be looked at and nothing else."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from app.api.engines import shown
from app.api.service import ExportWish, require_known
from app.api.sessions import MAX_INTEGER, NO_NUL, SessionId
from app.api.state import Services, services
from app.sessions.session_list import Asked, Sort, State

router = APIRouter(prefix="/ui/api")

MAX_PAGE = 500
MAX_TOKENS = 10_000
MAX_SECONDS = 10 * 365 * 86_400

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

Text = Annotated[str | None, Query(max_length=512, pattern=NO_NUL)]
Number = Annotated[float | None, Query(allow_inf_nan=False)]


def reply(found: object) -> Response:
    """Encoded as it is: FastAPI would make Python objects of a whole session first."""
    return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)


@router.get("/me")
async def me(request: Request) -> Response:
    """Must one sign in? Where one must and has not, this is answered 401 before it comes here."""
    auth = "token" if services(request).tokens.are_needed else "none"
    return reply({"signed_in": True, "auth": auth, "release": request.app.version, "now": time.time()})


@router.get("/overview")
async def overview(request: Request) -> Response:
    return reply(await overview_of(services(request)))


async def overview_of(app: Services) -> dict[str, Any]:
    """Raises StoreUnavailable."""
    found = msgspec.structs.asdict(await (await app.page()).overviews.now())
    return {**found, "engines": [shown(app, listed) for listed in app.engine_pool.listed()]}


@router.get("/sessions")
async def list_sessions(
    request: Request,
    state: State | None = None,
    group_id: Text = None,
    engine: Text = None,
    min_reward: Number = None,
    max_reward: Number = None,
    unrewarded: bool = False,
    min_staleness: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    stuck_s: Annotated[float | None, Query(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = None,
    q: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] = None,
    sort: Sort = "created_at",
    order: Literal["desc", "asc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    cursor: str | None = None,
) -> Response:
    """Sessions by any filter, in any order; `sort=claimed_since` lists those with a turn in flight alone."""
    asked = Asked(
        state=state,
        group_id=group_id,
        engine=engine,
        min_reward=min_reward,
        max_reward=max_reward,
        unrewarded=unrewarded,
        min_staleness=min_staleness,
        stuck_s=stuck_s,
        q=q,
        sort=sort,
        newest_first=order == "desc",
    )
    return reply(await (await services(request).page()).sessions.page(asked, cursor, limit))


Seq = Annotated[int | None, Query(ge=1, le=MAX_INTEGER)]


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: SessionId, seq: Seq = None) -> Response:
    """A session in whatever state, as of event `seq`."""
    return reply(await (await services(request).page()).views.at(session_id, seq))


@router.get("/sessions/{session_id}/conversation")
async def conversation(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    turn: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
) -> Response:
    """What was said up to a turn, a discarded one perhaps."""
    return reply(await (await services(request).page()).conversations.at(session_id, seq, turn))


@router.get("/sessions/{session_id}/tokens")
async def tokens(
    request: Request,
    session_id: SessionId,
    seq: Seq = None,
    segment: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    start: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 2000,
) -> Response:
    """A live segment's tokens, as an export gives them."""
    return reply(await (await services(request).page()).tokens.at(session_id, seq, segment, start, limit))


@router.get("/groups")
async def list_groups(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100, cursor: str | None = None
) -> Response:
    """Groups in the order of their ids."""
    return reply(await (await services(request).page()).groups.page(cursor, limit))


@router.get("/exports")
async def preview_export(request: Request, wish: ExportWish, cursor: str | None = None) -> Response:
    """What `/export` with the same parameters would hold, and why not the rest; a part of it at a time."""
    require_known(request)
    return reply(await (await services(request).page()).previews.of(wish, cursor))
