"""One session's samples for rollout drivers, and the session's description for `GET /sessions/{id}`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.domain.branches import TEXT_ONLY, Branches, pick
from app.domain.events import UnknownEvent
from app.domain.request import as_raw
from app.domain.samples import Inconsistent
from app.domain.session import Session
from app.errors import InvalidRequest, SessionNotFound
from app.export.pages import Members, RolloutRows
from app.export.query import ExportQuery
from app.export.rows import Known, SessionRows, known
from app.export.shapes import miles
from app.sessions import transcript
from app.sessions.cache import CacheEntry, SessionCache
from app.store.content import StoredSession, fetch_objects, load_blobs, load_exchanges, read_content, read_sessions
from app.store.feed import END
from app.store.ports import Connection, Database, of_session
from app.turn.token_in import TokenIn
from workers import codec
from workers.codec import CorruptContent, Exchange


class SessionSamples:
    """`release` is Turnlog's version, for provenance; `versions` how miles' driver reads weight versions."""

    def __init__(
        self, cache: SessionCache, token_in: TokenIn, release: str, versions: Literal["names", "spans"]
    ) -> None:
        self._cache = cache
        self._token_in = token_in
        self._release = release
        self._versions = versions

    async def safetensors(
        self,
        live: CacheEntry,
        max_seq_len: int | None,
        branches: Branches = "kept",
        agent: Mapping[str, Any] | None = None,
        *,
        sealed: bool = False,
    ) -> tuple[bytes, int]:
        """The samples of the branches in miles' wire format, and the session's revision. `agent` is the driver's
        metadata, which each sample gets and the reply repeats. `sealed`: they are those of a finished session, which
        has none while something is missing.

        Raises SessionUnreadable.
        """
        session_id = live.session.session_id
        rollout_rows = RolloutRows(self._cache.database, END, branches, has_text=False)

        def read(connection: Connection) -> tuple[dict[str, StoredSession], Members]:
            stored = read_sessions(connection, [session_id], END)
            if stored:
                stored = read_content(connection, stored, dict.fromkeys(stored), replay=True)
            return stored, rollout_rows.members(connection, stored)

        stored, members = await self._cache.database.read(read, session_id=session_id)
        if session_id not in stored:
            raise SessionNotFound.of(session_id)
        await fetch_objects(self._cache.database, stored.values())
        stored = await rollout_rows.counted(stored, members)
        try:
            session = await asyncio.to_thread(known, stored[session_id])
            # miles' driver writes what `/samples` says of the session over what the agent returned, so it is miles' own
            # keys: none of another meaning, and none without a value.
            fields, ours = await self.metadata(live, session.session), summary(session.session)
            metadata = {name: value for name, value in fields.items() if name not in ours and value is not None}
            if agent is not None:
                metadata["agent"] = {name: as_raw(value) for name, value in agent.items()}
            made = await asyncio.to_thread(
                self._body, stored[session_id], session, max_seq_len, branches, metadata, sealed=sealed
            )
            return made, session.session.revision
        except (UnknownEvent, CorruptContent, Inconsistent) as error:
            raise self._cache.database.unreadable.error(session_id, error) from error

    def _body(
        self,
        stored: StoredSession,
        known_session: Known,
        max_seq_len: int | None,
        branches: Branches,
        metadata: dict[str, Any],
        *,
        sealed: bool,
    ) -> bytes:
        query = ExportQuery(max_seq_len=max_seq_len, truncate="token", images="none", replay=True)
        made = SessionRows(stored, known_session, query, branches, self._release)
        session = known_session.session
        is_incomplete = sealed and not session.is_complete
        has_rows = not (session.is_text or is_incomplete)
        rows = [made.row(segment, "") for segment in made.segments] if has_rows else []
        reason = None if rows else "all_truncated"
        if is_incomplete:
            reason = "incomplete"
        elif session.leaf is None:
            reason = "no_records"
        elif session.is_text:
            reason = TEXT_ONLY
        prompts = self._token_in.prompts
        responses = (
            None
            if prompts is None
            else [prompts.decode(row.sample.tokens[row.sample.prompt_length :].tolist()) for row in rows]
        )
        versions = self._versions if session.config.evaluation is None else "spans"
        beside = [_beside(row.turns[-1].event.turn, session, metadata) for row in rows]
        return miles.samples_body(rows, metadata, reason, responses, versions, beside)

    async def metadata(self, live: CacheEntry, session: Session) -> dict[str, Any]:
        """The field `session` of `GET /sessions/{id}`; `live` may have advanced meanwhile.

        Raises SessionUnreadable.
        """
        prompts, leaf = self._token_in.prompts, session.leaf
        ids = b"" if leaf is None else await transcript.token_ids(self._cache.database, session, leaf.number)
        tokens = memoryview(ids).cast("i").tolist()
        fields: dict[str, Any] = {
            "accumulated_token_ids": tokens,
            "max_trim_tokens": 0 if prompts is None else prompts.max_trim_tokens,
            **summary(session),
        }
        if prompts is not None:
            fields["tito_session_mismatch"] = await self._mismatch(live, session, tokens)
        if session.history == "tree":
            fields["tree"] = await node_tree(self._cache.database, session)
        return fields

    async def metadata_given(self, session: Session) -> msgspec.Raw:
        """The metadata given at create, as JSON. Raises SessionUnreadable."""
        blob = session.metadata
        if blob is None:
            return msgspec.Raw(b"{}")
        given = await of_session(self._cache.database, session.session_id, load_blobs, [blob.number])
        return msgspec.Raw(given[blob.number])

    async def _mismatch(self, live: CacheEntry, session: Session, tokens: list[int]) -> list[dict[str, Any]] | None:
        """Where the accumulated tokens differ from the template's rendering of the messages.

        None if they cannot be rendered: no turn, a completion, or messages that the template refuses.
        """
        leaf = session.leaf
        if leaf is None or leaf.shape != "chat" or session.is_text:
            return None
        messages = msgspec.json.decode(b"[" + await self._cache.messages(live, leaf.number) + b"]")
        try:
            return await self._token_in.mismatch(session, leaf, tokens, messages)
        except InvalidRequest:
            return None


def _beside(turn: int, session: Session, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the sample that ends with this turn: the agent's, of which miles' own keys replace those that
    they have a value for. `leaf` is what its pickers read; the mismatch is known of the newest turn alone."""
    tree: NodeTree | None = metadata.get("tree")
    is_newest = session.leaf is not None and session.leaf.number == turn
    ours = {
        "leaf": None if tree is None else next((leaf for leaf in tree.leaves if leaf.node_id == turn), None),
        "tito_session_mismatch": metadata.get("tito_session_mismatch") if is_newest else None,
    }
    return {**metadata.get("agent", {}), **{name: value for name, value in ours.items() if value is not None}}


TOKEN_BYTES = 8 + 1 + 8
"""Of a token in samples: its id, loss mask and logprob."""


def bytes_of(session: Session, branches: Branches) -> int:
    """About the memory that making the samples takes: the arrays, in which payloads are int32, and the reply."""
    size = 0
    for leaf in pick(session, branches):
        size += leaf.token_count * TOKEN_BYTES
        for payload in session.whole_payloads(leaf.number):
            size += max(4 * (payload.stop - payload.start) * payload.row_ids, sum(one.size for one in payload.chunks))
    return 2 * size


def summary(session: Session) -> dict[str, Any]:
    return {
        "status": session.status,
        "version": session.version,
        "run": session.config.of_run,
        "group_id": session.config.group_id,
        "attempt": session.config.attempt,
        "reward": session.reward.reward if session.reward else None,
    }


REPLIES_AT_ONCE = 64
"""How many replies are unpacked at a time, to find their ids."""


class Node(msgspec.Struct, frozen=True):
    """A committed turn. `parent` is the turn whose tokens it continues, null where its prompt begins anew.

    `seq` counts commits from 0. `completion_span` is [start, end) of the output in the tokens of the path; `num_tokens`
    is that path's length. `committed_at` is in seconds since 1970. `response_id` is the `id` of the engine's reply.
    """

    id: int
    parent: int | None
    seq: int
    truncated: bool
    committed_at: float
    completion_span: tuple[int, int]
    num_tokens: int
    response_id: str | None


class LeafPath(msgspec.Struct, frozen=True):
    """A turn whose tokens no other continues. `path_node_ids` are the turns of its tokens, oldest first."""

    node_id: int
    parent: int | None
    path_node_ids: Sequence[int]
    response_id: str | None


class NodeTree(msgspec.Struct, frozen=True):
    """A session's tree as miles' drivers and pickers read it, in the metadata of a session and of its samples."""

    nodes: Sequence[Node]
    leaves: Sequence[LeafPath]


class _Reply(msgspec.Struct, frozen=True):
    id: str | None = None


codec.describe(_Reply)


async def node_tree(database: Database, session: Session) -> NodeTree:
    """The nodes in the order of their commits, and the leaves. Raises SessionUnreadable."""
    turns = list(session.turns)
    ids: dict[int, str | None] = {}
    for at in range(0, len(turns), REPLIES_AT_ONCE):
        numbers = [turn.number for turn in turns[at : at + REPLIES_AT_ONCE]]
        exchanges = await of_session(database, session.session_id, load_exchanges, numbers)
        ids |= {number: _response_id(exchange) for number, exchange in exchanges.items()}
    continued = {turn.token_parent for turn in turns}
    nodes: list[Node] = []
    leaves: list[LeafPath] = []
    for seq, turn in enumerate(turns):
        number, parent, end = turn.number, turn.token_parent or None, turn.token_count
        is_cut, span = turn.finish_reason == "length", (end - turn.output_tokens, end)
        nodes.append(Node(number, parent, seq, is_cut, turn.committed_at, span, end, ids[number]))
        if number not in continued:
            path = [earlier.number for earlier in session.token_chain(number)]
            leaves.append(LeafPath(number, parent, path, ids[number]))
    return NodeTree(nodes, leaves)


def _response_id(exchange: Exchange) -> str | None:
    """Null for an id that is not a string, which is no fault of the reply."""
    body = codec.paste(exchange, memoryview(b"").cast("i"), {})
    try:
        return msgspec.json.decode(body, type=_Reply).id
    except msgspec.MsgspecError:
        return None
