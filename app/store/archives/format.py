"""What an archive holds of a session, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.store.schema import blobs, chunks, events, refused_replies, turns

TABLES = (events, turns, blobs, chunks, refused_replies)
"""The tables whose rows move into an archive. The head stays, and so does what spans sessions."""


class Place(NamedTuple):
    """Where an archived session is: the archive's name, and the row group of its file."""

    archive: str
    row_group: int


ArchivedRows = Mapping[str, Sequence[Mapping[str, Any]]]
"""A session's rows by table, each with all columns but `session_id`. No chunk is in a pack."""


class ArchivedSession(NamedTuple):
    """A session as an archive has it: its head's columns, and its rows by table."""

    head: Mapping[str, Any]
    rows: ArchivedRows

    @property
    def session_id(self) -> str:
        return str(self.head["session_id"])

    @property
    def size(self) -> int:
        """Bytes of its content."""
        return sum(len(value) for of in self.rows.values() for row in of for value in row.values() if _is_bytes(value))


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes)


_FOLDERS = ("archive/sessions/", "archive/samples/")


def archive_of(name: str) -> str | None:
    """The archive that an object belongs to; None if it is another kind of object."""
    for folder in _FOLDERS:
        if name.startswith(folder):
            return name.removeprefix(folder).removesuffix(".parquet")
    return None


def object_of(archive: str) -> str:
    """The name of the object that holds an archive's sessions."""
    return f"{_FOLDERS[0]}{archive}.parquet"


def samples_of(archive: str) -> str:
    """The name of the object that holds the training rows of an archive's sessions, as `/export` gives them."""
    return f"{_FOLDERS[1]}{archive}.parquet"
