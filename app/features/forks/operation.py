"""The operation that creates a fork; its content is copied inside the database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Connection, Integer, bindparam, insert, select
from sqlalchemy.sql import Executable

from app.crash_points import reach
from app.domain.events import AnnotationWritten, BlobsTombstoned, ChunkKey
from app.features.forks.rules import Forked
from app.store import rollouts
from app.store import statements as sql
from app.store.dialect import NoRoom, Parameters, Tx
from app.store.log import Appended, BaseOperation, Refused, StoredBlob, append, blob_row, ids_elsewhere
from app.store.log_sessions import Existing, new_head, without_room
from app.store.log_turns import Stale
from app.store.schema import SESSION_ID, annotation_columns, blobs, chunks, events, turns
from app.store.sessions import EventRow, event_rows

if TYPE_CHECKING:
    from app.features.objects.objects import Copies

AT_ONCE = 8
"""Rows copied in one call, which must end within the database's statement timeout. A row has at most about 1 MiB."""

MOST_BYTES = 64 << 20
"""The most bytes that a fork counts in the writer's queue, which holds 256 MiB."""


class Fork(BaseOperation, frozen=True):
    """Create session `fork_id` with the log `forked`, a copy of turns of `session_id`, whose row is locked meanwhile.

    Returns only the creation event, so that copied turns are not counted as taken. Nothing is written if it returns
    Existing (the id is in use), Refused (the source does not exist or is erased), or Stale (payloads that it would copy
    were tombstoned after event `tombstone`, a column was replaced, or `copies` of its objects have been given up).
    """

    session_id: str
    fork_id: str
    at: float
    forked: Forked
    metadata: StoredBlob | None
    tombstone: int
    copies: Copies | None = None

    @property
    def size(self) -> int:
        """Approximate bytes written, at most MOST_BYTES so that the queue keeps room. Content is never in memory."""
        tokens = sum(event.suffix_tokens + event.output_tokens for event in self.forked.copied)
        chunks = sum(chunk.size for event in self.forked.copied for ref in event.payloads for chunk in ref.chunks)
        return min(512 * len(self.forked.events) + 16 * tokens + chunks, MOST_BYTES)

    def apply(self, tx: Tx) -> Appended | Existing | Refused | Stale | NoRoom:
        taken = tx.one(sql.head, {"sid": self.fork_id})
        if taken is not None:
            return Existing(self.fork_id, taken[1], taken[3])
        if ids_elsewhere(tx, [self.fork_id]):
            return Existing(self.fork_id, "archived", self.forked.created.body_hash)
        tx.lock(sql.lock_head, {"sid": self.session_id})
        source = tx.one(sql.head, {"sid": self.session_id})
        if source is None or source[1] == "erased":
            return Refused(None if source is None else source[1])
        if self.forked.chunks and self._newest_tombstone(tx) != self.tombstone:
            return Stale()
        if self.forked.columns and not set(self.forked.columns.values()) <= self._columns(tx):
            return Stale()
        if room := without_room(tx, {self.fork_id: self.forked.created.config.of_run}).get(self.fork_id):
            return room
        if self.copies is not None and not self.copies.take(tx, self.fork_id):
            return Stale()
        tx.insert(sql.insert_session, [self._head_row()])
        rollouts.adopt(tx, {self.fork_id: None})
        rollouts.note(tx, self.forked.created.config.of_run, self.forked.created.config.group_id)
        self._copy(tx)
        appended = append(tx, self.fork_id, 1, self.at, self.forked.events)
        reach("in_fork")
        return Appended(appended.events[:1])

    def _columns(self, tx: Tx) -> set[int]:
        return {row[0] for row in tx.all(_columns, {"sid": self.session_id})}

    def _newest_tombstone(self, tx: Tx) -> int:
        row = tx.one(_newest_tombstone, {"sid": self.session_id})
        return 0 if row is None else row[0]

    def _copy(self, tx: Tx) -> None:
        forked = self.forked
        own = {"fork_id": self.fork_id, "sid": self.session_id}
        _run_in_parts(
            tx,
            _copy_turn,
            (
                {
                    **own,
                    "as_turn": event.turn,
                    "as_parent": event.parent,
                    "as_segment": event.segment,
                    "old": forked.turns[event.turn],
                }
                for event in forked.copied
            ),
        )
        _run_in_parts(tx, _copy_blob, ({**own, "as_number": new, "old": old} for new, old in forked.blobs.items()))
        if self.metadata is not None:
            tx.insert(sql.insert_blob, [blob_row(self.fork_id, self.metadata)])
        copied = {} if self.copies is None else self.copies.names
        _run_in_parts(
            tx,
            _copy_chunk,
            (
                {**own, "as_fence": key[0], "fenced": old[0], "place": old[1], "as_object": copied.get(key)}
                for key, old in forked.chunks.items()
            ),
        )
        tx.insert(sql.insert_chunk, list(self._tombstones()))
        _run_in_parts(
            tx,
            _copy_column,
            (
                {**own, "as_turn": event.turn, "as_seq": seq, "old": forked.columns[seq]}
                for seq, event in enumerate(forked.events, 1)
                if seq in forked.columns and isinstance(event, AnnotationWritten)
            ),
        )

    def _head_row(self) -> dict[str, Any]:
        copied = self.forked.copied
        versions = (version for event in copied for version in event.version_numbers)
        return {
            **new_head(self.fork_id, self.at, self.forked.created, root_id=None),
            "version": len(self.forked.events),
            "turns": len(copied),
            "last_turn": len(copied),
            "weight_version": max(versions, default=None),
            "engine": copied[-1].engine,
            "tool_errors": sum(event.tool_errors for event in copied),
        }

    def _tombstones(self) -> Iterator[dict[str, Any]]:
        by = len(self.forked.events)
        for kind, chunk in self.forked.freed:
            yield {
                "session_id": self.fork_id,
                "fence": chunk.fence,
                "number": chunk.number,
                "kind": kind,
                "size": chunk.size,
                "hash": chunk.hash,
                "tombstoned_by": by,
            }


def _run_in_parts(tx: Tx, statement: Executable, parameters: Iterable[Parameters]) -> None:
    left = iter(parameters)
    while part := list(islice(left, AT_ONCE)):
        tx.run_all(statement, part)


_sid = bindparam("sid", type_=SESSION_ID)
_fork_id = bindparam("fork_id", type_=SESSION_ID)

_copy_turn = insert(turns).from_select(
    ["session_id", "turn", "parent_turn", "segment", "choice_index", "protocol", "tokens", "exchange"],
    select(
        _fork_id,
        bindparam("as_turn", type_=Integer),
        bindparam("as_parent", type_=Integer),
        bindparam("as_segment", type_=Integer),
        turns.c.choice_index,
        turns.c.protocol,
        turns.c.tokens,
        turns.c.exchange,
    ).where(turns.c.session_id == _sid, turns.c.turn == bindparam("old")),
)
_copy_blob = insert(blobs).from_select(
    ["session_id", "number", "kind", "size", "hash", "data"],
    select(
        _fork_id, bindparam("as_number", type_=Integer), blobs.c.kind, blobs.c.size, blobs.c.hash, blobs.c.data
    ).where(blobs.c.session_id == _sid, blobs.c.number == bindparam("old")),
)
_copy_chunk = insert(chunks).from_select(
    ["session_id", "fence", "number", "kind", "size", "hash", "data", "location"],
    select(
        _fork_id,
        bindparam("as_fence", type_=BigInteger),
        chunks.c.number,
        chunks.c.kind,
        chunks.c.size,
        chunks.c.hash,
        chunks.c.data,
        bindparam("as_object", type_=chunks.c.location.type),
    ).where(chunks.c.session_id == _sid, chunks.c.fence == bindparam("fenced"), chunks.c.number == bindparam("place")),
)
_columns = select(annotation_columns.c.seq).where(annotation_columns.c.session_id == _sid)
_copy_column = insert(annotation_columns).from_select(
    ["session_id", "turn", "name", "seq", "data"],
    select(
        _fork_id,
        bindparam("as_turn", type_=Integer),
        annotation_columns.c.name,
        bindparam("as_seq", type_=BigInteger),
        annotation_columns.c.data,
    ).where(annotation_columns.c.session_id == _sid, annotation_columns.c.seq == bindparam("old")),
)
_newest_tombstone = (
    select(events.c.seq)
    .where(events.c.session_id == _sid, events.c.type == BlobsTombstoned.__name__)
    .order_by(events.c.seq.desc())
    .limit(1)
)


class ForkSource(msgspec.Struct, frozen=True):
    """A session's whole log, and which of its content exists."""

    log: Sequence[EventRow]
    turns: frozenset[int]
    blobs: frozenset[int]
    chunks: frozenset[ChunkKey]
    columns: frozenset[int]

    def lacks(self, forked: Forked) -> str | None:
        """The content that a fork needs and the source does not have."""
        needed = (
            ("turns", set(forked.turns.values()) - self.turns),
            ("blobs", set(forked.blobs.values()) - self.blobs),
            ("chunks", set(forked.chunks.values()) - self.chunks),
            ("columns", set(forked.columns.values()) - self.columns),
        )
        return next((f"{name} {sorted(missing)[:5]} are missing" for name, missing in needed if missing), None)


def read_source(connection: Connection, session_id: str) -> ForkSource:
    """Read the log without content."""
    whole = select(turns.c.turn).where(turns.c.session_id == session_id, turns.c.exchange.is_not(None))
    kept = select(blobs.c.number).where(blobs.c.session_id == session_id, blobs.c.data.is_not(None))
    live = select(chunks.c.fence, chunks.c.number).where(
        chunks.c.session_id == session_id, chunks.c.tombstoned_by.is_(None)
    )
    return ForkSource(
        event_rows(connection, session_id),
        frozenset(connection.execute(whole).scalars()),
        frozenset(connection.execute(kept).scalars()),
        frozenset((row[0], row[1]) for row in connection.execute(live)),
        frozenset(connection.execute(_columns, {"sid": session_id}).scalars()),
    )
