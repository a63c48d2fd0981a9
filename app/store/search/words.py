"""The words and fields of the index: SQLite's FTS5 and PostgreSQL's text search behind the same functions.

A message's role, tools and finish reason are in the full-text index beside its words, so that a rare value is found
without reading the messages, also together with words. What the index finds for a field may be more than what has it:
the caller compares the field itself.

SQLite has a full-text table for each some thousand messages, a shard. An erasure must take a session's words out of the
file at once, and FTS5 keeps deleted words until it merges what it has written: merging a shard costs a known time,
however large the store is. A search goes through the shards from the newest on.

https://www.sqlite.org/fts5.html#external_content_tables
https://www.postgresql.org/docs/current/textsearch-controls.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    FromClause,
    TextClause,
    cast,
    column,
    func,
    literal,
    literal_column,
    select,
    table,
    text,
)
from sqlalchemy.dialects.postgresql import REGCONFIG, TSQUERY

from app.domain.search_query import Query
from app.domain.search_text import words_of

WORDS = "words"
WORDS_INDEX = "ix_search_entries_words"
"""PostgreSQL's column with the words of an entry, and its index."""

FIELDS = ("role", "tools", "finish_reason")
_COLUMNS = ", ".join(("text", *FIELDS))

MAX_FIELD = 256
"""Characters of a field's value that PostgreSQL's index has; a longer one is not in it."""

_PLAIN = re.compile(r"[\x00-\x7f]*[A-Za-z0-9][\x00-\x7f]*")
"""A value whose words FTS5 and `words_of` take apart in the same way."""

_BETWEEN = "\x1f"

_SIMPLE = literal_column("'simple'::regconfig", REGCONFIG())

_FULL_TEXT = re.compile(r"search_fts_\d+(_(data|idx|docsize|config|content))?")


def is_full_text(name: str) -> bool:
    """Is this a table that FTS5 made?"""
    return _FULL_TEXT.fullmatch(name) is not None


def name_of(shard: int) -> str:
    return f"search_fts_{shard}"


@lru_cache(512)
def make_shard(shard: int) -> TextClause:
    return text(
        f"CREATE VIRTUAL TABLE IF NOT EXISTS {name_of(shard)} USING fts5({_COLUMNS}, content='search_entries', "
        "content_rowid='id', tokenize='unicode61 remove_diacritics 0')"
    )


@lru_cache(512)
def drop_shard(shard: int) -> TextClause:
    return text(f"DROP TABLE IF EXISTS {name_of(shard)}")


@lru_cache(512)
def add_words(shard: int) -> TextClause:
    """Of the entries with a larger id than `newest`."""
    return text(
        f"INSERT INTO {name_of(shard)} (rowid, {_COLUMNS}) SELECT id, {_COLUMNS} FROM search_entries WHERE id > :newest"
    )


@lru_cache(512)
def drop_words(shard: int) -> TextClause:
    """Of the entry `entry`, whose row must still be there."""
    return text(f"DELETE FROM {name_of(shard)} WHERE rowid = :entry")


@lru_cache(512)
def merge(shard: int) -> TextClause:
    """Merge about `pages` pages; negative at the beginning. https://www.sqlite.org/fts5.html#the_merge_command"""
    name = name_of(shard)
    return text(f"INSERT INTO {name} ({name}, rank) VALUES ('merge', :pages)")


total_changes = text("SELECT total_changes()")

add_on_postgresql = text(
    """INSERT INTO search_entries
    (shard, session_id, turn, message, role, tools, finish_reason, reason, at, text, words)
    SELECT 0, session_id, turn, message, role, tools, finish_reason, reason, at, text,
        to_tsvector('simple'::regconfig, parsed) || array_to_tsvector(string_to_array(fields, E'\\x1f'))
    FROM unnest(
        CAST(:session_id AS text[]), CAST(:turn AS integer[]), CAST(:message AS integer[]), CAST(:role AS text[]),
        CAST(:tools AS text[]), CAST(:finish_reason AS text[]), CAST(:reason AS text[]),
        CAST(:at AS double precision[]), CAST(:text AS text[]), CAST(:parsed AS text[]),
        CAST(:fields AS text[])
    ) WITH ORDINALITY AS given
        (session_id, turn, message, role, tools, finish_reason, reason, at, text, parsed, fields, place)
    ORDER BY place"""
)
"""Parameters are lists of equal length, one for each column; `parsed` has the texts as words, `fields` is of
`lexemes`."""


def lexemes(role: str, tools: Sequence[str], finish_reason: str | None) -> str:
    """A message's fields as PostgreSQL's index has them."""
    values = [("role", role), *(("tools", tool) for tool in tools), ("finish_reason", finish_reason or "")]
    return _BETWEEN.join(_lexeme(*one) for one in values if 0 < len(one[1]) <= MAX_FIELD)


def _lexeme(field: str, value: str) -> str:
    """No word of a text is like it: those have no equals sign."""
    return f"{field}={value.replace(_BETWEEN, ' ')}"


known_on_postgresql = text(
    """SELECT entry.session_id, entry.turn, max(entry.message)
    FROM unnest(CAST(:sids AS text[]), CAST(:numbers AS integer[])) AS given (session_id, turn)
    JOIN search_entries AS entry ON entry.session_id = given.session_id AND entry.turn = given.turn
    GROUP BY entry.session_id, entry.turn"""
)
"""The last message in the index of each turn that is in it, of those with these sessions and numbers."""

plan_each = text("SET LOCAL plan_cache_mode = force_custom_plan")
"""PostgreSQL's general plan, which it makes after some executions, takes the wrong index for a rare word."""

live_on_postgresql = text(
    "SELECT session_id FROM sessions WHERE session_id = ANY(CAST(:sids AS text[])) AND status <> 'erased'"
)


def full_text_of(shard: int) -> FromClause:
    """A shard, with its rowid."""
    return table(name_of(shard), column("rowid"))


class Wanted(msgspec.Struct, frozen=True):
    """Words, and values by field."""

    query: Query | None
    fields: Mapping[str, str]

    @property
    def in_fts5(self) -> str | None:
        """In FTS5's language; None if FTS5 can tell nothing. Quotes hold a term: it has letters, digits and spaces."""
        parts = [] if self.query is None else [_fts5(self.query)]
        for field, value in self.fields.items():
            if _PLAIN.fullmatch(value):
                parts.append(f'({{{field}}} : "{words_of(value)}")')
        return " AND ".join(parts) or None

    @property
    def in_postgresql(self) -> ColumnElement[bool] | None:
        """Condition on entries; None if the index can tell nothing."""
        parts = [] if self.query is None else [_tsquery(self.query)]
        for field, value in self.fields.items():
            if len(value) <= MAX_FIELD:
                quoted = _lexeme(field, value).replace("\\", "\\\\").replace("'", "''")
                parts.append(cast(f"'{quoted}'", TSQUERY))
        if not parts:
            return None
        whole = reduce(lambda left, right: func.tsquery_and(left, right), parts)
        # A subquery is run once; else PostgreSQL would make the query anew for each row that it compares.
        once = select(whole).scalar_subquery()
        return literal_column(f"search_entries.{WORDS}").op("@@", is_comparison=True)(once)


def matches_in(shard: int, wanted: str) -> ColumnElement[bool]:
    """Condition on a shard's rows."""
    return literal_column(name_of(shard)).op("MATCH", is_comparison=True)(literal(wanted))


def _fts5(query: Query) -> str:
    needed = (" OR ".join(f'"{term}"' for term in alternatives) for alternatives in query.needed)
    whole = " AND ".join(f"({part})" for part in needed)
    excluded = " OR ".join(f'"{term}"' for term in query.excluded)
    return f"({{text}} : ({f'({whole}) NOT ({excluded})' if excluded else whole}))"


def _tsquery(query: Query) -> ColumnElement[Any]:
    parts = [_any(alternatives) for alternatives in query.needed]
    if query.excluded:
        parts.append(func.tsquery_not(_any(query.excluded)))
    return reduce(lambda left, right: func.tsquery_and(left, right), parts)


def _any(terms: Sequence[str]) -> ColumnElement[Any]:
    found = [func.phraseto_tsquery(_SIMPLE, term) for term in terms]
    return reduce(lambda left, right: func.tsquery_or(left, right), found)
