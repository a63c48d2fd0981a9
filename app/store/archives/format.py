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


def object_of(archive: str) -> str:
    """The name of the object that holds an archive's sessions."""
    return f"archive/sessions/{archive}.parquet"


def samples_of(archive: str) -> str:
    """The name of the object that holds the training rows of an archive's sessions, as `/export` gives them."""
    return f"archive/samples/{archive}.parquet"
