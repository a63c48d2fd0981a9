"""What a fork must be: its source's turns up to one of them, to the byte, and what was said of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, select

from app.domain.events import Recorded, TurnCommitted
from app.domain.session import Session, fold
from app.store.schema import annotation_columns, blobs, chunks, turns
from app.store.sessions import load_events

ANEW: dict[str, Any] = {
    **dict.fromkeys(("turn", "parent", "fence", "segment", "params"), 0),
    **dict.fromkeys(("tools", "echo", "images", "new_blobs", "retry_key", "body_hash", "payloads"), ()),
    **dict.fromkeys(("branch", "branch_cause", "segment_cause", "carries")),
}
"""Fields that a fork numbers or derives anew."""


class Stored(NamedTuple):
    """A session's log and content, by their numbers and keys."""

    log: list[Recorded]
    session: Session
    turns: dict[int, Any]
    blobs: dict[int, Any]
    chunks: dict[tuple[int, int], Any]
    columns: dict[int, bytes]

    def commit(self, number: int) -> TurnCommitted:
        event = self.log[self.session.turn(number).seq - 1].event
        assert isinstance(event, TurnCommitted)
        return event

    def said(self, line: list[int]) -> dict[tuple[int, str], Any]:
        """What is said of these turns, by the place in them and the name."""
        found: dict[tuple[int, str], Any] = {}
        for place, number in enumerate(line, 1):
            for name, one in self.session.annotations.get(number, {}).items():
                event = self.log[one.seq - 1].event
                found[place, name] = msgspec.structs.replace(event, turn=place), self.columns.get(one.seq)
        return found


def stored(connection: Connection, session_id: str) -> Stored | None:
    log = list(load_events(connection, session_id))
    session = fold(session_id, log)
    if session is None:
        return None

    def rows(table: Any, *columns: Any) -> Any:
        return connection.execute(select(*columns).where(table.c.session_id == session_id))

    return Stored(
        log,
        session,
        {
            row[0]: tuple(row[1:])
            for row in rows(
                turns, turns.c.turn, turns.c.protocol, turns.c.choice_index, turns.c.tokens, turns.c.exchange
            )
        },
        {row[0]: tuple(row[1:]) for row in rows(blobs, blobs.c.number, blobs.c.kind, blobs.c.hash, blobs.c.data)},
        {
            (row[0], row[1]): tuple(row[2:])
            for row in rows(chunks, chunks.c.fence, chunks.c.number, chunks.c.hash, chunks.c.data)
        },
        {row[0]: row[1] for row in rows(annotation_columns, annotation_columns.c.seq, annotation_columns.c.data)},
    )


def differences(source: Stored, after: Stored | None, fork: Stored, turn: int) -> Iterator[str]:
    """`source` and `after` are the source before the fork was asked for and when it was there (None: it had left)."""
    line = source.session.line(turn)
    for place, number in enumerate(line, 1):
        if place not in fork.session.turns:
            yield f"turn {place} is not there"
            return
        mine, theirs = fork.commit(place), source.commit(number)
        if msgspec.structs.replace(mine, **ANEW) != msgspec.structs.replace(theirs, **ANEW):
            yield f"turn {place} is not turn {number}"
        if fork.turns[place] != source.turns[number]:
            yield f"the content of turn {place} is not that of turn {number}"
        pairs = [(mine.params, theirs.params), (mine.tools, theirs.tools), (mine.echo, theirs.echo)]
        for own, of in (*pairs, *zip(mine.images, theirs.images, strict=True)):
            if own is not None and of is not None and fork.blobs[own] != source.blobs[of]:
                yield f"blob {own} is not blob {of}"
        yield from _payloads(source, fork, place, mine, theirs)
    if after is None or after.session.status == "erased":
        return
    has_payloads = turn in source.session.payloads and turn in after.session.payloads
    if has_payloads and len(line) not in fork.session.payloads:
        yield f"the payloads of turn {len(line)} are not there"
    said = source.said(line)
    if said == after.said(line) and said != (is_said := fork.said(list(range(1, len(line) + 1)))):
        yield f"of its turns is said {is_said}, not {said}"


def _payloads(source: Stored, fork: Stored, place: int, mine: TurnCommitted, theirs: TurnCommitted) -> Iterator[str]:
    needed = {chunk.key for payload in fork.session.payloads.get(place, ()) for chunk in payload.chunks}
    for own, of in zip(mine.payloads, theirs.payloads, strict=True):
        for copy, chunk in zip(own.chunks, of.chunks, strict=True):
            if copy.key in needed and fork.chunks.get(copy.key) != source.chunks.get(chunk.key):
                yield f"chunk {copy.key} of turn {place} is not chunk {chunk.key}"
