"""Writes the search index: pages of the log, and the removal of a session's entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from sqlalchemy import Connection, Integer, Text, bindparam, delete, func, insert, select, update

from app.domain import notes
from app.domain.search_text import words_of
from app.store import pins
from app.store import statements as sql
from app.store.dialect import Tx, erase_sessions, keep_sessions, now
from app.store.log import BaseOperation, StoreOperation
from app.store.schema import search_entries, search_metadata, search_shards, search_state
from app.store.search import words

INDEX_VERSION = "2"
"""Changes with what is indexed, and how; another index is made anew."""

SHARD_ENTRIES, SHARD_BYTES = 20_000, 16 << 20
"""A shard that has so many entries, or so many characters, gets no more."""

MERGED_PAGES = 100
"""Pages that one step of a merge writes; it takes some ten milliseconds."""

SUPERSEDED, SET_ASIDE = "superseded", "set aside"


class Entry(msgspec.Struct, frozen=True):
    """A message of a turn, at its place in the history. `reason`: why it is in no row."""

    message: int | None
    role: str
    tools: tuple[str, ...]
    finish_reason: str | None
    reason: str | None
    text: str


class TurnEntries(msgspec.Struct, frozen=True):
    """What is indexed of a turn that was committed or rejected `at` that time, or a piece of it; `is_end`: the last."""

    session_id: str
    turn: int
    at: float
    entries: Sequence[Entry]
    is_end: bool = True


class Marks(msgspec.Struct, frozen=True):
    """Why turns of a session are in no row any more; None: they are again."""

    session_id: str
    reasons: Mapping[int, str | None]


class Metadata(msgspec.Struct, frozen=True):
    session_id: str
    pairs: Sequence[str]


Change = TurnEntries | Marks | Metadata

_of_key = search_state.c.key == bindparam("of")
_state = select(search_state.c.value).where(_of_key)
_set_state = update(search_state).where(_of_key).values(value=bindparam("to", type_=Text))
_move = _set_state.where(search_state.c.value == bindparam("expected", type_=Text)).returning(search_state.c.key)
_add_state = insert(search_state)
_drop_state = delete(search_state).where(_of_key)
_newest_of = (
    select(search_entries.c.message)
    .where(sql.of_session(search_entries), search_entries.c.turn == bindparam("number", type_=Integer))
    .order_by(search_entries.c.id.desc())
    .limit(1)
)
_add = insert(search_entries)
_newest = select(func.coalesce(func.max(search_entries.c.id), 0))
_mark = (
    update(search_entries)
    .where(sql.of_session(search_entries), search_entries.c.turn == bindparam("number", type_=Integer))
    .values(reason=bindparam("why", type_=Text))
)
_pairs_of = delete(search_metadata).where(sql.of_session(search_metadata))
_add_pair = insert(search_metadata)
_newest_shard = (
    select(search_shards.c.id, search_shards.c.entries, search_shards.c.size)
    .order_by(search_shards.c.id.desc())
    .limit(1)
)
_add_shard = insert(search_shards)
_grow = (
    update(search_shards)
    .where(search_shards.c.id == bindparam("shard_id"))
    .values(entries=search_shards.c.entries + bindparam("more"), size=search_shards.c.size + bindparam("longer"))
)
_set_dirty = (
    update(search_shards).where(search_shards.c.id == bindparam("shard_id")).values(dirty=bindparam("is_dirty"))
)
_some_of = (
    select(search_entries.c.id, search_entries.c.shard)
    .where(sql.of_session(search_entries))
    .order_by(search_entries.c.id)
    .limit(bindparam("most", type_=Integer))
)
_some = select(search_entries.c.id).order_by(search_entries.c.id).limit(bindparam("most", type_=Integer))
_some_pairs = delete(search_metadata)
_drop = delete(search_entries).where(search_entries.c.id == bindparam("entry"))
_shards = select(search_shards.c.id)
_drop_shard = delete(search_shards).where(search_shards.c.id == bindparam("shard_id"))
_now = select(now())
_keep_sessions = select(keep_sessions())
_erase_sessions = select(erase_sessions())

EVERY = 1 << 30


class Begin(StoreOperation, frozen=True):
    """Make an empty index one that begins at `position`."""

    durable: ClassVar[bool] = False
    position: str

    def apply(self, tx: Tx) -> None:
        for key, value in (("position", self.position), ("version", INDEX_VERSION)):
            tx.run(_drop_state, {"of": key})
            tx.insert(_add_state, [{"key": key, "value": value}])


class Forget(StoreOperation, frozen=True):
    """The index must be made anew; whoever fills it sees that."""

    durable: ClassVar[bool] = False

    def apply(self, tx: Tx) -> None:
        tx.run(_drop_state, {"of": "position"})


class Clear(StoreOperation, frozen=True):
    """Delete up to `most` entries, of the oldest, and on SQLite one shard; True while there may be more. The index has
    no position meanwhile."""

    durable: ClassVar[bool] = False
    most: int

    def apply(self, tx: Tx) -> bool:
        tx.run(_drop_state, {"of": "position"})
        tx.run(_drop_state, {"of": "version"})
        shard = None if tx.is_remote else tx.one(_newest_shard, {})
        if shard is not None:
            tx.run(words.drop_shard(shard[0]), {})
            tx.run(_drop_shard, {"shard_id": shard[0]})
            tx.run(_drop_state, {"of": _merging(shard[0])})
        found = tx.all(_some, {"most": self.most})
        tx.run_all(_drop, [{"entry": row[0]} for row in found])
        if len(found) < self.most:
            tx.run(_some_pairs, {})
        return shard is not None or len(found) == self.most


class TakeIndexing(StoreOperation, frozen=True):
    """May this process fill the index for the next `lease_s` seconds? Only one at a time may."""

    durable: ClassVar[bool] = False
    owner: str
    lease_s: float

    def apply(self, tx: Tx) -> bool:
        at = (tx.one(_now, {}) or (0.0,))[0]
        value = f"{self.owner}={at + self.lease_s}"
        row = tx.one(_state, {"of": "owner"})
        if row is None:
            tx.insert(_add_state, [{"key": "owner", "value": value}])
            return True
        owner, _, until = row[0].partition("=")
        if owner != self.owner and float(until) > at:
            return False
        return tx.one(_move, {"of": "owner", "expected": row[0], "to": value}) is not None


class IndexPage(StoreOperation, frozen=True):
    """Write the changes of a page of the log, and that the index has come to `position`. False, and nothing is written,
    if it is no longer at `expected`.

    What is in the index is left as it is, and nothing is written of an erased session: it may have been erased after
    its content was read. No session's row is locked, so no turn waits; an erasure waits for the page, or the page
    for the erasure.
    """

    durable: ClassVar[bool] = False
    expected: str
    position: str
    changes: Sequence[Change]

    @property
    def size(self) -> int:
        turns = (change for change in self.changes if isinstance(change, TurnEntries))
        return 512 + sum(256 + len(entry.text) for turn in turns for entry in turn.entries)

    def apply(self, tx: Tx) -> bool:
        if tx.one(_move, {"of": "position", "expected": self.expected, "to": self.position}) is None:
            return False
        tx.one(_keep_sessions, {})
        live = _live(tx, sorted({one.session_id for one in self.changes}))
        changes = [change for change in self.changes if change.session_id in live]
        _add_turns(tx, [change for change in changes if isinstance(change, TurnEntries)])
        marks = [change for change in changes if isinstance(change, Marks)]
        tx.run_all(_mark, [_marked(one.session_id, *of) for one in marks for of in one.reasons.items()])
        _set_pairs(tx, [change for change in changes if isinstance(change, Metadata)])
        return True


def _live(tx: Tx, session_ids: Sequence[str]) -> set[str]:
    if tx.is_remote:
        return {row[0] for row in tx.all(words.live_on_postgresql, {"sids": session_ids})} if session_ids else set()
    heads = ((session_id, tx.one(sql.head, {"sid": session_id})) for session_id in session_ids)
    return {session_id for session_id, head in heads if head is not None and head[1] != "erased"}


def _marked(session_id: str, turn: int, why: str | None) -> dict[str, Any]:
    return {"sid": session_id, "number": turn, "why": why}


def _set_pairs(tx: Tx, every: Sequence[Metadata]) -> None:
    tx.run_all(_pairs_of, [{"sid": one.session_id} for one in every])
    tx.insert(_add_pair, [{"pair": pair, "session_id": one.session_id} for one in every for pair in one.pairs])


def _add_turns(tx: Tx, turns: Sequence[TurnEntries]) -> None:
    """Add the messages that are not in the index, in order. On PostgreSQL that takes two statements."""
    known = _known_of(tx, turns)
    rows: list[dict[str, Any]] = [
        {
            "session_id": turn.session_id,
            "turn": turn.turn,
            "message": entry.message,
            "role": entry.role,
            "tools": notes.joined(entry.tools),
            "finish_reason": entry.finish_reason,
            "reason": entry.reason,
            "at": turn.at,
            "text": entry.text,
        }
        for turn in turns
        for entry in turn.entries
        if not _is_known(known, turn, entry)
    ]
    if not rows:
        return
    if tx.is_remote:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["parsed"] = [words_of(row["text"]) for row in rows]
        columns["fields"] = [
            words.lexemes(row["role"], notes.parted(row["tools"]), row["finish_reason"]) for row in rows
        ]
        tx.run(words.add_on_postgresql, columns)
        return
    shard, newest = _shard_for(tx), (tx.one(_newest, {}) or (0,))[0]
    tx.insert(_add, [{"id": number, "shard": shard, **row} for number, row in enumerate(rows, newest + 1)])
    tx.run(words.add_words(shard), {"newest": newest})
    tx.run(_grow, {"shard_id": shard, "more": len(rows), "longer": sum(len(row["text"]) for row in rows)})


Known = Mapping[tuple[str, int], int | None]
"""The last message of each turn that is in the index, or None of a refused reply; messages are written in order."""


def _known_of(tx: Tx, turns: Sequence[TurnEntries]) -> Known:
    numbers = sorted({(turn.session_id, turn.turn) for turn in turns})
    if tx.is_remote:
        keys = {"sids": [session_id for session_id, _ in numbers], "numbers": [turn for _, turn in numbers]}
        return {(row[0], row[1]): row[2] for row in tx.all(words.known_on_postgresql, keys)} if numbers else {}
    found = ((one, tx.one(_newest_of, {"sid": one[0], "number": one[1]})) for one in numbers)
    return {one: row[0] for one, row in found if row is not None}


def _is_known(known: Known, turn: TurnEntries, entry: Entry) -> bool:
    if (turn.session_id, turn.turn) not in known:
        return False
    last = known[turn.session_id, turn.turn]
    return entry.message is None or (last is not None and entry.message <= last)


def _shard_for(tx: Tx) -> int:
    """The newest shard, or a new one if that has enough."""
    row = tx.one(_newest_shard, {})
    if row is not None and row[1] < SHARD_ENTRIES and row[2] < SHARD_BYTES:
        return int(row[0])
    shard = 1 if row is None else int(row[0]) + 1
    tx.run(words.make_shard(shard), {})
    tx.insert(_add_shard, [{"id": shard, "entries": 0, "size": 0, "dirty": False}])
    return shard


class DropEntries(BaseOperation, frozen=True):
    """Delete up to `most` entries of a session that is closed or set aside; True while there may be more.
    `unless_pinned` as in `Erase`."""

    durable: ClassVar[bool] = False
    session_id: str
    most: int
    unless_pinned: bool = False

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] == "open" or (self.unless_pinned and pins.pinned_upto(tx, self.session_id)):
            return False
        return drop_entries(tx, self.session_id, self.most) == self.most


def erase_entries(tx: Tx, session_id: str) -> None:
    """Delete a session's entries in the transaction that erases it, so that none can come between."""
    tx.one(_erase_sessions, {})
    drop_entries(tx, session_id)


def drop_entries(tx: Tx, session_id: str, most: int = EVERY) -> int:
    """Delete entries of a session; returns how many. Words stay in SQLite's file until `MergeShard` has ended.

    An index that is being cleared has no shard of its newest entries any more.
    """
    found = tx.all(_some_of, {"sid": session_id, "most": most})
    if found and not tx.is_remote:
        shards = {row[0] for row in tx.all(_shards, {})} & {row[1] for row in found}
        for entry, shard in found:
            if shard in shards:
                tx.run(words.drop_words(shard), {"entry": entry})
        for shard in shards:
            tx.run(_set_dirty, {"shard_id": shard, "is_dirty": True})
            tx.run(_drop_state, {"of": _merging(shard)})
    tx.run_all(_drop, [{"entry": row[0]} for row in found])
    if len(found) < most:
        tx.run(_pairs_of, {"sid": session_id})
    return len(found)


class MergeShard(StoreOperation, frozen=True):
    """A step that takes deleted words out of a shard; True while there is more to do.

    A merge has only what was deleted before it began. If an erasure has deleted more meanwhile, it begins anew.
    """

    durable: ClassVar[bool] = False
    shard: int

    @property
    def size(self) -> int:
        return MERGED_PAGES * 4096

    def apply(self, tx: Tx) -> bool:
        if self.shard not in {row[0] for row in tx.all(_shards, {})}:
            return False  # dropped meanwhile
        begins = tx.one(_state, {"of": _merging(self.shard)}) is None
        if begins:
            tx.insert(_add_state, [{"key": _merging(self.shard), "value": ""}])
        before = (tx.one(words.total_changes, {}) or (0,))[0]
        tx.run(words.merge(self.shard), {"pages": -MERGED_PAGES if begins else MERGED_PAGES})
        after = (tx.one(words.total_changes, {}) or (0,))[0]
        if after - before >= 2:
            return True
        tx.run(_drop_state, {"of": _merging(self.shard)})
        tx.run(_set_dirty, {"shard_id": self.shard, "is_dirty": False})
        return False


def _merging(shard: int) -> str:
    """The key in `search_state` while a merge of the shard has all that is deleted."""
    return f"merging={shard}"


def dirty_shards(connection: Connection) -> list[int]:
    query = select(search_shards.c.id).where(search_shards.c.dirty.is_(True)).order_by(search_shards.c.id)
    return list(connection.execute(query).scalars())


def has_entries(connection: Connection, session_id: str) -> bool:
    query = select(search_entries.c.id).where(search_entries.c.session_id == session_id).limit(1)
    return connection.execute(query).first() is not None


class IndexState(msgspec.Struct, frozen=True):
    """`position`: None while the index is being cleared or was never begun. `version`: of its structure."""

    position: str | None
    version: str | None


def state(connection: Connection) -> IndexState:
    found = {row.key: row.value for row in connection.execute(select(search_state))}
    return IndexState(found.get("position"), found.get("version"))


def entry_count(connection: Connection) -> int:
    counted: int = connection.execute(select(func.count()).select_from(search_entries)).scalar_one()
    return counted
