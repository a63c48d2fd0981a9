"""The operation that writes an annotation, and the reads of one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Text, bindparam, delete, insert, select, update

from app.crash_points import reach
from app.domain import notes
from app.domain.events import AnnotationWritten
from app.store import pins
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.erasure import IN_HEAD
from app.store.log import Appended, BaseOperation, Refused, append, refused
from app.store.schema import annotation_columns, events, sessions
from app.store.sessions import EventRow, decode_events

_insert = insert(annotation_columns)
_of_name = (
    sql.of_session(annotation_columns),
    annotation_columns.c.turn == bindparam("of_turn"),
    annotation_columns.c.name == bindparam("named", type_=Text),
)
_earlier = select(annotation_columns.c.seq).where(*_of_name)
_drop_earlier = delete(annotation_columns).where(*_of_name, annotation_columns.c.seq > bindparam("pinned"))
_in_head = {
    name: update(sessions).where(sql.of_session(sessions)).values({name: bindparam("said", type_=Text)})
    for name in IN_HEAD
}
"""The session's annotations that stand in its row too, where lists find them."""


class WriteAnnotation(BaseOperation, frozen=True):
    """Write an annotation of an open or closed session, or of one of its turns. `frame` is a column's content.

    What it replaces is deleted, but for what a checkpoint has.
    """

    session_id: str
    at: float
    event: AnnotationWritten
    frame: bytes | None = None

    @property
    def size(self) -> int:
        return 512 + (self.event.size if self.frame is None else len(self.frame))

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(sql.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        event, seq = self.event, row[0]
        place = {"sid": self.session_id, "of_turn": event.turn or 0, "named": event.name}
        if tx.all(_earlier, place):
            tx.run(_drop_earlier, {**place, "pinned": pins.pinned_upto(tx, self.session_id)})
        if self.frame is not None:
            new = {"turn": event.turn, "name": event.name, "seq": seq, "data": self.frame}
            tx.insert(_insert, [{"session_id": self.session_id, **new}])
        if event.turn is None and event.name in _in_head:
            said = notes.joined(event.value or ()) if event.name == "tags" else event.value
            tx.run(_in_head[event.name], {"sid": self.session_id, "said": said})
        appended = append(tx, self.session_id, seq, self.at, [event])
        reach("in_annotation")
        return appended


def read_value(connection: Connection, session_id: str, seq: int) -> Any:
    """The JSON value that event `seq` has written; None if it was erased. Raises UnknownEvent."""
    columns = (events.c[name] for name in EventRow._fields)
    query = select(*columns).where(events.c.session_id == session_id, events.c.seq == seq)
    decoded = decode_events(EventRow(*row) for row in connection.execute(query))
    event = decoded[0].event if decoded else None
    return event.value if isinstance(event, AnnotationWritten) else None


def read_column(connection: Connection, session_id: str, turn: int, name: str, seq: int) -> bytes | None:
    """The frame of a column that event `seq` has written; None if it was replaced or erased since."""
    key = zip(annotation_columns.primary_key.columns, (session_id, turn, name, seq), strict=True)
    query = select(annotation_columns.c.data).where(*(column == value for column, value in key))
    return connection.execute(query).scalar()
