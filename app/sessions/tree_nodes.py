"""A session's tree as miles' drivers and pickers read it, in the metadata of a session and of its samples."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.domain.session import Session, Turn
from app.store.content import load_exchanges
from app.store.ports import Database, of_session
from workers import codec
from workers.codec import Exchange

PAGE = 64
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
    nodes: Sequence[Node]
    leaves: Sequence[LeafPath]

    def leaf(self, turn: int) -> LeafPath | None:
        return next((leaf for leaf in self.leaves if leaf.node_id == turn), None)


class _Reply(msgspec.Struct, frozen=True):
    id: str | None = None


codec.describe(_Reply)


async def node_tree(database: Database, session: Session) -> NodeTree:
    """The nodes in the order of their commits, and the leaves. Raises SessionUnreadable."""
    turns = list(session.turns)
    ids: dict[int, str | None] = {}
    for at in range(0, len(turns), PAGE):
        numbers = [turn.number for turn in turns[at : at + PAGE]]
        exchanges = await of_session(database, session.session_id, load_exchanges, numbers)
        ids |= {number: _response_id(exchange) for number, exchange in exchanges.items()}
    continued = {turn.token_parent for turn in turns}
    return NodeTree(
        [_node(turn, seq, ids[turn.number]) for seq, turn in enumerate(turns)],
        [_leaf(session, turn, ids[turn.number]) for turn in turns if turn.number not in continued],
    )


def _node(turn: Turn, seq: int, response_id: str | None) -> Node:
    return Node(
        id=turn.number,
        parent=turn.token_parent or None,
        seq=seq,
        truncated=turn.finish_reason == "length",
        committed_at=turn.committed_at,
        completion_span=(turn.token_count - turn.output_tokens, turn.token_count),
        num_tokens=turn.token_count,
        response_id=response_id,
    )


def _leaf(session: Session, turn: Turn, response_id: str | None) -> LeafPath:
    path = [earlier.number for earlier in session.token_chain(turn.number)]
    return LeafPath(turn.number, turn.token_parent or None, path, response_id)


def _response_id(exchange: Exchange) -> str | None:
    """Null for an id that is not a string, which is no fault of the reply."""
    body = codec.paste(exchange, memoryview(b"").cast("i"), {})
    try:
        return msgspec.json.decode(body, type=_Reply).id
    except msgspec.MsgspecError:
        return None
