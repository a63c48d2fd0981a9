"""What an erasure removes from the log: the components of rewards, names and values, and the values and writers of
annotations.

Only they can hold a client's text in an event. The rows keep their places in both orders, so that readers find no gap;
each event says that something is missing. They go in steps, because there may be megabytes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from sqlalchemy import Connection, bindparam, or_, select, update

from app.domain.events import AnnotationWritten, Event, RewardAssigned, UnknownEvent, decode, encode
from app.store import pins
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import BaseOperation
from app.store.schema import events

WITH_TEXT = (RewardAssigned.__name__, AnnotationWritten.__name__)
"""The types of event that are rewritten."""

IN_HEAD = ("note", "tags")
"""The session's annotations that are columns of its row, too."""

UNREADABLE = b""
"""Replaces an event that is damaged or of a newer release, since nobody can say which parts may stay. It still counts
as unreadable."""

_texts = (
    select(events.c.seq, events.c.type, events.c.version, events.c.data)
    .where(
        events.c.session_id == bindparam("sid"),
        events.c.seq > bindparam("after"),
        or_(*(events.c.type == name for name in WITH_TEXT)),
    )
    .order_by(events.c.seq)
)
_some_texts = _texts.limit(bindparam("most"))
_rewrite = (
    update(events)
    .where(events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place"))
    .values(version=RewardAssigned.VERSION, data=bindparam("left"))
)
assert RewardAssigned.VERSION == AnnotationWritten.VERSION


class TextRow(NamedTuple):
    """A stored reward or annotation, not yet decoded."""

    seq: int
    type: str
    version: int
    data: bytes


class Rewritten(NamedTuple):
    """The new content of event `seq`. `is_in_head`: the session's row shows what it said, and changes with it."""

    seq: int
    data: bytes
    is_in_head: bool = False


def text_rows(connection: Connection, session_id: str, after: int, most: int) -> list[TextRow]:
    """Up to `most` of a session's rewards and annotations after event `after`, in order."""
    rows = connection.execute(_some_texts, {"sid": session_id, "after": after, "most": most})
    return [TextRow(*row) for row in rows]


def without_text(rows: Iterable[TextRow]) -> list[Rewritten]:
    """The events that hold a client's text, without it."""
    rewritten: list[Rewritten] = []
    for row in rows:
        try:
            event = decode(row.type, row.version, row.data)
        except UnknownEvent:
            if row.data != UNREADABLE:
                rewritten.append(Rewritten(row.seq, UNREADABLE))
            continue
        match event:
            case RewardAssigned() if has_text(event):
                left: Event = msgspec.structs.replace(event, components={}, components_erased=True)
                rewritten.append(Rewritten(row.seq, encode(left)))
            case AnnotationWritten() if has_text(event):
                left = msgspec.structs.replace(event, value=None, writer=None, erased=True)
                rewritten.append(Rewritten(row.seq, encode(left), event.turn is None and event.name in IN_HEAD))
    return rewritten


class EraseTexts(BaseOperation, frozen=True):
    """Rewrite events of a session that is being erased. `freed` is their size in bytes. `unless_pinned`: nothing is
    written if a checkpoint has the session."""

    durable: ClassVar[bool] = False
    session_id: str
    rewritten: Sequence[Rewritten]
    freed: int
    unless_pinned: bool = False

    @property
    def size(self) -> int:
        return self.freed

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if self.unless_pinned and pins.pinned_upto(tx, self.session_id):
            return False
        if head is None or head[1] == "open":
            return False
        rewrite(tx, self.session_id, self.rewritten)
        return True


def erase_remaining(tx: Tx, session_id: str, after: int) -> None:
    """Remove what events after event `after` hold of a client's text, in the transaction that erases the session, so
    that none can come between. They are few."""
    rows = tx.all(_texts, {"sid": session_id, "after": after})
    rewrite(tx, session_id, without_text(TextRow(*row) for row in rows))


def has_text(event: Event) -> bool:
    """Does the event hold what an erasure removes?"""
    match event:
        case RewardAssigned():
            return bool(event.components)
        case AnnotationWritten():
            return event.value is not None or event.writer is not None
        case _:
            return False


def rewrite(tx: Tx, session_id: str, rewritten: Sequence[Rewritten]) -> None:
    tx.run_all(_rewrite, [{"sid": session_id, "place": text.seq, "left": text.data} for text in rewritten])
