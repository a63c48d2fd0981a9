"""The index on PostgreSQL: two tables in the database, which it makes itself. Dropping them makes it anew.

https://www.postgresql.org/docs/current/textsearch-controls.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, text

from app.errors import StoreUnavailable
from app.features.search.index import COLUMNS, TABLES, Message, Page, Wanted
from app.features.search.text import Query, words_of
from app.store.database import Database
from app.store.dialect import Tx
from app.store.incarnations import TakeLease, holds_lease
from app.store.writer import Writer

LEASE, LEASE_S = "search", 60.0

_MAKE = (
    "CREATE TABLE IF NOT EXISTS search_state (position text NOT NULL)",
    """CREATE TABLE IF NOT EXISTS search_messages (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, session_id varchar(128) NOT NULL, turn integer NOT NULL,
        message integer NOT NULL, at double precision NOT NULL, role text NOT NULL, tools text NOT NULL,
        finish_reason text, text text NOT NULL, live boolean NOT NULL DEFAULT true, words tsvector NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS search_messages_of_session ON search_messages (session_id)",
    "CREATE INDEX IF NOT EXISTS search_messages_words ON search_messages USING gin (words)",
    # Statistics would keep samples of the text after an erasure.
    "ALTER TABLE search_messages ALTER text SET STATISTICS 0, ALTER words SET STATISTICS 0",
)
_DROP = f"DROP TABLE IF EXISTS {', '.join(TABLES)}"

_WRITING = "SELECT pg_advisory_xact_lock_shared(8384003170513)"
_FORGETTING = "SELECT pg_advisory_xact_lock(8384003170513)"
"""An erasure, of which the store knows, waits for the page that is being written and finds its words; the next page
asks the store."""

_ADD = """INSERT INTO search_messages (session_id, turn, message, at, role, tools, finish_reason, text, words)
    SELECT session_id, turn, message, at, role, tools, finish_reason, text, to_tsvector('simple', parsed)
    FROM unnest(
        CAST(:session_id AS text[]), CAST(:turn AS integer[]), CAST(:message AS integer[]),
        CAST(:at AS double precision[]), CAST(:role AS text[]), CAST(:tools AS text[]),
        CAST(:finish_reason AS text[]), CAST(:text AS text[]), CAST(:parsed AS text[])
    ) WITH ORDINALITY AS given (session_id, turn, message, at, role, tools, finish_reason, text, parsed, place)
    WHERE session_id IN (SELECT session_id FROM sessions WHERE status <> 'erased')
    ORDER BY place"""
_SET_LIVE = "UPDATE search_messages SET live = turn = ANY(CAST(:turns AS integer[])) WHERE session_id = :sid"
_FORGET = "DELETE FROM search_messages WHERE session_id = :sid"


class PostgresIndex:
    """Every process has one; the one with the lease `search` writes it."""

    def __init__(
        self, database: Database, writer: Writer, incarnation: Callable[[], int], process_lease_s: float
    ) -> None:
        self._database = database
        self._writer = writer
        self._incarnation = incarnation
        self._process_lease_s = process_lease_s

    async def open(self) -> None:
        await self._write(_FORGETTING, *_MAKE)

    async def close(self) -> None: ...

    async def take_lease(self) -> int | None:
        return await self._writer.submit(TakeLease(LEASE, self._incarnation(), LEASE_S, self._process_lease_s))

    async def clear(self) -> None:
        await self._write(_FORGETTING, _DROP, *_MAKE)

    async def position(self) -> str | None:
        query = text("SELECT position FROM search_state")
        return await self._database.read(lambda connection: connection.execute(query).scalar())

    async def write(self, page: Page, fence: int) -> None:
        """Raises StoreUnavailable also where another process has the lease."""

        def write(tx: Tx) -> bool:
            if not holds_lease(tx, LEASE, fence):
                return False
            tx.one(text(_WRITING), {})
            if page.messages:
                columns = [msgspec.structs.asdict(message) for message in page.messages]
                given = {name: [row[name] for row in columns] for name in columns[0] if name != "id"}
                tx.one(text(_ADD), {**given, "parsed": [words_of(message.text) for message in page.messages]})
            for session_id, turns in page.live.items():
                tx.one(text(_SET_LIVE), {"turns": sorted(turns), "sid": session_id})
            for session_id in page.erased:
                tx.one(text(_FORGET), {"sid": session_id})
            tx.one(text("DELETE FROM search_state"), {})
            tx.one(text("INSERT INTO search_state (position) VALUES (:position)"), {"position": page.position})
            return True

        if not await self._database.write(write, durable=False):
            raise StoreUnavailable("another process fills the search index")

    async def forget(self, session_id: str) -> None:
        def forget(tx: Tx) -> None:
            tx.one(text(_FORGETTING), {})
            tx.one(text(_FORGET), {"sid": session_id})

        await self._database.write(forget, durable=True)

    async def find(self, wanted: Wanted) -> Sequence[Message]:
        conditions = ["live", "id < :before"]
        given: dict[str, Any] = {"before": wanted.before, "limit": wanted.limit}
        fields = {"role": wanted.role, "finish_reason": wanted.finish_reason}
        for name, value in fields.items():
            if value is not None:
                conditions.append(f"{name} = :{name}")
                given[name] = value
        if wanted.tool is not None:
            conditions.append("strpos(tools, :tool) > 0")
            given["tool"] = f"\n{wanted.tool}\n"
        if wanted.session_ids is not None:
            conditions.append("session_id = ANY(CAST(:sessions AS text[]))")
            given["sessions"] = list(wanted.session_ids)
        if wanted.query is not None:
            conditions.append(f"words @@ {_tsquery(wanted.query, given)}")
        query = f"SELECT {COLUMNS} FROM search_messages WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT :limit"

        def find(connection: Connection) -> list[Message]:
            # The general plan, which PostgreSQL makes after some executions, takes the wrong index for a rare word.
            connection.execute(text("SET LOCAL plan_cache_mode = force_custom_plan"))
            return [Message(*row) for row in connection.execute(text(query), given)]

        return await self._database.read(find)

    async def _write(self, *statements: str) -> None:
        def write(tx: Tx) -> None:
            for statement in statements:
                tx.one(text(statement), {})

        await self._database.write(write, durable=False)


def _tsquery(query: Query, given: dict[str, Any]) -> str:
    """As SQL; the terms become parameters."""

    def any_of(terms: Sequence[str]) -> str:
        names = [f"term{len(given) + place}" for place in range(len(terms))]
        given.update(zip(names, terms, strict=True))
        return "(" + " || ".join(f"phraseto_tsquery('simple', :{name})" for name in names) + ")"

    parts = [any_of(alternatives) for alternatives in query.needed]
    if query.excluded:
        parts.append(f"!! {any_of(query.excluded)}")
    return "(" + " && ".join(parts) + ")"
