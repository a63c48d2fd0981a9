"""Values of sessions' metadata, as columns of the page's list."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from app.sessions.metadata import MISSING, value_of
from app.sessions.session_list import SessionList, SessionQuery
from app.store.content import metadata_of
from app.store.engine import Database
from turnlog.replies import SessionPage

MAX_COLUMNS = 6

MAX_VALUE = 200
"""Characters of one value; a longer one is cut."""


class ListedSessions(SessionPage):
    """A page of the list. `metadata`: for each session that has any of the columns, its values as text, by column."""

    metadata: Mapping[str, Mapping[str, str]]


class MetadataColumns:
    def __init__(self, database: Database, sessions: SessionList) -> None:
        self._database = database
        self._sessions = sessions

    async def page(self, query: SessionQuery, cursor: str | None, limit: int, columns: str | None) -> ListedSessions:
        """A page of the list with the metadata named by `columns`, a comma between two.

        A column is a key, with dots into objects. Raises InvalidRequest for an invalid cursor, StoreUnavailable.
        """
        found = await self._sessions.page(query, cursor, limit)
        ids = [row["session_id"] for row in found["sessions"]]
        return {**found, "metadata": await self._values(ids, columns)}

    async def _values(self, ids: Sequence[str], columns: str | None) -> dict[str, dict[str, str]]:
        """By session, its values."""
        keys = [key.strip() for key in (columns or "").split(",") if key.strip()][:MAX_COLUMNS]
        if not keys:
            return {}
        stored = await self._database.read(lambda c: metadata_of(c, ids))
        return await asyncio.to_thread(
            lambda: {session_id: values for session_id, raw in stored.items() if (values := _values_of(raw, keys))}
        )


def _values_of(raw: bytes, keys: Sequence[str]) -> dict[str, str]:
    metadata = msgspec.json.decode(raw)
    return {key: text for key in keys if (text := _text_of(metadata, key)) is not None}


def _text_of(metadata: object, key: str) -> str | None:
    value = value_of(metadata, key)
    if value is None or value is MISSING:
        return None
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
