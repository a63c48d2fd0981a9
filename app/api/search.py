"""The routes of the search."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from app.api.describe import ANYTHING, JSON, NOTHING, READ, WRITE, describe, json_reply
from app.api.parameters import LIMIT, PageCursor, require_known
from app.api.state import Services, services
from app.domain.patterns import ID, NO_NUL
from app.errors import InvalidRequest, SearchOff
from app.sessions.session_filter import SessionConditions
from app.store.search.reading import EntryFilter
from app.store.search.writing import Forget

router = APIRouter(tags=["Search"])


def _require_on(app: Services) -> None:
    """Raises SearchOff."""
    if app.settings.search == "off":
        raise SearchOff("TURNLOG_SEARCH is off: this server makes no search index")


Text = Annotated[str | None, Field(pattern=NO_NUL)]


class SearchQuery(SessionConditions):
    """What to search for, and in which sessions."""

    q: Text = Field(default=None, max_length=1000, description="Words and phrases.")
    role: Text = Field(default=None, max_length=64, description="Only messages of this role; `rejected`.")
    tool: Text = Field(default=None, max_length=256, description="Only calls of this tool, and its results.")
    finish_reason: Text = Field(default=None, max_length=64, description="Only replies that ended so.")
    reason: Text = Field(default=None, max_length=128, description="Only what is in no row for this reason.")
    session_id: str | None = Field(default=None, pattern=ID, description="Only this session.")
    metadata: str | None = Field(
        default=None,
        max_length=256,
        pattern=r"^[^\x00=]+=[^\x00]*$",
        description="Only sessions with `key=value` in it.",
    )
    limit: int = Field(default=20, ge=1, le=100, description=LIMIT)
    cursor: PageCursor = None


@router.get("/search")
@describe(
    "Find messages over all sessions",
    "page",
    json_reply(ANYTHING, "The newest messages that match."),
    errors=(InvalidRequest, SearchOff, *READ),
)
async def search(request: Request, query: Annotated[SearchQuery, Query()]) -> Response:
    """Messages, tool calls and tool results that match, newest first, paged by cursor. At least one of `q`, `role`,
    `tool`, `finish_reason`, `reason`, `session_id`, `metadata` is needed."""
    app = services(request)
    _require_on(app)
    require_known(request, SearchQuery)
    wanted = EntryFilter(
        query.role, query.tool, query.finish_reason, query.reason, query.session_id, pair=query.metadata
    )
    found = await app.search.page(query.q, wanted, query, query.cursor, query.limit)
    return Response(msgspec.json.encode(found), media_type=JSON)


@router.post("/search/reindex", status_code=204)
@describe("Make the search index anew", "admin", NOTHING, errors=(SearchOff, *WRITE))
async def reindex(request: Request) -> Response:
    """Make the search index anew, beside the turns; meanwhile `is_current` is false."""
    app = services(request)
    _require_on(app)
    await app.writer.submit(Forget())
    return Response(status_code=204)
