"""Writes and reads annotations; the operation that writes one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Text, bindparam, delete, insert, select, update

from app.crash_points import reach
from app.domain import notes
from app.domain.columns import Column, unpack
from app.domain.decide import labelled
from app.domain.events import AnnotationWritten, UnknownEvent
from app.domain.session import Annotation, Session
from app.errors import NotFound, SessionUnreadable
from app.features.annotations import rules
from app.sessions.cache import SessionCache
from app.sessions.lifecycle import Sessions, refusal
from app.store import pins
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import Appended, BaseOperation, Refused, append, refused
from app.store.log_sessions import IN_HEAD
from app.store.ports import Database
from app.store.schema import annotation_columns, events, sessions
from app.store.sessions import EventRow, decode_events
from workers import codec
from workers.codec import CorruptContent

TRIES = 10
"""Attempts to read an annotation that is replaced meanwhile."""


class Said(NamedTuple):
    """An annotation with its content: a JSON value or a column."""

    annotation: Annotation
    content: Any | Column


class Annotations:
    """`clock` gives seconds since the epoch. Each method raises SessionNotFound, SessionClosed (erased), Restored, and
    NotFound where the session has no such turn; `turn` None stands for the session."""

    def __init__(self, database: Database, cache: SessionCache, sessions: Sessions, clock: Callable[[], float]) -> None:
        self._database = database
        self._cache = cache
        self._sessions = sessions
        self._clock = clock

    async def write(self, session_id: str, turn: int | None, name: str, given: Any | Column, writer: str | None) -> int:
        """Write a value or a column, in the place of what is there. The number of the event, which is on disk.

        Raises InvalidRequest.
        """
        session = await self._session(session_id)
        frame = None
        if isinstance(given, Column):
            frame = await asyncio.to_thread(codec.pack, given)
            event = rules.of_column(session, session_id, turn, name, given, given.ref(frame))
        else:
            event = rules.of_value(session, session_id, turn, name, given)
        return await self._submit(session_id, msgspec.structs.replace(event, writer=writer), frame)

    async def remove(self, session_id: str, turn: int | None, name: str, writer: str | None) -> None:
        """Remove an annotation, if there is one."""
        event = rules.removal(await self._session(session_id), session_id, turn, name)
        if event is not None:
            await self._submit(session_id, msgspec.structs.replace(event, writer=writer))

    async def read(self, session_id: str, turn: int | None, name: str) -> Said:
        """Raises NotFound, SessionUnreadable."""
        for _ in range(TRIES):
            annotation = (await self.listed(session_id, turn)).get(turn or 0, {}).get(name)
            if annotation is None:
                of = "the session" if turn is None else f"turn {turn}"
                raise NotFound(f"{of} has no annotation {name}")
            content = await self._content(session_id, turn or 0, name, annotation)
            if content is not None:  # else it was replaced meanwhile
                return Said(annotation, content)
        raise SessionUnreadable(f"session {session_id}: the content of annotation {name} is missing")

    async def listed(self, session_id: str, turn: int | None) -> dict[int, dict[str, Annotation]]:
        """All annotations of the session and its turns, or those of one turn: by turn (0: the session's) and name."""
        session = labelled(await self._session(session_id), session_id)
        if turn is None:
            return session.annotations
        if turn not in session.turns:
            raise NotFound(f"turn {turn} is not committed in session {session_id}")
        return {turn: session.annotations.get(turn, {})}

    async def _session(self, session_id: str) -> Session | None:
        live = await self._cache.current(session_id)
        return None if live is None else live.session

    async def _submit(self, session_id: str, event: AnnotationWritten, frame: bytes | None = None) -> int:
        outcome = await self._sessions.apply(WriteAnnotation(session_id, self._clock(), event, frame))
        reach("after_annotation")
        if not isinstance(outcome, Appended):
            raise refusal(session_id, outcome.status)
        return outcome.events[-1].seq

    async def _content(self, session_id: str, turn: int, name: str, annotation: Annotation) -> Any | Column | None:
        """None if the content is no longer there. Raises SessionUnreadable."""
        seq, column = annotation.seq, annotation.column
        try:
            if column is None:
                return await self._database.read(
                    partial(read_value, session_id=session_id, name=name, seq=seq), session_id=session_id
                )
            frame = await self._database.read(
                partial(read_column, session_id=session_id, turn=turn, name=name, seq=seq), session_id=session_id
            )
            return None if frame is None else await asyncio.to_thread(unpack, frame, column)
        except CorruptContent as error:
            raise SessionUnreadable(f"session {session_id}: annotation {name}: {error}") from error


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
_names = select(sessions.c.annotated).where(sql.of_session(sessions))
_set_names = update(sessions).where(sql.of_session(sessions)).values(annotated=bindparam("names", type_=Text))


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
        if event.turn is None:
            there = {*notes.parted((tx.one(_names, {"sid": self.session_id}) or (None,))[0])}
            names = there - {event.name} if event.value is None else there | {event.name}
            if names != there:
                tx.run(_set_names, {"sid": self.session_id, "names": notes.joined(sorted(names))})
        if event.turn is None and event.name in _in_head:
            said = notes.joined(event.value or ()) if event.name == "tags" else event.value
            tx.run(_in_head[event.name], {"sid": self.session_id, "said": said})
        appended = append(tx, self.session_id, seq, self.at, [event])
        reach("in_annotation")
        return appended


def read_value(connection: Connection, session_id: str, name: str, seq: int) -> Any:
    """The JSON value that event `seq` has written; None if it was erased. Raises UnknownEvent, which names it."""
    columns = (events.c[column] for column in EventRow._fields)
    query = select(*columns).where(events.c.session_id == session_id, events.c.seq == seq)
    try:
        decoded = decode_events(EventRow(*row) for row in connection.execute(query))
    except UnknownEvent as error:
        raise UnknownEvent(f"annotation {name}: {error}") from error
    event = decoded[0].event if decoded else None
    return event.value if isinstance(event, AnnotationWritten) else None


def read_column(connection: Connection, session_id: str, turn: int, name: str, seq: int) -> bytes | None:
    """The frame of a column that event `seq` has written; None if it was replaced or erased since."""
    key = zip(annotation_columns.primary_key.columns, (session_id, turn, name, seq), strict=True)
    query = select(annotation_columns.c.data).where(*(column == value for column, value in key))
    return connection.execute(query).scalar()
