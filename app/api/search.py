"""The routes of the search."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from app.api.describe import JSON, NOTHING, READ, WRITE, describe, json_reply
from app.api.parameters import LIMIT, PageCursor
from app.api.state import Services, services
from app.domain.patterns import ID, NO_NUL, TAG
from app.errors import InvalidRequest, SearchOff
from app.sessions.session_list import Status
from app.store.heads_view import HeadFilter
from app.store.search.reading import EntryFilter
from app.store.search.writing import Forget

router = APIRouter(tags=["Search"])


def _require_on(app: Services) -> None:
    """Raises SearchOff."""
    if app.settings.search == "off":
        raise SearchOff("TURNLOG_SEARCH is off: this server makes no search index")


@router.get("/search")
@describe(
    "Find messages over all sessions",
    "page",
    json_reply("SearchPage", "The newest messages that match."),
    errors=(InvalidRequest, SearchOff, *READ),
)
async def search(
    request: Request,
    q: Annotated[str | None, Query(max_length=1000, pattern=NO_NUL, description="Words and phrases.")] = None,
    role: Annotated[
        str | None, Query(max_length=64, pattern=NO_NUL, description="Only messages of this role; `rejected`.")
    ] = None,
    tool: Annotated[
        str | None, Query(max_length=256, pattern=NO_NUL, description="Only calls of this tool, and its results.")
    ] = None,
    finish_reason: Annotated[
        str | None, Query(max_length=64, pattern=NO_NUL, description="Only replies that ended so.")
    ] = None,
    reason: Annotated[
        str | None, Query(max_length=128, pattern=NO_NUL, description="Only what is in no row for this reason.")
    ] = None,
    session_id: Annotated[str | None, Query(pattern=ID, description="Only this session.")] = None,
    metadata: Annotated[
        str | None,
        Query(max_length=256, pattern=r"^[^\x00=]+=[^\x00]*$", description="Only sessions with `key=value` in it."),
    ] = None,
    status: Annotated[Status | None, Query(description="Only sessions with this status.")] = None,
    group_id: Annotated[str | None, Query(pattern=NO_NUL, description="Only sessions of this group.")] = None,
    tag: Annotated[str | None, Query(pattern=TAG, description="Only sessions with this tag.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description=LIMIT)] = 20,
    cursor: PageCursor = None,
) -> Response:
    """Messages, tool calls and tool results that match, newest first, paged by cursor. At least one of `q`, `role`,
    `tool`, `finish_reason`, `reason`, `session_id`, `metadata` is needed."""
    app = services(request)
    _require_on(app)
    wanted = EntryFilter(role, tool, finish_reason, reason, session_id, metadata)
    heads = HeadFilter(status=status, group_id=group_id, tag=tag)
    found = await app.search.page(q, wanted, heads, cursor, limit)
    return Response(msgspec.json.encode(found), media_type=JSON)


@router.post("/search/reindex", status_code=204)
@describe("Make the search index anew", "admin", NOTHING, errors=(SearchOff, *WRITE))
async def reindex(request: Request) -> Response:
    """Make the search index anew, beside the turns; meanwhile `is_current` is false."""
    app = services(request)
    _require_on(app)
    await app.writer.submit(Forget())
    return Response(status_code=204)
