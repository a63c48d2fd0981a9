"""The session routes beside chat."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from app.api.state import Services, begun, services, whole_body
from app.domain import cursors
from app.domain.events import OnAbort, OnDivergence, SessionConfig
from app.errors import InvalidRequest, SessionNotFound, Unsupported
from app.sessions import replay_payloads as replay
from app.sessions import transcript
from app.sessions.cache import CacheEntry
from app.sessions.lifecycle import NewSession
from app.settings import Settings
from app.upstream import headers as http_headers
from workers import scan

router = APIRouter()

log = logging.getLogger("turnlog.sessions")

SESSION_ID = r"^[A-Za-z0-9._:-]{1,128}$"
NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

MAX_LABEL = 64 << 10
"""Bytes of a session's metadata, and of a reward with its components, as JSON: labels, not a place for data."""

MAX_PLACE = 200
"""Characters of a fault's place in a body that its message has: a key may be as long as the body."""

MAX_VALUES, MAX_COMPONENTS = 33_000, 11_000
"""Values of a body, and of a reward: 64 KiB of JSON hold no more."""

SHORT = 16 << 10
"""Bytes of a body that is given to its model at once."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""

Body = TypeVar("Body", bound=BaseModel)


async def _well_formed(session_id: str) -> str:
    """An id that no session can have is not looked for. Raises SessionNotFound."""
    if not re.fullmatch(SESSION_ID, session_id):
        raise SessionNotFound("no session has an id of this form")
    return session_id


SessionId = Annotated[str, Depends(_well_formed)]

_Place = tuple[float, Annotated[str, msgspec.Meta(pattern=SESSION_ID)]]
"""Where a page of sessions ends: the last one's time of creation and id."""


class CreateSession(BaseModel):
    """The body of `POST /sessions`; every field is optional."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session_id: str | None = Field(default=None, pattern=SESSION_ID)
    group_id: str | None = Field(default=None, max_length=512, pattern=NO_NUL)
    attempt: int | None = Field(default=None, ge=0, le=2**31 - 1)
    metadata: dict[str, Any] | None = None
    rollback_window: int | None = Field(default=None, ge=0, le=1000)
    retain: Literal["window", "all"] = "window"
    history: Literal["linear", "tree"] = "linear"
    on_divergence: OnDivergence | None = None
    on_drift: Literal["segment", "reject"] = "segment"
    matcher: Literal["tolerant", "strict", "role_content_only"] = "tolerant"
    adapter: str | None = Field(default=None, max_length=512, pattern=NO_NUL)
    on_abort: OnAbort | None = None
    parent_session_id: str | None = Field(default=None, pattern=SESSION_ID)


class Reward(BaseModel):
    """The body of `PUT /sessions/{id}/reward`, of which reward and components together have at most 64 KiB as JSON."""

    model_config = ConfigDict(extra="forbid")

    reward: FiniteFloat = Field(strict=True)
    components: dict[str, Annotated[FiniteFloat, Field(strict=True)]] = {}
    turn: int | None = Field(default=None, ge=1, le=MAX_INTEGER, strict=True)


class SamplesQuery(BaseModel):
    """The body of `POST /sessions/{id}/samples`."""

    model_config = ConfigDict(extra="forbid")

    max_seq_len: int | None = Field(default=None, ge=1, le=MAX_INTEGER, strict=True)


def require_session_id(session_id: str) -> str:
    """Raises InvalidRequest for an id that could be mistaken for a path."""
    if not session_id.strip("."):
        raise InvalidRequest("session_id must not be only dots")
    return session_id


def read_model(raw: bytes, kind: type[Body], most: int = MAX_VALUES) -> Body:
    """A body by its model, whatever its content type says. Raises InvalidRequest, naming the first wrong field.

    A model reads all of a body, on the event loop, and makes an error of each wrong value: hence the `most` values.
    """
    if scan.may_exceed(raw, most):
        raise InvalidRequest(f"the body has more than {most} values")
    if len(raw) > SHORT:
        _require_known(raw, kind)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(f"{_place(first['loc'])}: {first['msg']}") from error


def _place(parts: Sequence[str | int]) -> str:
    """Where in a body something stands."""
    return ".".join(str(part) for part in parts)[:MAX_PLACE] or "the body"


def _require_finite(value: Any, *parts: str | int) -> None:
    """JSON has no other numbers: they would be stored as null. Raises InvalidRequest."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{_place(parts)}: Input should be a finite number")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        _require_finite(each, *parts, part)


def _require_small(what: str, value: Any) -> None:
    """Raises InvalidRequest."""
    size = len(msgspec.json.encode(value))
    if size > MAX_LABEL:
        raise InvalidRequest(f"{what} {size} bytes as JSON; the limit is {MAX_LABEL}")


def _require_known(raw: bytes, kind: type[BaseModel]) -> None:
    """A model makes an error of each unknown field, of which only the first is told. Raises InvalidRequest for that."""
    try:
        fields = _FIELDS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None and kind.model_config.get("extra") == "forbid":
        raise InvalidRequest(f"{unknown:.64}: Extra inputs are not permitted")


def new_session(body: CreateSession, settings: Settings) -> NewSession:
    """What the body leaves out is as the settings say.

    Raises Unsupported for choices that are documented but not built, InvalidRequest.
    """
    if body.history == "tree":
        raise Unsupported("history: tree is not built; use linear")
    _require_finite(body.metadata, "metadata")
    _require_small("metadata has", body.metadata)
    return NewSession(
        session_id=uuid.uuid4().hex if body.session_id is None else require_session_id(body.session_id),
        config=SessionConfig(
            rollback_window=settings.rollback_window if body.rollback_window is None else body.rollback_window,
            matcher=body.matcher,
            on_divergence=body.on_divergence or settings.on_divergence,
            on_drift=body.on_drift,
            retain=body.retain,
            group_id=body.group_id,
            attempt=body.attempt,
            adapter=body.adapter,
            on_abort=body.on_abort,
            parent=body.parent_session_id,
        ),
        metadata=body.metadata,
    )


@router.post("/sessions")
async def create_session(request: Request) -> dict[str, Any]:
    """Create a session; idempotent where the client names it."""
    app = services(request)
    raw = await whole_body(request)
    new = new_session(read_model(raw, CreateSession) if raw.strip() else CreateSession(), app.settings)
    await app.sessions.create(new)
    token = app.tokens.for_session(new.session_id)
    created = {"session_id": new.session_id, "base_url": f"/sessions/{new.session_id}/v1"}
    return created if token is None else {**created, "token": token}


@router.get("/sessions")
async def list_sessions(
    request: Request,
    status: Literal["open", "closed", "erased"] | None = None,
    group_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Newest first, paged by cursor."""
    before = None if cursor is None else cursors.decoded(cursor, _Place, "this list")
    heads = await services(request).sessions.page(status=status, group_id=group_id, before=before, limit=limit + 1)
    page = heads[:limit]
    more = len(heads) > limit
    return {
        "sessions": [msgspec.to_builtins(head) for head in page],
        "next_cursor": cursors.encoded((page[-1].created_at, page[-1].session_id)) if more else None,
    }


@router.get("/sessions/{session_id}")
async def get_session(request: Request, session_id: SessionId) -> StreamingResponse:
    """The live turns as they were sent and answered, and what the session was given when it was created."""
    app = services(request)
    live = await app.sessions.require(session_id)
    content, _ = await begun(_session_json(app, live))
    return StreamingResponse(content, media_type="application/json")


async def _session_json(app: Services, live: CacheEntry) -> AsyncIterator[bytes]:
    session = live.session
    metadata = await app.samples.metadata(live, session)
    given = await app.samples.given(session)
    separator = b'{"session_id":' + msgspec.json.encode(session.session_id) + b',"records":['
    async for record in transcript.records(app.database, session):
        yield separator + record
        separator = b","
    if separator != b",":
        yield separator
    yield b'],"metadata":' + msgspec.json.encode(metadata)
    yield b',"session":' + msgspec.json.encode(given) + b"}"


@router.post("/sessions/{session_id}/samples")
async def post_samples(request: Request, session_id: SessionId) -> Response:
    """The session's samples as safetensors."""
    app = services(request)
    raw = await whole_body(request)
    wish = read_model(raw, SamplesQuery) if raw.strip() else SamplesQuery()
    live = await app.sessions.require(session_id)
    body = await app.samples.safetensors(live, wish.max_seq_len)
    return Response(body, media_type="application/octet-stream")


@router.get("/sessions/{session_id}/events")
async def get_events(
    request: Request,
    session_id: SessionId,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    follow: bool = False,
) -> StreamingResponse:
    """The session's log as NDJSON; with `follow` it stays open."""
    lines = await services(request).sessions.events(session_id, after, follow)
    if not follow:
        lines, _ = await begun(lines)
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.get("/sessions/{session_id}/turns/{turn}/{kind}")
async def get_payload(
    request: Request,
    session_id: SessionId,
    turn: Annotated[int, Path(ge=1, le=MAX_INTEGER)],
    kind: Literal["routed_experts", "indexer_topk"],
) -> Response:
    """A turn's replay payload: its rows as raw little-endian ids; their type and shape are in the headers."""
    app = services(request)
    live = await app.sessions.require(session_id)
    payload, rows = await replay.payload_of(app.database, live.session, turn, kind)
    headers = {
        "x-turnlog-dtype": rows.dtype.name,
        "x-turnlog-shape": msgspec.json.encode([len(rows), *payload.shape]).decode(),
        "x-turnlog-row-start": str(payload.start),
    }
    return Response(rows.tobytes(), media_type="application/octet-stream", headers=headers)


@router.get("/sessions/{session_id}/rejected/{fence}")
async def get_refused_reply(
    request: Request, session_id: SessionId, fence: Annotated[int, Path(ge=1, le=MAX_INTEGER)]
) -> Response:
    """The beginning of an engine's reply that was refused; the event `TurnRejected` with this fence says why."""
    size, kept = await services(request).sessions.refused_reply(session_id, fence)
    return Response(kept, media_type="application/octet-stream", headers={"x-turnlog-reply-bytes": str(size)})


@router.put("/sessions/{session_id}/reward")
async def put_reward(request: Request, session_id: SessionId) -> dict[str, Any]:
    """Assign the reward of the session, or of one of its turns."""
    sessions = services(request).sessions
    body = read_model(await whole_body(request), Reward, MAX_COMPONENTS)
    _require_small("reward and components have", {"reward": body.reward, "components": body.components})
    seq = await sessions.assign_reward(session_id, body.reward, body.components, body.turn)
    return {"session_id": session_id, "seq": seq}


@router.delete("/sessions/{session_id}", status_code=204)
async def delete_session(request: Request, session_id: SessionId, erase: bool = False) -> Response:
    """Close the session at once; with `erase` delete its content for good."""
    sessions = services(request).sessions
    if erase:
        await sessions.erase(session_id)
        log.info("session erased", extra={"session_id": session_id})
    else:
        await sessions.close(session_id)
    return Response(status_code=204)


@router.get("/sessions/{session_id}/v1/models")
async def session_models(request: Request, session_id: SessionId) -> Response:
    """What the session's engine serves."""
    app = services(request)
    await app.sessions.require(session_id)
    return await models_reply(app, session_id)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """What an engine serves."""
    return await models_reply(services(request), "")


async def models_reply(app: Services, session_id: str) -> Response:
    headers = http_headers.to_engine((), session_id, app.settings.upstream_api_key)
    reply = await app.engines.models(session_id, headers)
    return Response(reply.body.joined(), reply.status, dict(http_headers.to_client(reply.headers)))
