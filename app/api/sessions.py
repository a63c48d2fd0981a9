"""Routes of sessions, without their creation and their turns."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Header, Path, Query
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.responses import Response, StreamingResponse

from app.api.creation import created_fields
from app.api.parameters import LIMIT, Cursor, SessionId
from app.api.replies import FollowedStream, HeldReply, started
from app.api.requests import MAX_COMPONENTS, Request, require_finite, require_small
from app.api.routes import (
    BINARY,
    BODY,
    BYTES,
    JSON,
    NDJSON,
    NO_CONTENT,
    PAYLOADS,
    READ,
    SESSION,
    WRITE,
    Reply,
    Routes,
    json_reply,
)
from app.domain.branches import Branches, Loss
from app.domain.events import Failure, FailureKind, ReplayKind
from app.domain.patterns import ID, MAX_FLOAT32, MAX_INTEGER, NO_NUL
from app.errors import (
    AlreadyFinished,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTombstoned,
    Restored,
    RunMismatch,
    SessionChanged,
    SessionClosed,
    SessionNotFound,
    SessionUnreadable,
)
from app.export.session_samples import bytes_of
from app.services import Services
from app.sessions import event_log, images, transcript
from app.sessions import replay_payloads as replay
from app.sessions.cache import CacheEntry
from app.sessions.conversation import MAX_MESSAGES, Conversations
from app.sessions.session_list import SessionFilter, SessionQuery
from app.sessions.tasks import tasks_of
from app.sessions.tree_view import whole_tree
from turnlog import replies as reply_types
from workers.sampling_masks import Masks

route = Routes("Sessions")

REVISION = "x-miles-session-generation"
"""Of a reply of `/samples`: what its driver names when it deletes the session, so that nothing unseen is closed."""

log = logging.getLogger("turnlog.sessions")

MAX_MESSAGE = 4096
"""Characters of a failure's message."""

RewardValue = Annotated[FiniteFloat, Field(strict=True, ge=-MAX_FLOAT32, le=MAX_FLOAT32)]


class Reward(BaseModel):
    """The body of `PUT /sessions/{id}/reward`. Reward and components together have at most 64 KiB as JSON."""

    model_config = ConfigDict(extra="forbid")

    reward: RewardValue
    components: dict[str, RewardValue] = {}
    turn: int | None = Field(default=None, ge=1, le=MAX_INTEGER, strict=True)


class DriverMetadata(BaseModel):
    """What an agent returned to miles' driver, of which Turnlog reads the reward."""

    model_config = ConfigDict(extra="allow")

    reward: RewardValue | None = None


class SamplesQuery(BaseModel):
    """The body of `POST /sessions/{id}/samples`."""

    model_config = ConfigDict(extra="forbid")

    max_seq_len: int | None = Field(default=None, ge=1, le=MAX_INTEGER, strict=True)
    branches: Branches = "kept"
    metadata: DriverMetadata | None = None
    reward: RewardValue | None = None
    snapshot_id: str | None = Field(default=None, max_length=64, pattern=NO_NUL)

    @property
    def given_reward(self) -> float | None:
        """That of the body, else that which an agent returned."""
        return self.reward if self.reward is not None or self.metadata is None else self.metadata.reward


class GivenFailure(BaseModel):
    """Why a rollout failed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: FailureKind
    message: str | None = Field(default=None, max_length=MAX_MESSAGE, pattern=NO_NUL)


class CloseSession(BaseModel):
    """The body of `POST /sessions/{id}/close`."""

    model_config = ConfigDict(extra="forbid")

    failed: GivenFailure | None = None


class FinishSession(BaseModel):
    """The body of `POST /sessions/{id}/finish`. `timeout`: seconds to wait for turns in flight."""

    model_config = ConfigDict(extra="forbid", strict=True)

    producer_finished: bool
    timeout: FiniteFloat = Field(default=60.0, ge=0, le=600)


class SessionListQuery(SessionFilter):
    """Which sessions to list, in which order, from where."""

    model_config = ConfigDict(extra="forbid")

    prefix: str | None = Field(default=None, pattern=ID, description="Only sessions whose id begins with this.")
    count: bool = Field(default=False, description="Also count the matches, up to 100,000: `total`.")
    tasks: bool = Field(default=False, description="Also give the beginning of each session's first request: `tasks`.")
    limit: int = Field(default=100, ge=1, le=1000, description=LIMIT)
    cursor: Cursor = None


Records = Literal["full", "new", "none"]


@route(
    "GET /sessions",
    "List sessions, newest first",
    "page",
    json_reply(reply_types.SessionPage, "One page of sessions."),
    errors=(InvalidRequest, *READ, *PAYLOADS),
    of_run="query",
)
async def list_sessions(request: Request, query: Annotated[SessionListQuery, Query()]) -> object:
    """Sessions, newest first, or sorted by another column; filtered, and paged by cursor.

    `running_since` lists only sessions with a turn in flight.
    """
    filters = query.model_dump(include=set(SessionFilter.model_fields))
    wanted = SessionQuery(**filters, q=query.prefix)
    page = await request.services.session_list.page(wanted, query.cursor, query.limit, counted=query.count)
    if query.tasks:
        ids = [row["session_id"] for row in page["sessions"]]
        page["tasks"] = await tasks_of(request.services.database, ids)
    return page


@route("HEAD /sessions/{session_id}", "", "session", of_run="session")
async def has_session(request: Request, session_id: SessionId) -> StreamingResponse:
    """The status of the GET: programs probe their base URL with it. The session is not read."""
    await request.services.sessions.require(session_id)
    return StreamingResponse(iter(()), media_type=JSON)


@route(
    "GET /sessions/{session_id}",
    "The session's live turns: requests and replies",
    "session",
    json_reply(reply_types.Records, "The session."),
    errors=(*SESSION, *READ, *PAYLOADS),
    of_run="session",
)
async def get_session(
    request: Request,
    session_id: SessionId,
    records: Annotated[
        Records,
        Query(
            description="Whole requests and replies; only what is `new` in each, without the prompts' ids; or `none`."
        ),
    ] = "full",
) -> StreamingResponse:
    """The requests and replies of the live turns, and the fields with which the session was created. Whole requests
    have the context once a turn: of 500 turns that end at 500,000 tokens they are 1.3 GB."""
    app = request.services
    live = await app.sessions.require(session_id)
    return await started(session_json(app, live, records=records), JSON)


async def session_json(
    app: Services, live: CacheEntry, beside: Mapping[str, Any] | None = None, *, records: Records = "full"
) -> AsyncIterator[bytes]:
    """The session as `GET /sessions/{id}` tells it. With fields `beside` that, `metadata` also has what was given at
    create."""
    session = live.session
    given = await app.samples.metadata_given(session)
    metadata = await app.samples.metadata(live, session)
    if beside is not None:
        metadata = {**msgspec.json.decode(given), **metadata}
    created_with = created_fields(session, given)
    for fields in app.session_fields:
        created_with |= await fields(session)
    separator = msgspec.json.encode({"session_id": session.session_id, **(beside or {})})[:-1] + b',"records":['
    if records != "none":
        async for record in transcript.records(app.database, session, only_new=records == "new"):
            yield separator + record
            separator = b","
    if separator != b",":
        yield separator
    yield b'],"metadata":' + msgspec.json.encode(metadata)
    yield b',"session":' + msgspec.json.encode(created_with) + b"}"


@route(
    "POST /sessions/{session_id}/samples",
    "The session's samples as safetensors",
    "session",
    Reply("A safetensors file; docs/api.md describes its content.", {BYTES: BINARY}, (REVISION,)),
    errors=(*BODY, *SESSION, AlreadyFinished, *WRITE, *PAYLOADS),
    body=SamplesQuery,
    optional_body=True,
    example={"max_seq_len": 32768},
    of_run="session",
)
async def post_samples(request: Request, session_id: SessionId) -> Response:
    """The session's samples as safetensors; a `reward` in the body or its `metadata` is first assigned to the session,
    which needs the admin's token or the run's unless `TURNLOG_SESSION_REWARDS=allow`."""
    app = request.services
    query = await request.body_of(SamplesQuery)
    metadata = None if query.metadata is None else query.metadata.model_dump(exclude_unset=True)
    require_finite(metadata, "metadata")
    require_small("metadata has", metadata)
    if query.given_reward is not None:
        request.require_judge()
    live = await app.sessions.require(session_id)
    if query.snapshot_id is not None:
        finished = live.session.finished
        if finished is None or finished.snapshot_id != query.snapshot_id:
            raise AlreadyFinished(f"session {session_id} has no snapshot {query.snapshot_id}")
    if query.given_reward is not None:
        await app.sessions.assign_reward(session_id, query.given_reward, {}, None)
    reservation = app.inflight.reserve(peer=request.head.peer)
    try:
        # Half of the memory at most, so that samples that take more are made, and not more than two at a time.
        reservation.grow(min(bytes_of(live.session, query.branches), app.settings.inflight_bytes // 2))
        sealed = query.snapshot_id is not None
        body, revision = await app.samples.safetensors(live, query.max_seq_len, query.branches, metadata, sealed=sealed)
    except BaseException:
        reservation.release()
        raise
    return HeldReply(body, BYTES, reservation, {REVISION: str(revision)})


@route(
    "POST /sessions/{session_id}/finish",
    "End the session's turns",
    "session",
    json_reply(reply_types.FinishedSession, "The session takes no more turns."),
    errors=(*BODY, *SESSION, AlreadyFinished, *WRITE),
    body=FinishSession,
    example={"producer_finished": True},
    of_run="session",
)
async def finish_session(request: Request, session_id: SessionId) -> dict[str, Any]:
    """End the session's turns: no more are opened, and the request waits for those in flight. Repeating it gives the
    same `snapshot_id`, with which `/samples` gives what the session then has."""
    app = request.services
    body = await request.body_of(FinishSession)
    session = await app.sessions.finish(session_id, producer_finished=body.producer_finished, wait_s=body.timeout)
    assert session.finished is not None
    return {
        "snapshot_id": session.finished.snapshot_id,
        "complete": session.is_complete,
        "producer_finished": session.finished.producer_finished,
        "unfinished_requests": len(session.open_turns),
    }


@route(
    "GET /sessions/{session_id}/events",
    "The session's event log",
    "session",
    Reply("Events.", {NDJSON: reply_types.EventLine}),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, Overloaded, *READ),
    of_run="session",
)
async def get_events(
    request: Request,
    session_id: SessionId,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Only events after this `seq`.")] = 0,
    follow: Annotated[bool, Query(description="Keep the stream open and send new events.")] = False,
) -> StreamingResponse:
    """The session's events as NDJSON; with `follow` the stream stays open."""
    app = request.services
    lines = await event_log.event_lines(app.database, app.followers, session_id, after, follow)
    if follow:
        return FollowedStream(request, lines)
    return await started(lines, NDJSON)


@route(
    "GET /sessions/{session_id}/turns/{turn}/{kind}",
    "A turn's replay payload",
    "session",
    Reply(
        "The rows as raw little-endian ids.",
        {BYTES: BINARY},
        ("x-turnlog-dtype", "x-turnlog-shape", "x-turnlog-row-start"),
    ),
    errors=(InvalidRequest, *SESSION, NotFound, PayloadTombstoned, *READ, *PAYLOADS),
    of_run="session",
)
async def get_payload(
    request: Request,
    session_id: SessionId,
    turn: Annotated[int, Path(ge=1, le=MAX_INTEGER, description="A turn's number, from 1.")],
    kind: Annotated[ReplayKind, Path(description="The kind of replay payload.")],
) -> Response:
    """A turn's replay payload: rows of raw little-endian ids. Headers give their type and shape. Before the ids of a
    `sampling_mask` of R rows, whose lengths differ, come R + 1 offsets (int64): its shape is the ids'."""
    app = request.services
    live = await app.sessions.require(session_id)
    payload, rows = await replay.payload_of(app.database, live.session, turn, kind)
    ids, offsets = (rows.ids, rows.offsets.tobytes()) if isinstance(rows, Masks) else (rows, b"")
    headers = {
        "x-turnlog-dtype": ids.dtype.name,
        "x-turnlog-shape": msgspec.json.encode([len(ids), *payload.shape]).decode(),
        "x-turnlog-row-start": str(payload.start),
    }
    return Response(offsets + ids.tobytes(), media_type=BYTES, headers=headers)


@route(
    "GET /sessions/{session_id}/rejected/{fence}",
    "The beginning of a rejected engine reply",
    "session",
    Reply("The first 256 KiB.", {BYTES: BINARY}, ("x-turnlog-reply-bytes",)),
    errors=(InvalidRequest, SessionNotFound, NotFound, SessionUnreadable, *READ),
    of_run="session",
)
async def get_refused_reply(
    request: Request,
    session_id: SessionId,
    fence: Annotated[int, Path(ge=1, le=MAX_INTEGER, description="The fence of the event `TurnRejected`.")],
) -> Response:
    """The beginning of a rejected engine reply; the event `TurnRejected` with this fence gives the reason."""
    size, kept = await event_log.refused_reply(request.services.database, session_id, fence)
    return Response(kept, media_type=BYTES, headers={"x-turnlog-reply-bytes": str(size)})


class MessagesQuery(BaseModel):
    """Which messages, and from where."""

    model_config = ConfigDict(extra="forbid")

    branch: int | None = Field(
        default=None, ge=0, le=MAX_INTEGER, description="A branch's number; default: that of the newest turn."
    )
    turn: int | None = Field(
        default=None, ge=1, le=MAX_INTEGER, description="Only this turn's own messages; also a discarded turn's."
    )
    limit: int = Field(default=MAX_MESSAGES, ge=1, le=MAX_MESSAGES, description=LIMIT)
    cursor: Cursor = None


@route(
    "GET /sessions/{session_id}/messages",
    "The conversation of a branch",
    "session",
    json_reply(reply_types.SaidPage, "A page of the conversation."),
    errors=(InvalidRequest, NotFound, SessionNotFound, SessionClosed, SessionUnreadable, *READ),
    of_run="session",
)
async def get_messages(request: Request, session_id: SessionId, query: Annotated[MessagesQuery, Query()]) -> object:
    """The messages that led to a branch's newest turn, oldest first, of an open or closed session. A page ends early
    where it would have more than 8 MiB. A session's own token sees no rewards and no annotations."""
    return await Conversations(request.services.database).page(
        session_id, query.branch, query.turn, query.cursor, query.limit, judged=request.token_session is None
    )


@route(
    "GET /sessions/{session_id}/tree",
    "The session's turns as a tree",
    "session",
    json_reply(reply_types.Tree, "The tree."),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, *READ),
    of_run="session",
)
async def get_tree(
    request: Request,
    session_id: SessionId,
    branches: Annotated[
        Branches | None, Query(description="The rows that `exported` and `loss_branches` are of, as in an export.")
    ] = None,
    loss: Annotated[Loss, Query(description="Whether each turn is in the loss of one row, or of every one.")] = "once",
) -> object:
    """Turns and branches, and what an export with the same `branches` and `loss` makes of them; also of a closed or
    erased session. Nothing is read but the log, and how each branch's first message begins."""
    app = request.services
    return await whole_tree(app.database, session_id, branches or app.picker or "kept", loss)


@route(
    "GET /sessions/{session_id}/state",
    "The session's state after any of its events",
    "session",
    json_reply(reply_types.State, "The state."),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, *READ, *PAYLOADS),
    of_run="session",
)
async def get_state(
    request: Request,
    session_id: SessionId,
    seq: Annotated[
        int | None, Query(ge=1, le=MAX_INTEGER, description="The state after this event; default: the last.")
    ] = None,
) -> object:
    """Turns with the times of their stages, failed turns, rollbacks, rewards and metadata; also of a closed or erased
    session."""
    return await request.services.views.at(session_id, seq)


_RASTER = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
"""The first bytes of the types that a browser is told; what a client called an image may be anything."""

_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "content-disposition": "attachment",
}


@route(
    "GET /sessions/{session_id}/images/{sha256}",
    "An image that the session was sent inline",
    "session",
    Reply("The image's bytes.", {BYTES: BINARY, **{kind: BINARY for _, kind in _RASTER}, "image/webp": BINARY}),
    errors=(*SESSION, NotFound, *READ),
    of_run="session",
)
async def get_image(
    request: Request,
    session_id: SessionId,
    sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The SHA-256 of its bytes.")],
) -> Response:
    """An image of an open or closed session, as an attachment. The type is named by its first bytes."""
    app = request.services
    entry = await app.cache.current(session_id)
    if entry is None:
        raise SessionNotFound.of(session_id)
    if entry.session.status == "erased":
        raise SessionClosed(f"session {session_id} is erased")
    data = await images.image(app.database, entry.session, sha256)
    return Response(data, media_type=_type_of(data), headers=_HEADERS)


def _type_of(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for head, kind in _RASTER if data.startswith(head)), BYTES)


@route(
    "PUT /sessions/{session_id}/reward",
    "Set the reward of the session or of a turn",
    "session",
    json_reply(reply_types.Rewarded),
    errors=(*BODY, *SESSION, *WRITE),
    body=Reward,
    example={"reward": 1.0, "components": {"tests": 1.0}},
    of_run="session",
)
async def put_reward(request: Request, session_id: SessionId) -> dict[str, Any]:
    """Set the reward of the session or of one of its turns. With a session's token 403, unless
    `TURNLOG_SESSION_REWARDS=allow`."""
    request.require_judge()
    body = await request.body_of(Reward, MAX_COMPONENTS)
    require_small("reward and components have", {"reward": body.reward, "components": body.components})
    seq = await request.services.sessions.assign_reward(session_id, body.reward, body.components, body.turn)
    return {"session_id": session_id, "seq": seq}


@route(
    "POST /sessions/{session_id}/close",
    "Close the session, and say whether it failed",
    "session",
    NO_CONTENT,
    errors=(*BODY, *SESSION, *WRITE),
    body=CloseSession,
    optional_body=True,
    example={"failed": {"kind": "sandbox", "message": "the container did not start"}},
    of_run="session",
)
async def close_session(request: Request, session_id: SessionId) -> Response:
    """Close the session at once, as its `DELETE` does. `failed`: the rollout failed for a reason that is no reward; a
    later reward ends that. The first close stands. `failed` with a session's token is 403, unless
    `TURNLOG_SESSION_REWARDS=allow`."""
    body = await request.body_of(CloseSession)
    given = body.failed
    if given is not None:
        request.require_judge()
    failed = None if given is None else Failure(given.kind, given.message or None)
    await request.services.sessions.close(session_id, failed=failed)
    return Response(status_code=204)


ERASING = Reply(
    "Erased from the database; object storage may still have its payloads: repeat the request.", {}, status=202
)


@route(
    "DELETE /sessions/{session_id}",
    "Close or erase the session",
    "session",
    NO_CONTENT,
    ERASING,
    errors=(InvalidRequest, *SESSION, SessionChanged, *WRITE),
    of_run="session",
)
async def delete_session(
    request: Request,
    session_id: SessionId,
    erase: Annotated[bool, Query(description="Also delete the content permanently.")] = False,
    revision: Annotated[
        int | None,
        Header(
            alias=REVISION,
            ge=0,
            le=MAX_INTEGER,
            description="Close the session only if it has not changed since `/samples` gave this.",
        ),
    ] = None,
) -> Response:
    """Close the session at once; with `?erase=true` also delete its content permanently.

    202: the content is gone from the database, and its bytes in object storage are being removed; repeat until 204.
    `?erase=true` with a session's token is 403, unless `TURNLOG_SESSION_REWARDS=allow`. With the header that `/samples`
    told, 412 if a turn has been opened or committed since.
    """
    app = request.services
    if erase:
        request.require_judge()
    if not erase or revision is not None:
        try:
            await app.sessions.close(session_id, revision=revision)
        except SessionClosed:
            if not erase:
                raise
    if not erase:
        return Response(status_code=204)
    is_gone = await app.erasure.erase(session_id)
    log.info("session erased", extra={"session_id": session_id})
    return Response(status_code=204 if is_gone else 202)


@route(
    "POST /finish_session",
    "End a session so that its name can be used again",
    "admin",
    json_reply(reply_types.Finished, "The session that had the name; its id is null if no session had it."),
    errors=(InvalidRequest, Restored, RunMismatch, SessionUnreadable, *WRITE),
    of_run="header",
)
async def finish_name(
    request: Request, session_id: Annotated[str, Query(pattern=ID, description="The session's name, or its id.")]
) -> dict[str, Any]:
    """Close the newest session of a name. The next request that names it in a header, or creates it, begins a new one
    under an id of its own, with the same `name` and the next `generation`. Any other close is for good.

    SkyRL's clients call this at the end of a trajectory. A name that no session has is ignored.
    """
    if len(request.query_params.getlist("session_id")) > 1:
        raise InvalidRequest("session_id must be the name of one session")
    try:
        session = await request.services.names.finish(request.head.run, session_id)
    except RunMismatch:
        if request.head.token_run is None:
            raise
        session = None
    if session is None:
        return {"session_id": None, "name": session_id, "generation": None}
    return {"session_id": session.session_id, "name": session.name, "generation": session.generation}
