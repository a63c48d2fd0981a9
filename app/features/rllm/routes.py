"""The gateway's routes of sessions and traces, as its client asks them. `paths.py` leads its paths here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse

from app.api.creation import CreateSession, create
from app.api.parameters import SessionId
from app.api.replies import started
from app.api.requests import Request
from app.api.routes import ANYTHING, BODY, JSON, PAYLOADS, READ, SESSION, WRITE, Routes, json_reply
from app.api.sessions import session_json
from app.errors import InvalidRequest, NotFound, SessionExists, SessionNotFound
from app.export.shapes.rllm import Trace
from app.features.rllm import traces
from app.features.rllm.paths import spoken
from app.features.rllm.rules import id_of, name_of, pinned
from app.sessions.session_list import SessionQuery
from app.store.content import metadata_of

if TYPE_CHECKING:
    from app.services import Services

route = Routes("rLLM", spoken)

AT_ONCE = 100
"""Sessions that one request deletes at a time; their writes share a transaction."""

PAGE = 1000

Since = Annotated[float | None, Query(description="Only what is not older, in seconds since the epoch.")]
Limit = Annotated[int | None, Query(description="Maximum number of traces, the oldest first.")]


class GatewaySession(CreateSession):
    """The body of `POST /sessions` with the gateway's own field: its parameters override those of each request."""

    session_id: str | None = None
    sampling_params: dict[str, Any] | None = None


class SessionIds(BaseModel):
    """Names of sessions."""

    model_config = ConfigDict(extra="ignore", strict=True)

    session_ids: list[str] = []


class TraceQuery(SessionIds):
    """Names of sessions, and which of the traces of each."""

    since: float | None = None
    limit: int | None = None


class TracedSession(msgspec.Struct):
    """A session in the gateway's list."""

    session_id: str
    trace_count: int
    created_at: float
    metadata: msgspec.Raw


@route(
    "POST /rllm/sessions",
    "Create a session, also under the name of a deleted one",
    "admin",
    json_reply(ANYTHING, "The session, as `POST /sessions` tells it, by the name that was given."),
    errors=(*BODY, SessionExists, *WRITE),
    body=GatewaySession,
    optional_body=True,
    example={"session_id": "task-17:0", "sampling_params": {"temperature": 1.0}},
)
async def create_session(request: Request) -> dict[str, Any]:
    """Replaces `POST /sessions` if this feature is on. A session without a turn may be created again with another
    body; one that has turns is 409, since its traces would mix two."""
    app = request.services
    given = await request.body_of(GatewaySession)
    name = given.session_id
    # Each request of the gateway's stands for itself: in a tree, none goes back on another.
    fields: dict[str, Any] = {
        "session_id": id_of(name) if name else None,
        "history": given.history or app.settings.history or "tree",
    }
    if given.sampling_params is not None:
        if given.params is not None:
            raise InvalidRequest("sampling_params and params mean the same; give one of them")
        params, model = pinned(given.sampling_params)
        fields |= {"params": params or None, "model": model or given.model}
    body = given.model_copy(update=fields)
    try:
        made = await create(request, body, by_name=True)
    except SessionExists:
        if body.session_id is None or not await _begin_anew(app, request.head.run or body.run, body.session_id):
            raise
        made = await create(request, body, by_name=True)
    return {**made, "session_id": name or made["session_id"]}


async def _begin_anew(app: Services, run: str | None, name: str) -> bool:
    """Finish a session that nothing was generated in."""
    session_id = await app.names.newest(run, name)
    live = await app.cache.current(session_id)
    if live is None or live.session.status != "open" or live.session.turns or live.session.open_turns:
        return False
    await app.names.finish(live.session.config.of_run, session_id)
    return True


@route(
    "GET /rllm/sessions",
    "List the open sessions that have traces",
    "page",
    json_reply(list[TracedSession]),
    errors=READ,
)
async def list_sessions(request: Request, since: Since = None, limit: Limit = None) -> StreamingResponse:
    """Replaces `GET /sessions` if this feature is on and only `since` and `limit` are given. Newest
    first."""
    return await started(_array(_sessions(request.services, since, limit)), JSON)


async def _sessions(app: Services, since: float | None, limit: int | None) -> AsyncIterator[TracedSession]:
    query, cursor, left = SessionQuery(status="open"), None, limit
    while left is None or left > 0:
        page = await app.session_list.page(query, cursor, PAGE, counted=False)
        rows = [row for row in page["sessions"] if row["turns"] and (since is None or row["created_at"] >= since)]
        ids = [row["session_id"] for row in rows]
        metadata = await app.database.read(lambda connection: metadata_of(connection, ids))  # noqa: B023
        for row in rows[:left]:
            given = msgspec.Raw(metadata.get(row["session_id"], b"{}"))
            yield TracedSession(name_of(row["name"] or row["session_id"]), row["turns"], row["created_at"], given)
        left, cursor = None if left is None else left - len(rows), page["next_cursor"]
        if cursor is None:
            return


@route(
    "GET /sessions/{session_id}/rllm",
    "The session, with the number of its traces",
    "session",
    json_reply(ANYTHING, "What `GET /sessions/{session_id}` tells, `trace_count` and `created_at`."),
    errors=(*SESSION, *READ, *PAYLOADS),
    of_run="session",
)
async def get_session(request: Request, session_id: SessionId) -> StreamingResponse:
    """Replaces `GET /sessions/{session_id}` if this feature is on. `metadata` also has what was given at create."""
    app = request.services
    live = await app.sessions.require(session_id)
    beside = {
        "session_id": name_of(live.session.name or session_id),
        "trace_count": await traces.count(app.database, session_id),
        "created_at": live.session.created_at,
    }
    return await started(session_json(app, live, beside), JSON)


@route(
    "DELETE /sessions/{session_id}/rllm",
    "Delete the session's traces",
    "session",
    json_reply(ANYTHING),
    errors=(*READ, *WRITE),
    of_run="session",
)
async def delete_session(request: Request, session_id: SessionId) -> dict[str, int]:
    """Replaces `DELETE /sessions/{session_id}` if this feature is on: the session is closed, and its name may be used
    again. Its rows stay in exports."""
    return {"deleted": await _delete(request.services, session_id)}


@route(
    "POST /rllm/sessions/batch_delete",
    "Delete the traces of several sessions",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, *WRITE),
    body=SessionIds,
    optional_body=True,
)
async def batch_delete(request: Request) -> dict[str, int]:
    """As `DELETE` of each. Unknown names are ignored."""
    app = request.services
    names = list(dict.fromkeys((await request.body_of(SessionIds)).session_ids))
    deleted = 0
    for at in range(0, len(names), AT_ONCE):
        part = await asyncio.gather(
            *(_delete_named(app, request.head.run, one) for one in names[at : at + AT_ONCE]), return_exceptions=True
        )
        for count in part:
            if isinstance(count, BaseException):
                raise count
            deleted += count
    return {"deleted": deleted}


async def _delete_named(app: Services, run: str | None, name: str) -> int:
    return await _delete(app, await app.names.newest(run, id_of(name)))


async def _delete(app: Services, session_id: str) -> int:
    """How many traces are no longer told."""
    live = await app.cache.current(session_id)
    if live is None or live.session.status != "open":
        return 0
    count = await traces.count(app.database, session_id)
    await app.names.finish(live.session.config.of_run, session_id)
    return count


@route(
    "GET /sessions/{session_id}/traces",
    "The session's traces",
    "session",
    json_reply(list[Trace]),
    errors=(*SESSION, *READ),
    of_run="session",
)
async def session_traces(
    request: Request, session_id: SessionId, since: Since = None, limit: Limit = None
) -> StreamingResponse:
    """Each committed turn as rLLM's `TraceRecord`, in the order of their commits; none for an unknown name."""
    app = request.services
    return await started(_array(_traces(app, [session_id], since, limit)), JSON)


@route(
    "POST /traces/query",
    "The traces of several sessions",
    "admin",
    json_reply(list[Trace]),
    errors=(*BODY, *READ),
    body=TraceQuery,
    optional_body=True,
)
async def query_traces(request: Request) -> StreamingResponse:
    """`since` and `limit` apply to each session."""
    app = request.services
    query = await request.body_of(TraceQuery)
    ids = [await app.names.newest(request.head.run, id_of(name)) for name in query.session_ids]
    return await started(_array(_traces(app, ids, query.since, query.limit)), JSON)


@route("GET /traces/{trace_id}", "One trace", "page", json_reply(Trace), errors=(NotFound, *READ))
async def get_trace(
    request: Request, trace_id: Annotated[str, Path(description="A session's id, a dot, a turn's number.")]
) -> object:
    app = request.services
    session_id, _, number = trace_id.rpartition(".")
    try:
        if not (number.isascii() and number.isdigit()) or await _is_deleted(app, session_id):
            raise NotFound("this trace does not exist")
        return await traces.one(app.database, session_id, int(number))
    except (NotFound, SessionNotFound):
        raise NotFound(f"Trace {trace_id} not found") from None


async def _is_deleted(app: Services, session_id: str) -> bool:
    live = await app.cache.current(session_id)
    return live is None or live.session.frees_name


async def _traces(
    app: Services, session_ids: Sequence[str], since: float | None, limit: int | None
) -> AsyncIterator[Trace]:
    for session_id in session_ids:
        if not await _is_deleted(app, session_id):
            async for trace in traces.every(app.database, session_id, since, limit):
                yield trace


async def _array(items: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """JSON, an item at a time: all traces together grow with turns × context."""
    begun = b"["
    async for item in items:
        yield begun + msgspec.json.encode(item)
        begun = b","
    yield b"[]" if begun == b"[" else b"]"
