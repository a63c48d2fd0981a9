"""What is stored stays, to the byte, whatever leaves and comes back; and nothing stays of what was erased."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from app.composition import metadata
from app.domain.events import AnnotationWritten, Event, RewardAssigned, decode
from app.features.archive.rows import CONTENT
from app.features.archive.schema import archived
from app.store import feed
from app.store.feed import START
from app.store.schema import annotation_columns, chunks, events, refused_replies, sessions
from tests.tools.simulation.history import History
from tests.tools.simulation.world import World
from workers import codec
from workers.codec import CorruptContent

Key = tuple[Any, ...]

_COLUMNS = {
    table: [*table.primary_key.columns, *(column for column in columns if not column.primary_key)]
    for table, columns in CONTENT.items()
    if table is not refused_replies
}

SAID = re.compile(r'of-([\w.]+?)-\d|"content":"([\w.-]+)"')
"""What tells whose a text is: what a keeper says of a session, and what a client says in one."""


class Kept:
    """Rows as they were when somebody looked. None of them may change or be missing, but of erased sessions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows: dict[Key, Key] = {}
        self._end = START

    def look(self) -> None:
        """Remember what is there, unless a crash of the database could undo it."""
        if self._world.weather.is_bad and self._world.store.unsynced:
            return
        now, end = self._world.store.read(lambda connection: (_stored(connection), feed.end(connection)))
        self._rows = {**now, **self._rows}
        self._world.must(end >= self._end, f"the log ended at {self._end}, and later at {end}")
        self._end = end

    def judge(self) -> None:
        for problem in self._world.store.read(lambda connection: list(self._problems(connection))):
            self._world.history.problem(problem)

    def _problems(self, connection: Connection) -> Iterator[str]:
        status: Mapping[str, str] = dict(connection.execute(select(sessions.c.session_id, sessions.c.status)).all())
        now = _stored(connection)
        for key, row in self._rows.items():
            name, session_id = key[:2]
            is_now = now.get(key)
            if is_now == row or status.get(session_id) == "erased":
                continue
            if name == events.name and status.get(session_id) == "closed" and _is_being_erased(is_now):
                continue
            if name in (annotation_columns.name, chunks.name) and (is_now is None or is_now[-1] != row[-1] is not None):
                continue  # replaced, or freed: the store's own check knows which may be
            if name == chunks.name and is_now is not None and is_now[:-2] == row[:-2] and row[-2:] == (None, None):
                continue  # Its bytes were in object storage, and were freed, or came back from a file: verify looks.
            yield f"{session_id}: the row {key[2:]} of {name} is {'gone' if is_now is None else 'another'}"


def _stored(connection: Connection) -> dict[Key, Key]:
    found: dict[Key, Key] = {}
    for table, columns in _COLUMNS.items():
        keys = len(table.primary_key.columns)
        for row in connection.execute(select(*columns)):
            found[(table.name, *row[:keys])] = tuple(row[keys:])
    return found


def _is_being_erased(row: Key | None) -> bool:
    """A reward or an annotation whose text an erasure has taken, which has not come to its end."""
    if row is None:
        return False
    kind, version, _, data = row
    return lacks_text(decode(kind, version, data))


def lacks_text(event: Event) -> bool:
    """Has an erasure taken a reward's or an annotation's text out of the log?"""
    match event:
        case AnnotationWritten(erased=True) | RewardAssigned(components_erased=True):
            return True
    return False


def traces(connection: Connection, files: Mapping[str, bytes], history: History) -> Iterator[str]:
    """Where something is left of what was said of or in an erased session."""
    status = dict(connection.execute(select(sessions.c.session_id, sessions.c.status)).all())
    gone = {session_id for session_id, is_now in status.items() if is_now == "erased"}
    gone |= set(connection.execute(select(archived.c.session_id).where(archived.c.state == "erased")).scalars())
    if not gone:
        return
    owners = {turn.logical: turn.session_id for turn in history.turns}
    for place, session_id, row in _everything(connection, files):
        if session_id in gone and place.endswith(".parquet"):
            yield f"{session_id} was erased, and the file {place} has it"
        for text in _texts(row):
            for of, said in SAID.findall(text):
                owner = of or owners.get(said)
                if owner in gone and (session_id is None or session_id in gone):
                    yield f"{owner} was erased, and {place} has what was said there: {of or said}"


def _everything(connection: Connection, files: Mapping[str, bytes]) -> Iterator[tuple[str, str | None, Iterable[Any]]]:
    """Rows of tables and files, and whose they are. Forks have what was said where they come from."""
    for table in metadata().sorted_tables:
        if table.name != chunks.name:
            for row in connection.execute(select(table)).mappings():
                yield table.name, row.get("session_id"), row.values()
    for name, body in files.items():
        for record in pq.read_table(io.BytesIO(body)).to_pylist():
            yield name, record["session_id"], record.values()


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        match value:
            case str():
                yield value
            case bytes():
                try:
                    yield codec.decompress(value).decode(errors="replace")
                except CorruptContent:
                    yield value.decode(errors="replace")
            case dict():
                yield from _texts(value.values())
            case list():
                yield from _texts(value)
