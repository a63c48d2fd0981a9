"""Finds the session of a request by its headers, its token or its body, for harnesses that cannot put it into the path.

Several agents may share a harness's session. An agent with an id of its own in a header is a branch of it, or
gets its own session, a child of the shared one. If agents cannot be distinguished, the error says which header to send.

NeMo Gym gives each agent a base URL of its own, `<server>/ng-rollout/<rollout id>`, with `/training-token-capture`
behind it where the rollout is trained on, and the SDK adds `/v1/...`. Such a request is served as one to `/v1/...` with
the rollout's id in `x-turnlog-session-id`.

Sources: Dynamo's protocols/agents.rs (dynamo-llm 1.4.0 and 1.5.0) and its page on agent sessions; Gym's
base_responses_api_model.py and rollout_correlation.py (nemo-gym 0.7.0).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Collection, Mapping
from typing import Literal, NamedTuple

import msgspec
from starlette.types import Scope

from app.api.creation import CreateSession, new_session
from app.api.head import route_path, unknown_session
from app.domain import control
from app.domain.events import DEFAULT_RUN
from app.domain.names import first_id
from app.domain.patterns import ID, is_id
from app.domain.surrogates import decoded
from app.errors import (
    AppError,
    GenerationEnded,
    HistoryMismatch,
    InvalidRequest,
    Restored,
    RollbackTooDeep,
    RunMismatch,
    SessionBusy,
    SessionClosed,
)
from app.services import Services
from app.sessions.lifecycle import NewSession, made_session_id
from app.sessions.names import require_named_run
from app.turn.in_flight import TurnReply
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.header_sessions")


class Harness(NamedTuple):
    """A harness's headers for its session, the agent in it, that agent's parent agent, and a parent session.

    `makes_up_ids`: the harness itself makes its session's id, so that its user cannot name Turnlog's session in it.
    """

    session: str
    agent: str | None = None
    parent_agent: str | None = None
    parent: str | None = None
    makes_up_ids: bool = False


HARNESSES = (
    Harness("x-turnlog-session-id"),
    Harness("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    Harness("x-session-id", parent="x-parent-session-id"),
    Harness("session-id", agent="thread-id", parent_agent="x-codex-parent-thread-id", makes_up_ids=True),
    Harness(
        "x-claude-code-session-id",
        agent="x-claude-code-agent-id",
        parent_agent="x-claude-code-parent-agent-id",
        makes_up_ids=True,
    ),
    Harness("x-multi-turn-session-id"),
    Harness("x-smg-routing-key"),
)
"""Turnlog's own, Dynamo's, OpenCode's, Codex's, Claude Code's, a generic one, that of SGLang's router. The first one
present is used."""

_OWN = HARNESSES[0].session.encode()

ROLLOUTS = "/ng-rollout/"
_IN_ROLLOUT = re.compile(ROLLOUTS + r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:/training-token-capture)?(/v1/.*)", re.DOTALL)

AGENT, PARENT, FINAL = "x-turnlog-agent-id", "x-turnlog-parent-session-id", "x-dynamo-session-final"
"""Headers that are valid with any harness and take precedence over the harness's own."""

NAMES = frozenset((AGENT, PARENT, FINAL, *(name for harness in HARNESSES for name in harness if isinstance(name, str))))

AGENT_HEADERS = frozenset(
    name.encode() for name in (AGENT, *(harness.agent for harness in HARNESSES)) if name is not None
)
"""Those that may name an agent."""

AGENTS_HINT = (
    "the path does not name the session, so Turnlog cannot tell its agents apart: if agents share a session, "
    f"let each send its own {AGENT} (and its parent's session in {PARENT}), or give each a session of its own"
)

MAX_ID = 128

MAX_PREFIX = 95
"""Characters of the session's id that are kept in an agent's session id that would be too long."""

HASH_CHARACTERS = MAX_ID - 1 - MAX_PREFIX

PROMPT_CACHE_KEY, USER_ID = "prompt_cache_key", "metadata.user_id"

BODY_FIELDS: Mapping[str, bytes] = {PROMPT_CACHE_KEY: b'"prompt_cache_key"', USER_ID: b'"metadata"'}
"""Fields of a body that may name its session (TURNLOG_SESSION_FROM_BODY), and what such a body contains."""

MAX_NAMING = 16 << 10
"""Bytes of a field that names a session; a longer one names none."""


class _Naming(msgspec.Struct):
    """The fields of a body that are read here."""

    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


class _Metadata(msgspec.Struct):
    user_id: msgspec.Raw = msgspec.Raw()


class _User(msgspec.Struct):
    session_id: str


_NAMED = msgspec.json.Decoder(_Naming)


class HeaderSession:
    """The session of one request: that of `name`, the newest of its generations, or that of an agent in it.

    `token_session` is the session of the request's token, if it has one. `run` is that of a header; without one a name
    is a name of its parent's run, else of the default run.

    `agent_id` is the agent in the header; it is set to None where the agent has a session of its own. `started_by` is
    the agent that started it, `parent_name` the parent session in a header. `is_unnamed`: the request named no session,
    and this one was made up for it.

    `root` is the session of the name, `parent` that of the agent that started this session's agent.
    """

    def __init__(
        self,
        name: str,
        *,
        token_session: str | None,
        run: str | None,
        agent: str | None,
        started_by: str | None,
        parent_name: str | None,
        is_final: bool,
        is_unnamed: bool,
    ) -> None:
        self.name = name
        self.is_unnamed = is_unnamed
        self._token_session = token_session
        self._run = run
        self._agent = agent
        self._started_by = started_by
        self._parent_name = parent_name
        self._is_final = is_final
        self._has_committed = False
        self._place(name, parent_name)

    def _place(self, root: str, parent: str | None) -> None:
        """The session of the name is `root`, and that of the parent in a header `parent`."""
        self.root = self.session_id = root
        if self._parent_name == self.name:
            parent = root
        self.agent_id = self._agent
        self.parent: str | None = None
        self._agents: list[str] = []
        if self._agent is not None:
            self.session_id, self.parent = _agent_session(root, self._agent), root
            self._agents.append(self.session_id)
            if self._started_by is not None:
                self.parent = _agent_session(root, self._started_by)
                self._agents.append(self.parent)
        if parent is not None and parent != self.session_id:
            self.parent = parent

    async def ensure(self, app: Services) -> None:
        """Create the session on its first use; a child copies the configuration of its parent, if that exists. One that
        was finished stays as it is until a turn finds it so, for `begin_next`.

        Raises SessionNotFound if this session or its parent is neither that of the request's token nor one of its
        agents'; GenerationEnded for an agent of a session that was.
        """
        if self._token_session is None:
            await self._place_of_name(app)
        else:
            await self._place_of_token(app, self._token_session)
        await self._ensure_placed(app)

    async def _place_of_name(self, app: Services) -> None:
        names, parent = app.names, None
        if self._parent_name is not None and self._parent_name != self.name:
            own = app.cache.known(names.known(self._run, self.name))
            parent = names.known(self._run, self._parent_name)
            if own is None or own.config.parent != parent:
                parent = await names.at(self._run, self._parent_name)
                if self._run is None and (above := await app.sessions.config_of(parent)) is not None:
                    self._run = above.run
        self._place(self.name if self.is_unnamed else await names.at(self._run, self.name), parent)

    async def _require_run(self, app: Services) -> None:
        """Raises RunMismatch as `require_named_run`; also where a client of another run has made a session under the id
        that this one has by its name."""
        if self._token_session is not None:
            return
        root = await app.cache.get(self.root)
        if root is not None:
            require_named_run(root.session, self._run, self.name)
        run = self._run or (DEFAULT_RUN if root is None else root.session.config.of_run)
        await app.names.require_run(self.session_id, run)

    async def _place_of_token(self, app: Services, token_session: str) -> None:
        """The token says which generation of its session's name it is."""
        if self._run is not None:
            await app.names.require_run(token_session, self._run)
        if token_session == self.name:
            return
        own = await app.cache.get(token_session)
        if own is not None and own.session.name == self.name:
            self._place(token_session, self._parent_name)

    async def begin_next(self, app: Services, ended: GenerationEnded | Restored) -> None:
        """The session of the name had been finished before the request came, or is undone: choose the newest one, or
        begin it. Raises as `ensure`; `ended` if there is no other."""
        before = self.root
        own = await app.cache.get(before)
        if own is not None and own.session.name != self.name:
            raise ended  # It was named by its id.
        has_parent = self._parent_name not in (None, self.name)
        parent = await app.names.newest(self._run, self._parent_name or "") if has_parent else None
        new = await self._new(app, self.name, parent if self._agent is None else None)
        self._place(await app.names.begin_if_finished(new), parent)
        if self.root == before:
            raise ended
        await self._ensure_placed(app)

    async def _ensure_placed(self, app: Services) -> None:
        await self._choose_session(app)
        if self._token_session is not None and self.session_id != self._token_session:
            self.parent = self.parent or self._token_session
            self._require_below(self.session_id)
        if self.parent is not None:
            self._require_below(self.parent)
        if await app.sessions.config_of(self.session_id) is None:
            await self._create(app)
        await self._require_run(app)
        await self._require_stored_below(app)

    async def existing(self, app: Services) -> str:
        """The session's id, for a request that creates none. Raises SessionNotFound as `ensure`."""
        if self._token_session is None:
            self._place(await app.names.newest(self._run, self.name), None)
        else:
            await self._place_of_token(app, self._token_session)
        await self._choose_session(app)
        await self._require_run(app)
        self._require_below(self.session_id)
        await self._require_stored_below(app)
        return self.session_id

    async def _choose_session(self, app: Services) -> None:
        """An agent is a branch of the session in the header, unless that is linear, the operator wants a session for
        each agent, or the agent has one in the store already.

        Raises SessionNotFound before another token's session is read: the choice would tell its history.
        """
        self._require_below(self.root)
        if self.agent_id is None:
            return
        root = await app.cache.get(self.root)
        history = app.settings.history if root is None else root.session.history
        is_branch = app.settings.agents == "branches" and history != "linear"
        if is_branch and await app.sessions.config_of(self.session_id) is None:
            self.session_id, self.parent = self.root, None
            return
        self.agent_id = None
        if root is not None and root.session.frees_name:
            raise GenerationEnded.of(self.root, "is closed")

    async def _require_stored_below(self, app: Services) -> None:
        """Its name does not make a session an agent's: its stored parent does. Raises SessionNotFound."""
        if self._token_session is not None and self.session_id != self._token_session:
            stored = await app.sessions.config_of(self.session_id)
            self._require_below((stored and stored.parent) or "")

    def _require_below(self, session_id: str) -> None:
        """Raises SessionNotFound unless `session_id` is the token's session or, by its name, one of its agents'."""
        token_session = self._token_session
        is_named = token_session is None or session_id == token_session or session_id.startswith(f"{token_session}:")
        if not is_named and not (self.root == token_session and session_id in self._agents):
            raise unknown_session(self.session_id)

    async def _create(self, app: Services) -> None:
        creator = None if self._token_session == self.session_id else self._token_session
        if creator is not None and (self.parent is None or await app.sessions.config_of(self.parent) is None):
            # A parent that is never created would be another root, outside the limit on agents' sessions.
            self.parent = creator
        new = await self._new(app, self.session_id, self.parent)
        if creator is not None:
            await app.sessions.ensure_agents(new, app.settings.max_agent_sessions)
        elif new.name is None:
            await app.sessions.ensure(new)
        else:
            self.root = self.session_id = await app.names.begin_if_finished(new)

    async def _new(self, app: Services, session_id: str, parent_id: str | None) -> NewSession:
        """The session as it is to be created. An agent's has no name, nor has one that was made up."""
        is_root = session_id == self.root or session_id == self.name
        name = self.name if is_root else session_id
        new = new_session(CreateSession(session_id=name, parent_session_id=parent_id, run=self._run), app.settings)
        if not is_root or self.is_unnamed:
            new = msgspec.structs.replace(new, name=None, generation=None)
        elif self._run is not None and self._token_session is None:
            new = msgspec.structs.replace(new, session_id=first_id(self._run, name))
        if new.config.history is None:
            # No path named it.
            new = msgspec.structs.replace(new, config=msgspec.structs.replace(new.config, history="tree"))
        parent = None if parent_id is None else await app.sessions.config_of(parent_id)
        if parent is None:
            return new
        if self._run not in (None, parent.of_run):
            raise RunMismatch(f"session {parent_id} belongs to run {parent.of_run}, not to {self._run}")
        config = msgspec.structs.replace(
            parent,
            parent=new.config.parent,
            group_id=new.config.group_id,
            attempt=new.config.attempt,
            # Else it would have no limits under another name. Those of a rollout hold for it anyway.
            limits=parent.limits if parent.limits is not None and parent.limits.per == "session" else None,
            history=parent.history or new.config.history,
        )
        return msgspec.structs.replace(new, config=config)

    async def with_hint(self, call: Awaitable[TurnReply]) -> TurnReply:
        """The turn's reply. An error that another agent of the session may have caused gets AGENTS_HINT added."""
        try:
            reply = await call
        except (SessionBusy, HistoryMismatch, RollbackTooDeep) as error:
            if not error.retry:
                error.args = (f"{error}; {AGENTS_HINT}",)
            raise
        self._has_committed = reply.turn is not None and reply.session_id is None
        return reply

    async def end(self, app: Services) -> None:
        """Close the session after the reply, if the client marked the turn as final and it was committed."""
        if not (self._is_final and self._has_committed):
            return
        try:
            await app.sessions.close(self.session_id)
        except SessionClosed:
            return
        except AppError as error:
            log.warning("session %s could not be closed after its final turn: %s", self.session_id, error)


def session_of_request(
    headers: Headers,
    body: bytes,
    token_session: str | None,
    run: str | None = None,
    body_fields: Collection[str] = (),
    without_session: Literal["refuse", "record"] = "refuse",
) -> HeaderSession:
    """The session of a request whose path has no session.

    From a header, else from `nvext.session_control`, else that of the request's token, else from the first of
    `body_fields` that the body has. An id that a harness made up gives way to the token's session. `run` is that of a
    header. Raises InvalidRequest, also if there is none, unless `without_session` is `record`.
    """
    given = _given(headers)
    harness = _harness(given)
    if harness is None:
        session_id = control.session_named(body) or token_session or _named_in(body, body_fields)
    elif harness.makes_up_ids and token_session is not None:
        session_id = token_session
    else:
        session_id = _valid(given, harness.session)
    is_unnamed = session_id is None
    if session_id is None:
        if without_session == "refuse":
            expected = ", ".join(harness.session for harness in HARNESSES)
            raise InvalidRequest(
                "the request names no session: use the url that POST /sessions returns as the base URL, or "
                f"name the session in a header ({expected}) or in nvext.session_control, or send its own token "
                "as the API key (with TURNLOG_WITHOUT_SESSION=record such a request gets a session of its own)"
            )
        session_id = _made_up(headers, run)
    main = given[harness.session] if harness is not None else session_id
    by = None if harness is None else given.get(harness.parent_agent or "")
    return HeaderSession(
        session_id,
        token_session=token_session,
        run=run,
        agent=_agent(given, harness, main),
        started_by=None if by == main else by,
        parent_name=_parent(given, None if harness is None else harness.parent),
        is_final=given.get(FINAL, "").lower() == "true",
        is_unnamed=is_unnamed,
    )


def _made_up(headers: Headers, run: str | None) -> str:
    """A new session's id. A retry with the same idempotency key gets the same one in its run."""
    key = next((value for name, value in headers if name == "idempotency-key" and value), None)
    return made_session_id() if key is None else f"key-{_digest(first_id(run or DEFAULT_RUN, key))}"


def agent_of(headers: Headers) -> str | None:
    """The agent that the headers of a request name, for a session in the path."""
    given = _given(headers)
    harness = _harness(given)
    return _agent(given, harness, None if harness is None else given[harness.session])


def in_header(scope: Scope, session_id: str) -> Scope:
    """The scope of the same request with the session in Turnlog's own header. What the harness's headers say of its
    agent holds, and what they say of its session does not."""
    given = [(name, value) for name, value in scope["headers"] if name != _OWN]
    agent = agent_of([(name.decode("latin-1"), value.decode("latin-1")) for name, value in given])
    if agent is not None:
        given = [*((name, value) for name, value in given if name != AGENT.encode()), (AGENT.encode(), agent.encode())]
    return {**scope, "headers": [(_OWN, session_id.encode()), *given]}


def without_prefix(scope: Scope) -> Scope:
    """The scope of the same request without Gym's prefix; the same scope if it has none."""
    path = route_path(scope)
    if not path.startswith(ROLLOUTS) or (match := _IN_ROLLOUT.fullmatch(path)) is None:
        return scope
    rollout_id, rest = match.groups()
    root = scope["path"][: len(scope["path"]) - len(path)]
    return in_header({**scope, "path": root + rest, "raw_path": (root + rest).encode()}, rollout_id)


def _given(headers: Headers) -> dict[str, str]:
    """The headers that are read here and are not blank."""
    return {name: stripped for name, value in headers if name in NAMES and (stripped := value.strip())}


def _harness(given: Mapping[str, str]) -> Harness | None:
    return next((one for one in HARNESSES if one.session in given), None)


def _agent(given: Mapping[str, str], harness: Harness | None, session: str | None) -> str | None:
    """The agent in the headers. The one that is named like its session is the session's main agent: None."""
    agent = given.get(AGENT) or (None if harness is None else given.get(harness.agent or ""))
    return None if agent == session else agent


def _named_in(body: bytes, fields: Collection[str]) -> str | None:
    """The session that the first of these fields of the body names, or None."""
    if not any(BODY_FIELDS[field] in body for field in fields):
        return None
    try:
        named = decoded(_NAMED, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # The turn's parser says what is wrong.
    values = {PROMPT_CACHE_KEY: _text(named.prompt_cache_key), USER_ID: _user(named.metadata)}
    name = next((value for field in fields if (value := values[field])), None)
    # A hash of it, if it is too long or has characters that are not allowed in an id.
    return name if name is None or is_id(name) else _digest(name)


def _text(raw: msgspec.Raw) -> str | None:
    """The text in a short field, else None."""
    if not 0 < len(bytes(raw)) <= MAX_NAMING:
        return None
    try:
        return msgspec.json.decode(raw, type=str).strip()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _user(raw: msgspec.Raw) -> str | None:
    """`user_id` in `metadata`. Claude Code sends JSON text there, with a `session_id`."""
    if not 0 < len(bytes(raw)) <= MAX_NAMING:
        return None
    try:
        user_id = _text(msgspec.json.decode(raw, type=_Metadata).user_id)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if user_id is None:
        return None
    try:
        return msgspec.json.decode(user_id, type=_User).session_id.strip() or user_id
    except (msgspec.MsgspecError, RecursionError):
        return user_id


def _parent(given: Mapping[str, str], own_header: str | None) -> str | None:
    """The parent session in a header, or None."""
    name = next((name for name in (PARENT, own_header) if name in given), None)
    return None if name is None else _valid(given, name)


def _valid(given: Mapping[str, str], name: str) -> str:
    value = given[name]
    if not is_id(value):
        raise InvalidRequest(
            f"{name} must be 1 to {MAX_ID} letters, digits, dots, underscores, colons or hyphens, and not only dots"
        )
    return value


def _agent_session(session_id: str, agent: str) -> str:
    """`session:agent`, with a hash if that is too long or has characters that are not allowed in an id."""
    plain = f"{session_id}:{agent}"
    return plain if re.fullmatch(ID, plain) else f"{session_id[:MAX_PREFIX]}:{_digest(plain)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
