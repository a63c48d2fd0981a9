"""`GET /search`, and what it reads: the index, and the heads of the sessions that have what it finds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Query
from pydantic import ConfigDict, Field

from app.api.parameters import LIMIT, Cursor
from app.api.requests import Request
from app.api.routes import READ, Routes, json_reply
from app.domain import cursors
from app.domain.patterns import ID, MAX_INTEGER, NO_NUL
from app.errors import InvalidRequest
from app.features.search.index import FIRST, Index, Message, Wanted
from app.features.search.text import Query as SearchedFor
from app.features.search.text import parse, snippet
from app.sessions.as_reply import as_reply
from app.sessions.log_end import decode_position
from app.sessions.session_list import SessionConditions
from app.store.content import matches
from app.store.ports import Connection
from app.store.sessions import HeadFilter, HeadRow, load_heads, some_ids
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.services import Services

route = Routes("Search")

FEW_SESSIONS = 1000
"""Where the filters leave at most so many sessions, only their messages are looked at."""

AT_ONCE, LOOKED_AT = 200, 5000
"""Messages that one read of the index gives, and one request looks at, if most are of sessions that do not match."""

Text = Annotated[str | None, Field(pattern=NO_NUL)]

CursorFields = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)], str]
"""The last message's number, and the mark of what is searched for."""


class SearchQuery(SessionConditions):
    """What to search for, and in which sessions."""

    model_config = ConfigDict(extra="forbid")

    q: Text = Field(default=None, max_length=1000, description="Words and phrases.")
    role: Text = Field(default=None, max_length=64, description="Only messages of this role.")
    tool: Text = Field(default=None, max_length=256, description="Only calls of this tool and their results.")
    finish_reason: Text = Field(default=None, max_length=64, description="Only replies with this finish reason.")
    session_id: str | None = Field(default=None, pattern=ID, description="Only this session.")
    limit: int = Field(default=20, ge=1, le=100, description=LIMIT)
    cursor: Cursor = None


class Search:
    """The search of one process."""

    def __init__(self, app: Services, index: Index) -> None:
        self._database = app.database
        self._log_end = app.log_end
        self._engines = app.engines
        self._index = index

    async def page(self, query: SearchQuery) -> reply_types.SearchPage:
        """Raises InvalidRequest for a query without a word, or for nothing to search for; StoreUnavailable."""
        parsed = None if query.q is None else parse(query.q)
        if not any((parsed, query.role, query.tool, query.finish_reason, query.session_id)):
            raise InvalidRequest("q, role, tool, finish_reason or session_id must be given")
        before, mark = FIRST, cursors.mark(query, SearchQuery.model_fields.keys() - {"limit", "cursor"})
        if query.cursor is not None:
            before, given = cursors.decode(query.cursor, CursorFields, "this search")
            cursors.require_mark(given, mark)
        end = await self._log_end.present()
        position = await self._index.position()

        filtered = query.of_heads(self._engines)
        few: Sequence[str] | None = None  # the sessions that match; None: any, or too many to name
        if query.session_id is not None:
            few = [query.session_id]
        elif filtered != HeadFilter():
            few = await self._database.read(lambda connection: some_ids(connection, filtered, FEW_SESSIONS + 1))
            few = None if len(few) > FEW_SESSIONS else few
        hits: list[tuple[Message, HeadRow]] = []
        looked_at, size = 0, query.limit + 1
        while len(hits) <= query.limit and looked_at < LOOKED_AT:
            wanted = Wanted(parsed, query.role, query.tool, query.finish_reason, few, before, size)
            messages = await self._index.find(wanted)
            heads = await self._of({message.session_id for message in messages}, filtered, query.metadata)
            hits += [(message, heads[message.session_id]) for message in messages if message.session_id in heads]
            if len(messages) < size:
                before = 0
                break
            before, looked_at, size = messages[-1].id, looked_at + len(messages), AT_ONCE
        if len(hits) > query.limit:
            before = hits[query.limit - 1][0].id
        place = None if position is None else decode_position(position, "the search index").place
        return reply_types.SearchPage(
            hits=[_hit(message, head, parsed) for message, head in hits[: query.limit]],
            next_cursor=cursors.encode((before, mark)) if before else None,
            is_current=place is not None and place >= end,
        )

    async def _of(
        self, session_ids: Collection[str], filtered: HeadFilter, metadata: Mapping[str, Sequence[str]]
    ) -> dict[str, HeadRow]:
        """The heads of those that match, and are not erased."""
        ids = sorted(session_ids)

        def read(connection: Connection) -> dict[str, HeadRow]:
            heads = {row.session_id: row for row in load_heads(connection, ids, filtered) if row.status != "erased"}
            if not metadata:
                return heads
            matching = matches(connection, list(heads), metadata)
            return {session_id: head for session_id, head in heads.items() if matching.get(session_id)}

        return await self._database.read(read)


def _hit(message: Message, head: HeadRow, query: SearchedFor | None) -> reply_types.SearchHit:
    shown = snippet(message.text, query)
    return as_reply(
        reply_types.SearchHit,
        message,
        tools=message.tools.strip("\n").split("\n") if message.tools else [],
        status=head.status,
        run=head.run,
        group_id=head.group_id,
        snippet=shown.text,
        marks=list(shown.marks),
    )


@route(
    "GET /search",
    "Search the messages of all sessions",
    "page",
    json_reply(reply_types.SearchPage, "The newest messages that match."),
    errors=(InvalidRequest, *READ),
    of_run="query",
)
async def search(request: Request, query: Annotated[SearchQuery, Query()]) -> object:
    """Messages, tool calls and tool results that match, newest first, paged by cursor; a page may have fewer hits than
    `limit` though others follow. At least one of `q`, `role`, `tool`, `finish_reason`, `session_id` is needed.

    Only where `TURNLOG_FEATURES` names `search`.
    """
    of_services: Search = request.services.features["search"]
    return await of_services.page(query)
