"""Finds the session of a request by its headers, for harnesses that cannot put it into the path.

Several agents may share a harness's session. An agent with an id of its own in a header gets its own session, a child
of the shared one. If agents cannot be distinguished, the error says which header to send.

Sources of the header names: Dynamo's protocols/agents.rs (dynamo-llm 1.4.0 and 1.5.0) and its page on agent sessions.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Collection, Mapping
from typing import NamedTuple

import msgspec

from app.api.auth import unknown_session
from app.api.sessions import CreateSession, new_session
from app.api.state import Services
from app.domain import control
from app.domain.patterns import ID
from app.errors import AppError, HistoryMismatch, InvalidRequest, RollbackTooDeep, SessionBusy, SessionClosed
from app.turn.in_flight import TurnReply
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.header_sessions")


class Harness(NamedTuple):
    """A harness's headers for its session, the agent in it, that agent's parent agent, and a parent session."""

    session: str
    agent: str | None = None
    parent_agent: str | None = None
    parent: str | None = None


HARNESSES = (
    Harness("x-turnlog-session-id"),
    Harness("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    Harness("x-session-id", parent="x-parent-session-id"),
    Harness("session-id", agent="thread-id", parent_agent="x-codex-parent-thread-id"),
    Harness("x-claude-code-session-id", agent="x-claude-code-agent-id", parent_agent="x-claude-code-parent-agent-id"),
    Harness("x-multi-turn-session-id"),
)
"""Turnlog's own, Dynamo's, OpenCode's, Codex's, Claude Code's, a generic one. The first one present is used."""

AGENT, PARENT, FINAL = "x-turnlog-agent-id", "x-turnlog-parent-session-id", "x-dynamo-session-final"
"""Headers that are valid with any harness and take precedence over the harness's own."""

NAMES = frozenset((AGENT, PARENT, FINAL, *(name for harness in HARNESSES for name in harness if name is not None)))

AGENTS_HINT = (
    "the session was named by a header alone, so another agent of the same session cannot be told from this one: where "
    f"agents share a session, let each send its own {AGENT} (the parent's session in {PARENT}), or a session of its own"
)

MAX_ID = 128

MAX_PREFIX = 95
"""Characters of the session's id that are kept in an agent's session id that would be too long."""

HASH_CHARACTERS = MAX_ID - 1 - MAX_PREFIX


class HeaderSession:
    """The session of one request. `parent` is the session of the agent that started this session's agent.

    `root` is the session in the header, `agents` are the agents' sessions whose ids were derived from it.
    """

    def __init__(
        self,
        session_id: str,
        parent: str | None = None,
        *,
        root: str | None = None,
        agents: Collection[str] = (),
        is_final: bool = False,
    ) -> None:
        self.session_id = session_id
        self.parent = parent
        self._root = session_id if root is None else root
        self._agents = agents
        self._is_final = is_final
        self._has_committed = False

    async def ensure(self, app: Services, token_session: str | None = None) -> None:
        """Create the session on its first use; a child copies the configuration of its parent, if that exists.

        `token_session` is the session of the request's token. Raises SessionNotFound if this session or its
        parent is neither that session nor one of its agents'.
        """
        if token_session is not None and self.session_id != token_session:
            self.parent = self.parent or token_session
            self._require_below(token_session, self.session_id)
        if token_session is not None and self.parent is not None:
            self._require_below(token_session, self.parent)
        await self._ensure(app, token_session)
        if token_session is not None and self.session_id != token_session:
            stored = await app.sessions.config_of(self.session_id)
            self._require_below(token_session, (stored and stored.parent) or "")

    def _require_below(self, token_session: str, session_id: str) -> None:
        """Raises SessionNotFound unless `session_id` is the token's session or, by its name, one of its agents'."""
        is_named = session_id == token_session or session_id.startswith(f"{token_session}:")
        if not is_named and not (self._root == token_session and session_id in self._agents):
            raise unknown_session(self.session_id)

    async def _ensure(self, app: Services, token_session: str | None) -> None:
        if await app.sessions.config_of(self.session_id) is not None:
            return
        creator = None if token_session == self.session_id else token_session
        parent = None if self.parent is None else await app.sessions.config_of(self.parent)
        if creator is not None and parent is None:
            # A parent that is never created would be another root, outside the limit on agents' sessions.
            self.parent, parent = creator, await app.sessions.config_of(creator)
        body = CreateSession(session_id=self.session_id, parent_session_id=self.parent)
        new = new_session(body, app.settings)
        if parent is not None:
            config = msgspec.structs.replace(
                new.config,
                adapter=parent.adapter,
                on_abort=parent.on_abort,
                matcher=parent.matcher,
                rollback_window=parent.rollback_window,
                on_divergence=parent.on_divergence,
            )
            new = msgspec.structs.replace(new, config=config)
        if creator is None:
            await app.sessions.ensure(new)
        else:
            await app.sessions.ensure_agents(new, app.settings.max_agent_sessions)

    async def with_hint(self, call: Awaitable[TurnReply]) -> TurnReply:
        """The turn's reply. An error that another agent of the session may have caused gets AGENTS_HINT added."""
        try:
            reply = await call
        except (SessionBusy, HistoryMismatch, RollbackTooDeep) as error:
            if not error.retry:
                error.args = (f"{error}; {AGENTS_HINT}",)
            raise
        self._has_committed = reply.turn is not None
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


def session_of_request(headers: Headers, body: bytes) -> HeaderSession:
    """The session of a request whose path has no session: from a header, else from `nvext.session_control`.

    Raises InvalidRequest, also if there is neither.
    """
    given = {name: stripped for name, value in headers if name in NAMES and (stripped := value.strip())}
    harness = next((one for one in HARNESSES if one.session in given), None)
    if harness is None:
        session_id = control.session_named(body)
        if session_id is None:
            expected = ", ".join(one.session for one in HARNESSES)
            raise InvalidRequest(f"no session: send one of the headers {expected}, or nvext.session_control")
        return HeaderSession(session_id, _parent(given, None, session_id), is_final=_is_final(given))
    session_id = _valid(given, harness.session)
    agent = given.get(AGENT) or given.get(harness.agent or "")
    own, parent = session_id, None
    agents = []
    if agent is not None and agent != session_id:
        own, parent = _agent_session(session_id, agent), session_id
        agents.append(own)
        by = given.get(harness.parent_agent or "")
        if by is not None and by != session_id:
            parent = _agent_session(session_id, by)
            agents.append(parent)
    parent = _parent(given, harness.parent, own) or parent
    return HeaderSession(own, parent, root=session_id, agents=agents, is_final=_is_final(given))


def _is_final(given: Mapping[str, str]) -> bool:
    return given.get(FINAL, "").lower() == "true"


def _parent(given: Mapping[str, str], own_header: str | None, session_id: str) -> str | None:
    """The parent session in a header, or None. A session is not its own parent."""
    name = next((name for name in (PARENT, own_header) if name in given), None)
    parent = None if name is None else _valid(given, name)
    return None if parent == session_id else parent


def _valid(given: Mapping[str, str], name: str) -> str:
    value = given[name]
    if not re.fullmatch(ID, value) or not value.strip("."):
        raise InvalidRequest(
            f"{name} must be 1 to {MAX_ID} letters, digits, dots, underscores, colons or hyphens, and not only dots"
        )
    return value


def _agent_session(session_id: str, agent: str) -> str:
    """`session:agent`, with a hash if that is too long or has characters that are not allowed in an id."""
    plain = f"{session_id}:{agent}"
    if re.fullmatch(ID, plain):
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:HASH_CHARACTERS]
    return f"{session_id[:MAX_PREFIX]}:{digest}"
