"""How a session is created: its body, what it means with the settings, and what its client is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from app.api.head import RUN
from app.api.of_run import hide
from app.api.requests import Request, require_finite, require_small
from app.api.routes import BODY, WRITE, Routes, json_reply
from app.domain.events import (
    Capture,
    History,
    Limits,
    OnAbort,
    OnDivergence,
    OnLimit,
    ParamsMode,
    Retain,
    SessionConfig,
    StreamMode,
)
from app.domain.names import first_id
from app.domain.patterns import ID, NO_NUL
from app.domain.pinned import require_pinnable
from app.domain.request import reserved
from app.domain.session import Session
from app.errors import (
    AppError,
    Forbidden,
    InvalidRequest,
    Restored,
    RunClosed,
    RunMismatch,
    RunOverBudget,
    SessionClosed,
    SessionEnded,
    SessionExists,
    SessionUnreadable,
    Unsupported,
)
from app.services import Services
from app.sessions.lifecycle import NewSession, made_session_id
from app.settings import LimitsGiven, Settings
from turnlog import replies as reply_types

route = Routes("Sessions")


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
    run: str | None = Field(default=None, pattern=ID)
    group_size: int | None = Field(default=None, ge=1, le=2**31 - 1)


DEFAULTS = ("temperature", "top_p", "top_k")
"""Fields of a creation that are defaults of these parameters."""


def new_session(body: CreateSession, settings: Settings) -> NewSession:
    """The session of a request; fields that it leaves out have the settings' values.

    Raises InvalidRequest.
    """
    if body.session_id is not None and not body.session_id.strip("."):  # A client may take it for a relative path.
        raise InvalidRequest("session_id must not be only dots")
    if body.run is not None and not body.run.strip("."):
        raise InvalidRequest("run must not be only dots")
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
        session_id=body.session_id or made_session_id(),
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
        raise InvalidRequest(f'{next(iter(given))} can be given beside params only with params_mode "default"')
    if twice := given.keys() & (body.params or {}):
        raise InvalidRequest(f"{min(twice)} is given twice: as a field and in params")
    params = {**(body.params or {}), **given} if given else body.params
    require_pinnable(params or {})
    return params, mode


def _limits(body: CreateSession, settings: Settings) -> Limits | None:
    """The session's own limits. One below another has only those of its rollout, unless it is given some, or each
    session has the settings'. Raises InvalidRequest, Unsupported."""
    given, has_parent = body.limits, body.parent_session_id is not None
    if given is not None and "budgets" not in settings.features:
        raise Unsupported("limits require the feature budgets: add it to TURNLOG_FEATURES")
    if given is not None and given.per == "rollout" and has_parent:
        raise InvalidRequest("limits.per must be session: only the root of a rollout can limit the rollout")
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
        raise InvalidRequest(f"model is missing, and upstream {config.upstream} has no default model")
    if config.adapter is not None:
        raise InvalidRequest('adapter requires capture "tokens"')
    return msgspec.structs.replace(config, model=model)


def created_fields(session: Session, metadata: msgspec.Raw) -> dict[str, Any]:
    """The fields of `POST /sessions` with which the session was created, defaults included (DEFAULTS are in `params`),
    its note and tags; of a fork also `forked_from`."""
    config = msgspec.structs.asdict(session.config)
    others = {"session_id": session.session_id, "metadata": metadata, "parent_session_id": session.config.parent}
    others["run"] = session.config.of_run
    names = [name for name in CreateSession.model_fields if name not in DEFAULTS]
    fields = {name: others[name] if name in others else config[name] for name in names}
    fields |= {"history": session.history, "note": session.note, "tags": session.tags}
    fields |= {"name": session.name, "generation": session.generation}
    fork = session.fork
    if fork is not None:
        fields["forked_from"] = {"session_id": fork.session, "turn": fork.turn, "parent_loss": fork.loss}
    return fields


@route(
    "POST /sessions",
    "Create a session",
    "admin",
    json_reply(reply_types.CreatedSession, "The session: new, or created by an earlier request with the same body."),
    errors=(
        *BODY,
        Unsupported,
        SessionClosed,
        SessionExists,
        SessionEnded,
        Restored,
        RunMismatch,
        RunClosed,
        RunOverBudget,
        SessionUnreadable,
        *WRITE,
    ),
    body=CreateSession,
    optional_body=True,
    example={"group_id": "task-17", "attempt": 0},
    of_run="body",
    headers={RUN: "The run of the session, as `run` in the body."},
)
async def create_session(request: Request) -> dict[str, Any]:
    """Create a session. With a `session_id`, repeating the request returns the same session."""
    return await create(request, await request.body_of(CreateSession))


async def create(request: Request, body: CreateSession, *, by_name: bool = False) -> dict[str, Any]:
    """Create a session; what its client is told. `by_name`: the body's id is a name of the run, as in a header. Raises
    AppError."""
    app = request.services
    if (run := request.head.run) is not None:
        if body.run not in (None, run):
            raise RunMismatch(
                f"the body names run {body.run}, the header {RUN} names {run}: send one, or the same in both"
            )
        body = body.model_copy(update={"run": run})
    new = new_session(body, app.settings)
    if request.head.token_run is not None and (names := reserved(new.config.params or {}, app.settings.session_params)):
        raise Forbidden(f"params.{names[0]} requires the admin token")
    if by_name and new.name is not None:
        new = msgspec.structs.replace(new, session_id=first_id(new.config.of_run, new.name))
    if new.config.capture == "text" or new.config.upstream is not None:
        new = msgspec.structs.replace(new, config=_of_text(new.config, app.text_upstreams))
    try:
        return created(request, await _begun(app, new))
    except AppError as error:
        await hide(app, error, request.head.token_run, (body.session_id, body.parent_session_id))
        raise


async def _begun(app: Services, new: NewSession) -> str:
    """Create a session, or the next generation of its name; its id. Raises AppError."""
    try:
        return await app.sessions.create(new)
    except SessionEnded:
        if new.name is None:
            raise
        return await app.names.begin(new)


def created(request: Request, session_id: str) -> dict[str, Any]:
    """What a client is told of its new session."""
    token = request.services.tokens.for_session(session_id)
    path = f"/sessions/{session_id}"
    told = {"session_id": session_id, "base_url": f"{path}/v1", "url": _public_url(request) + path}
    return told if token is None else {**told, "token": token}


def _public_url(request: Request) -> str:
    """The public address, else the one that the request was sent to."""
    given, scope = request.services.public_url(), request.scope
    if given is not None:
        return given
    host, port = scope["server"] or ("localhost", None)
    named = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    address = named or (host if port is None else f"{host}:{port}")
    return f"{scope['scheme']}://{address}{scope.get('root_path', '')}"
