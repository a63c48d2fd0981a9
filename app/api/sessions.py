"""Routes of sessions, without those of their turns."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat
from starlette.types import Receive, Scope

from app.api.bodies import MAX_COMPONENTS, body_of, read_model, require_finite, require_small
from app.api.closed_stream import FollowedStream, HeldReply
from app.api.describe import (
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
    Schema,
    describe,
    json_reply,
)
from app.api.direct import DirectRoute, flag, small_body
from app.api.head import Head, require_judge
from app.api.limits import peer_of
from app.api.parameters import SessionId
from app.api.state import services, start_stream
from app.domain.branches import Branches
from app.domain.events import (
    Capture,
    History,
    Limits,
    OnAbort,
    OnDivergence,
    OnLimit,
    ParamsMode,
    ReplayKind,
    Retain,
    SessionConfig,
    StreamMode,
)
from app.domain.patterns import ID, MAX_FLOAT32, MAX_INTEGER, NO_NUL
from app.domain.pinned import require_pinnable
from app.domain.session import Session
from app.errors import (
    AlreadyFinished,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTombstoned,
    Restored,
    SessionChanged,
    SessionClosed,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionUnreadable,
    Unsupported,
)
from app.export.session_samples import bytes_of
from app.sessions import event_log, transcript
from app.sessions import replay_payloads as replay
from app.sessions.cache import CacheEntry
from app.sessions.lifecycle import NewSession, made_session_id
from app.settings import LimitsGiven, Settings
from turnlog import replies as reply_types
from workers.sampling_masks import Masks

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Sessions"])

REVISION = "x-miles-session-generation"
"""Of a reply of `/samples`: what its driver names when it deletes the session, so that nothing unseen is closed."""

log = logging.getLogger("turnlog.sessions")


def _whole(value: Any) -> Any:
    """An integer that JSON has as 40.0: drivers read it out of YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]


class CreateSession(BaseModel):
    """The body of `POST /sessions`; every field is optional."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session_id: str | None = Field(default=None, pattern=ID)
    group_id: str | None = Field(default=None, max_length=512, pattern=NO_NUL)
    attempt: int | None = Field(default=None, ge=0, le=2**31 - 1)
    metadata: dict[str, Any] | None = None
    rollback_window: int | None = Field(default=None, ge=0, le=1000)
    retain: Retain = "window"
    history: History | None = None
    on_divergence: OnDivergence | None = None
    on_drift: Literal["segment", "reject"] = "segment"
    matcher: Literal["tolerant", "strict", "role_content_only"] = "tolerant"
    adapter: str | None = Field(default=None, max_length=512, pattern=NO_NUL)
    on_abort: OnAbort | None = None
    stream_mode: StreamMode = "whole"
    params: dict[str, Any] | None = None
    model: str | None = Field(default=None, min_length=1, max_length=512, pattern=NO_NUL)
    params_mode: ParamsMode | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: WholeNumber | None = None
    evaluation: bool | None = None
    limits: LimitsGiven | None = None
    on_limit: OnLimit = "error"
    capture: Capture = "tokens"
    upstream: str | None = Field(default=None, max_length=64, pattern=NO_NUL)
    parent_session_id: str | None = Field(default=None, pattern=ID)


DEFAULTS = ("temperature", "top_p", "top_k")
"""Fields of a creation that are defaults of these parameters."""

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


class FinishSession(BaseModel):
    """The body of `POST /sessions/{id}/finish`. `timeout`: seconds to wait for turns in flight."""

    model_config = ConfigDict(extra="forbid", strict=True)

    producer_finished: bool
    timeout: FiniteFloat = Field(default=60.0, ge=0, le=600)


def require_session_id(session_id: str) -> str:
    """Raises InvalidRequest for an id of dots only, which a client may take for a relative path."""
    if not session_id.strip("."):
        raise InvalidRequest("session_id must not be only dots")
    return session_id


def new_session(body: CreateSession, settings: Settings) -> NewSession:
    """The session of a request; fields that it leaves out have the settings' values.

    Raises InvalidRequest.
    """
    require_finite(body.metadata, "metadata")
    require_small("metadata has", body.metadata)
    require_small("params have", body.params)
    chosen = {name: getattr(body, name) for name in SessionConfig.__struct_fields__ if name != "parent"}
    chosen["params"], chosen["params_mode"] = _params(body)
    if body.evaluation is not None and body.on_abort is None:
        chosen["on_abort"] = "fail"
    chosen["limits"] = _limits(body, settings)
    if body.rollback_window is None:
        chosen["rollback_window"] = settings.rollback_window
    if body.history is None:
        chosen["history"] = settings.history
    if body.on_divergence is None:
        chosen["on_divergence"] = settings.on_divergence
    return NewSession(
        session_id=made_session_id() if body.session_id is None else require_session_id(body.session_id),
        config=SessionConfig(**chosen, parent=body.parent_session_id),
        metadata=body.metadata,
        name=body.session_id,
        generation=None if body.session_id is None else 1,
    )


def _params(body: CreateSession) -> tuple[dict[str, Any] | None, ParamsMode]:
    """The parameters, with those that have a field of their own, and what they are. Raises InvalidRequest."""
    given = {name: value for name in DEFAULTS if (value := getattr(body, name)) is not None}
    mode = body.params_mode or ("default" if given and body.params is None else "override")
    if given and mode != "default":
        raise InvalidRequest(f'{next(iter(given))} beside params requires params_mode "default"')
    if twice := given.keys() & (body.params or {}):
        raise InvalidRequest(f"{min(twice)} is given twice: in params too")
    params = {**(body.params or {}), **given} if given else body.params
    require_pinnable(params or {})
    return params, mode


def _limits(body: CreateSession, settings: Settings) -> Limits | None:
    """The session's own limits. One below another has only those of its rollout, unless it is given some, or each
    session has the settings'. Raises InvalidRequest, Unsupported."""
    given, has_parent = body.limits, body.parent_session_id is not None
    if given is not None and "budgets" not in settings.features:
        raise Unsupported("limits: budgets is not in TURNLOG_FEATURES")
    if given is not None and given.per == "rollout" and has_parent:
        raise InvalidRequest("limits.per: a session with a parent has limits for itself alone")
    if given is None:
        given = settings.limits
        if given is None or (has_parent and given.per != "session"):
            return None
    counts = given.turns, given.tokens, given.context, given.seconds
    per = given.per or ("session" if has_parent else "rollout")
    return None if counts == (None,) * 4 else Limits(*counts, per=per)


def _of_text(config: SessionConfig, upstreams: Mapping[str, str | None]) -> SessionConfig:
    """The configuration of a session without ids, with a model. `upstreams`: their names and default models.

    Raises Unsupported where there are none, InvalidRequest.
    """
    if config.capture != "text":
        raise InvalidRequest('upstream requires capture "text"')
    if not upstreams:
        raise Unsupported('capture "text" requires TURNLOG_TEXT_UPSTREAMS')
    if config.upstream is None or config.upstream not in upstreams:
        raise InvalidRequest(f"upstream must be one of {', '.join(sorted(upstreams))}")
    model = config.model or upstreams[config.upstream]
    if model is None:
        raise InvalidRequest(f"model is missing: upstream {config.upstream} has no default")
    if config.adapter is not None:
        raise InvalidRequest('adapter requires capture "tokens"')
    return msgspec.structs.replace(config, model=model)


def created_fields(session: Session, metadata: msgspec.Raw) -> dict[str, Any]:
    """The fields of `POST /sessions` with which the session was created, defaults included (DEFAULTS are in `params`),
    its note and tags; of a fork also `forked_from`."""
    config = msgspec.structs.asdict(session.config)
    others = {
        "session_id": session.session_id,
        "metadata": metadata,
        "parent_session_id": session.config.parent,
    }
    names = [name for name in CreateSession.model_fields if name not in DEFAULTS]
    fields = {name: others[name] if name in others else config[name] for name in names}
    fields |= {"history": session.history, "note": session.note, "tags": session.tags}
    fields |= {"name": session.name, "generation": session.generation}
    fork = session.fork
    if fork is not None:
        fields["forked_from"] = {"session_id": fork.session, "turn": fork.turn, "parent_loss": fork.loss}
    return fields


@describe(
    "Create a session",
    "admin",
    json_reply(reply_types.CreatedSession, "The session, new or from an earlier request with the same body."),
    errors=(*BODY, Unsupported, SessionClosed, SessionExists, SessionEnded, Restored, SessionUnreadable, *WRITE),
    body=CreateSession,
    optional_body=True,
    example={"group_id": "task-17", "attempt": 0},
)
async def create_session(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Create a session. With a `session_id`, repeating the request returns the same session."""
    raw = await small_body(app, head, receive)
    return 200, await create(app, read_model(raw, CreateSession) if raw.strip() else CreateSession(), head.scope)


async def create(app: Services, body: CreateSession, scope: Scope) -> dict[str, Any]:
    """Create a session; what its client is told. `scope` is its request's. Raises AppError."""
    new = new_session(body, app.settings)
    if new.config.capture == "text" or new.config.upstream is not None:
        new = msgspec.structs.replace(new, config=_of_text(new.config, app.text_upstreams))
    session_id = new.session_id
    try:
        await app.sessions.create(new)
    except SessionEnded:
        if new.name is None:
            raise
        session_id = await app.names.begin(new)
    return created(app, scope, session_id)


def created(app: Services, scope: Scope, session_id: str) -> dict[str, Any]:
    """What a client is told of its new session. `scope` is its request's."""
    token = app.tokens.for_session(session_id)
    path = f"/sessions/{session_id}"
    told = {"session_id": session_id, "base_url": f"{path}/v1", "url": _public_url(app, scope) + path}
    return told if token is None else {**told, "token": token}


def _public_url(app: Services, scope: Scope) -> str:
    """TURNLOG_PUBLIC_URL, else the address that the request was sent to."""
    given = app.settings.public_url
    if given is not None:
        return given
    host, port = scope["server"] or ("localhost", None)
    named = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    address = named or (host if port is None else f"{host}:{port}")
    return f"{scope['scheme']}://{address}{scope.get('root_path', '')}"


@router.head("/sessions/{session_id}", include_in_schema=False)
async def has_session(request: Request, session_id: SessionId) -> StreamingResponse:
    """The status of the GET: programs probe their base URL with it. The session is not read."""
    await services(request).sessions.require(session_id)
    return StreamingResponse(iter(()), media_type=JSON)


@router.get("/sessions/{session_id}")
@describe(
    "The session's live turns: requests and replies",
    "session",
    json_reply(reply_types.Records, "The session."),
    errors=(*SESSION, *READ, *PAYLOADS),
)
async def get_session(request: Request, session_id: SessionId) -> StreamingResponse:
    """The requests and replies of the live turns, and the fields with which the session was created."""
    app = services(request)
    live = await app.sessions.require(session_id)
    content, _ = await start_stream(session_json(app, live))
    return StreamingResponse(content, media_type="application/json")


async def session_json(
    app: Services, live: CacheEntry, beside: Mapping[str, Any] | None = None
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
    async for record in transcript.records(app.database, session):
        yield separator + record
        separator = b","
    if separator != b",":
        yield separator
    yield b'],"metadata":' + msgspec.json.encode(metadata)
    yield b',"session":' + msgspec.json.encode(created_with) + b"}"


@router.post("/sessions/{session_id}/samples")
@describe(
    "The session's samples as safetensors",
    "session",
    Reply("A safetensors file; docs/api.md describes its content.", {BYTES: BINARY}, (REVISION,)),
    errors=(*BODY, *SESSION, AlreadyFinished, *WRITE, *PAYLOADS),
    body=SamplesQuery,
    optional_body=True,
    example={"max_seq_len": 32768},
)
async def post_samples(request: Request, session_id: SessionId) -> Response:
    """The session's samples as safetensors; a `reward` in the body or its `metadata` is first assigned to the session,
    which needs the admin's token unless `TURNLOG_SESSION_REWARDS=allow`."""
    app = services(request)
    query = await body_of(request, SamplesQuery, is_optional=True)
    metadata = None if query.metadata is None else query.metadata.model_dump(exclude_unset=True)
    require_finite(metadata, "metadata")
    require_small("metadata has", metadata)
    if query.given_reward is not None:
        require_judge(request.scope, app.settings)
    live = await app.sessions.require(session_id)
    if query.snapshot_id is not None:
        finished = live.session.finished
        if finished is None or finished.snapshot_id != query.snapshot_id:
            raise AlreadyFinished(f"session {session_id} has no snapshot {query.snapshot_id}")
    if query.given_reward is not None:
        await app.sessions.assign_reward(session_id, query.given_reward, {}, None)
    reservation = app.inflight.reserve(peer=peer_of(request.scope))
    try:
        # Half of the memory at most, so that samples that take more are made, and not more than two at a time.
        reservation.grow(min(bytes_of(live.session, query.branches), app.settings.inflight_bytes // 2))
        sealed = query.snapshot_id is not None
        body, revision = await app.samples.safetensors(live, query.max_seq_len, query.branches, metadata, sealed=sealed)
    except BaseException:
        reservation.release()
        raise
    return HeldReply(body, BYTES, reservation, {REVISION: str(revision)})


@router.post("/sessions/{session_id}/finish")
@describe(
    "End the session's turns",
    "session",
    json_reply(reply_types.FinishedSession, "The session takes no more turns."),
    errors=(*BODY, *SESSION, AlreadyFinished, *WRITE),
    body=FinishSession,
    example={"producer_finished": True},
)
async def finish_session(request: Request, session_id: SessionId) -> dict[str, Any]:
    """End the session's turns: no more are opened, and the request waits for those in flight. Repeating it gives the
    same `snapshot_id`, with which `/samples` gives what the session then has."""
    app = services(request)
    body = await body_of(request, FinishSession)
    session = await app.sessions.finish(session_id, producer_finished=body.producer_finished, wait_s=body.timeout)
    assert session.finished is not None
    return {
        "snapshot_id": session.finished.snapshot_id,
        "complete": session.is_complete,
        "producer_finished": session.finished.producer_finished,
        "unfinished_requests": len(session.open_turns),
    }


@router.get("/sessions/{session_id}/events")
@describe(
    "The session's event log",
    "session",
    Reply("Events.", {NDJSON: reply_types.EventLine}),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, Overloaded, *READ),
)
async def get_events(
    request: Request,
    session_id: SessionId,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Only events after this `seq`.")] = 0,
    follow: Annotated[bool, Query(description="Keep the stream open and send new events.")] = False,
) -> StreamingResponse:
    """The session's events as NDJSON; with `follow` the stream stays open."""
    app = services(request)
    lines = await event_log.event_lines(app.database, app.followers, session_id, after, follow)
    if follow:
        return FollowedStream(lines, NDJSON)
    started, _ = await start_stream(lines)
    return StreamingResponse(started, media_type=NDJSON)


@router.get("/sessions/{session_id}/turns/{turn}/{kind}")
@describe(
    "A turn's replay payload",
    "session",
    Reply(
        "The rows as raw little-endian ids.",
        {BYTES: BINARY},
        ("x-turnlog-dtype", "x-turnlog-shape", "x-turnlog-row-start"),
    ),
    errors=(InvalidRequest, *SESSION, NotFound, PayloadTombstoned, *READ, *PAYLOADS),
)
async def get_payload(
    request: Request,
    session_id: SessionId,
    turn: Annotated[int, Path(ge=1, le=MAX_INTEGER, description="A turn's number, from 1.")],
    kind: Annotated[ReplayKind, Path(description="The kind of replay payload.")],
) -> Response:
    """A turn's replay payload: rows of raw little-endian ids. Headers give their type and shape. Before the ids of a
    `sampling_mask` of R rows, whose lengths differ, come R + 1 offsets (int64): its shape is the ids'."""
    app = services(request)
    live = await app.sessions.require(session_id)
    payload, rows = await replay.payload_of(app.database, live.session, turn, kind)
    ids, offsets = (rows.ids, rows.offsets.tobytes()) if isinstance(rows, Masks) else (rows, b"")
    headers = {
        "x-turnlog-dtype": ids.dtype.name,
        "x-turnlog-shape": msgspec.json.encode([len(ids), *payload.shape]).decode(),
        "x-turnlog-row-start": str(payload.start),
    }
    return Response(offsets + ids.tobytes(), media_type=BYTES, headers=headers)


@router.get("/sessions/{session_id}/rejected/{fence}")
@describe(
    "The beginning of a rejected engine reply",
    "session",
    Reply("The first 256 KiB.", {BYTES: BINARY}, ("x-turnlog-reply-bytes",)),
    errors=(InvalidRequest, SessionNotFound, NotFound, SessionUnreadable, *READ),
)
async def get_refused_reply(
    request: Request,
    session_id: SessionId,
    fence: Annotated[
        int,
        Path(
            ge=1,
            le=MAX_INTEGER,
            description="The fence of the event `TurnRejected`.",
        ),
    ],
) -> Response:
    """The beginning of a rejected engine reply; the event `TurnRejected` with this fence gives the reason."""
    size, kept = await event_log.refused_reply(services(request).database, session_id, fence)
    return Response(kept, media_type=BYTES, headers={"x-turnlog-reply-bytes": str(size)})


@describe(
    "Set the reward of the session or of a turn",
    "session",
    json_reply(reply_types.Rewarded),
    errors=(*BODY, *SESSION, *WRITE),
    body=Reward,
    example={"reward": 1.0, "components": {"tests": 1.0}},
)
async def put_reward(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Set the reward of the session or of one of its turns. With a session's token 403, unless
    `TURNLOG_SESSION_REWARDS=allow`."""
    require_judge(head.scope, app.settings)
    session_id = head.path_session
    assert session_id is not None
    body = read_model(await small_body(app, head, receive), Reward, MAX_COMPONENTS)
    require_small("reward and components have", {"reward": body.reward, "components": body.components})
    seq = await app.sessions.assign_reward(session_id, body.reward, body.components, body.turn)
    return 200, {"session_id": session_id, "seq": seq}


ERASING = Reply("Erased from the database; object storage may still have payloads of it: repeat.", {}, status=202)


@describe(
    "Close or erase the session",
    "session",
    NO_CONTENT,
    ERASING,
    errors=(InvalidRequest, *SESSION, SessionChanged, *WRITE),
)
async def delete_session(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Close the session at once; with `?erase=true` also delete its content permanently.

    202: the content is gone from the database, and its bytes in object storage are being removed; ask again until 204.
    `?erase=true` with a session's token is 403, unless `TURNLOG_SESSION_REWARDS=allow`. With the header that `/samples`
    told, 412 if a turn has been opened or committed since.
    """
    session_id = head.path_session
    assert session_id is not None
    revision, erases = _revision(head), flag(head, "erase")
    if erases:
        require_judge(head.scope, app.settings)
    if not erases or revision is not None:
        try:
            await app.sessions.close(session_id, revision=revision)
        except SessionClosed:
            if not erases:
                raise
    if not erases:
        return 204, None
    is_gone = await app.erasure.erase(session_id)
    log.info("session erased", extra={"session_id": session_id})
    return 204 if is_gone else 202, None


def _revision(head: Head) -> int | None:
    """The revision that a `DELETE` may close. Raises InvalidRequest."""
    given = next((value for name, value in head.scope["headers"] if name == REVISION.encode()), None)
    if given is not None and not (given.isdigit() and len(given) < 19):
        raise InvalidRequest(f"{REVISION} must be the number that /samples told")
    return None if given is None else int(given)


REVISION_HEADER: Schema = {
    "name": REVISION,
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 0},
    "description": "Close the session only if it is still at what `/samples` told.",
}

ERASE: Schema = {
    "name": "erase",
    "in": "query",
    "required": False,
    "schema": {"type": "boolean", "default": False},
    "description": "Also delete the content permanently.",
}

DIRECT_ROUTES = (
    DirectRoute("POST", False, "/sessions", create_session, "Sessions"),
    DirectRoute("DELETE", True, "", delete_session, "Sessions", (ERASE, REVISION_HEADER)),
    DirectRoute("PUT", True, "/reward", put_reward, "Sessions"),
)
