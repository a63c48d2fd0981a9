"""What the database says of packs, and the operations that change it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import BigInteger, Connection, Integer, bindparam, delete, insert, or_, select, tuple_, update

from app.crash_points import reach
from app.domain.events import ChunkKey
from app.store.dialect import Tx
from app.store.log import StoreOperation
from app.store.packs.format import InPack, place_columns
from app.store.reads import FRAME, SPAN, frame_of
from app.store.schema import SESSION_ID, chunks, open_turns, pack_erasures, sessions, store_meta


class ChunkRow(NamedTuple):
    """A chunk in a pack."""

    session_id: str
    fence: int
    number: int
    place: InPack
    is_live: bool


class Moved(NamedTuple):
    """A chunk's new home: a place in a pack, or its frame in the database."""

    session_id: str
    fence: int
    number: int
    old: InPack | None
    new: InPack | bytes


_key = (chunks.c.session_id, chunks.c.fence, chunks.c.number)
_place = (chunks.c.location, chunks.c.pack_offset, chunks.c.pack_length)
_is_live = chunks.c.tombstoned_by.is_(None)


def rows_of(connection: Connection, packs: Collection[str]) -> dict[str, list[ChunkRow]]:
    """The chunks in each of these packs, tombstones too."""
    found: dict[str, list[ChunkRow]] = {pack: [] for pack in packs}
    names = sorted(packs)
    query = select(*_key, *_place, chunks.c.tombstoned_by)
    for at in range(0, len(names), SPAN):
        for row in connection.execute(query.where(chunks.c.location.in_(names[at : at + SPAN]))):
            found[row[3]].append(ChunkRow(row[0], row[1], row[2], InPack(*row[3:6]), row[6] is None))
    return found


def open_among(connection: Connection, turns: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of the turns (session, fence) that are open: they may yet commit."""
    wanted = sorted(turns)
    key = tuple_(open_turns.c.session_id, open_turns.c.fence)
    query = select(open_turns.c.session_id, open_turns.c.fence)
    parts = (query.where(key.in_(wanted[at : at + SPAN])) for at in range(0, len(wanted), SPAN))
    return {(row[0], row[1]) for part in parts for row in connection.execute(part)}


def places_of(connection: Connection, session_id: str, keys: Iterable[ChunkKey]) -> dict[ChunkKey, InPack]:
    """Where live chunks are in packs now."""
    wanted = sorted(keys)
    query = select(chunks.c.fence, chunks.c.number, *_place).where(
        chunks.c.session_id == session_id, _is_live, chunks.c.location.is_not(None)
    )
    key = tuple_(chunks.c.fence, chunks.c.number)
    parts = (query.where(key.in_(wanted[at : at + SPAN])) for at in range(0, len(wanted), SPAN))
    return {(row[0], row[1]): InPack(*row[2:]) for part in parts for row in connection.execute(part)}


def live_chunks(
    connection: Connection, session_id: str, keys: Iterable[ChunkKey]
) -> dict[ChunkKey, bytes | InPack | None]:
    """The frames of live chunks, or where they are in packs; None for a frame that is lost."""
    wanted = sorted(keys)
    query = select(chunks.c.fence, chunks.c.number, *FRAME).where(chunks.c.session_id == session_id, _is_live)
    key = tuple_(chunks.c.fence, chunks.c.number)
    parts = (query.where(key.in_(wanted[at : at + SPAN])) for at in range(0, len(wanted), SPAN))
    return {(row[0], row[1]): frame_of(*row[2:]) for part in parts for row in connection.execute(part)}


def erasures(connection: Connection) -> set[str]:
    """Erased sessions of which packs may still hold bytes."""
    return set(connection.execute(select(pack_erasures.c.session_id)).scalars())


def erased_among(connection: Connection, session_ids: Collection[str]) -> set[str]:
    """Those of the sessions that are erased."""
    wanted = sorted(session_ids)
    query = select(sessions.c.session_id).where(sessions.c.status == "erased")
    parts = (query.where(sessions.c.session_id.in_(wanted[at : at + SPAN])) for at in range(0, len(wanted), SPAN))
    return {session_id for part in parts for session_id in connection.execute(part).scalars()}


def is_being_erased(connection: Connection, root_id: str) -> bool:
    """May packs still hold bytes of this session or of its rollout?"""
    query = (
        select(pack_erasures.c.session_id)
        .join(sessions, sessions.c.session_id == pack_erasures.c.session_id)
        .where(or_(sessions.c.session_id == root_id, sessions.c.root_id == root_id))
    )
    return connection.execute(query.limit(1)).first() is not None


def place_name(connection: Connection) -> str | None:
    """The name of the store's place in object storage; None if it has none yet."""
    found: str | None = connection.execute(_place_name).scalar()
    return found


def places_in_use(connection: Connection) -> list[str]:
    """The URLs of object storage in which a round of the collector has last seen objects of this store."""
    return _decoded(connection.execute(_places_in_use).scalar())


def has_packs(connection: Connection) -> bool:
    """Does any chunk lie in a pack?"""
    return (
        connection.execute(select(chunks.c.location).where(chunks.c.location.is_not(None)).limit(1)).first() is not None
    )


def in_database(connection: Connection, after: tuple[str, int, int], limit: int) -> list[tuple[str, int, int, bytes]]:
    """Live chunks in the database behind a key, in the order of keys. Those of open turns are left out."""
    is_open = select(open_turns.c.fence).where(
        open_turns.c.session_id == chunks.c.session_id, open_turns.c.fence == chunks.c.fence
    )
    query = (
        select(*_key, chunks.c.data)
        .where(tuple_(*_key) > after, _is_live, chunks.c.data.is_not(None), ~is_open.exists())
        .order_by(*_key)
        .limit(limit)
    )
    return [tuple(row) for row in connection.execute(query)]


def in_packs(connection: Connection, after: tuple[str, int, int], limit: int) -> list[ChunkRow]:
    """As `in_database`, of those in packs."""
    query = (
        select(*_key, *_place)
        .where(tuple_(*_key) > after, _is_live, chunks.c.location.is_not(None))
        .order_by(*_key)
        .limit(limit)
    )
    return [ChunkRow(row[0], row[1], row[2], InPack(*row[3:6]), True) for row in connection.execute(query)]


class TakeKeeping(StoreOperation, frozen=True):
    """Make `token` the one whose holder may move chunks and delete packs, until the next one is written."""

    durable: ClassVar[bool] = False
    token: str

    def apply(self, tx: Tx) -> None:
        if not tx.run(_take, {"token": self.token}):
            tx.insert(insert(store_meta), [{"key": KEEPER, "value": self.token}])


class NamePlace(StoreOperation, frozen=True):
    """Give the store's place in object storage a name, unless it has one; returns it."""

    name: str

    def apply(self, tx: Tx) -> str:
        row = tx.one(_place_name, {})
        if row is not None:
            return str(row[0])
        tx.insert(insert(store_meta), [{"key": PLACE, "value": self.name}])
        return self.name


class NotePlace(StoreOperation, frozen=True):
    """Note whether the object storage at `url` has objects of this store, for a start without its settings."""

    url: str
    is_used: bool

    def apply(self, tx: Tx) -> None:
        row = tx.one(_locked_places, {})
        others = [one for one in _decoded(None if row is None else row[0]) if one != self.url]
        value = json.dumps(sorted([*others, self.url] if self.is_used else others))
        if row is None:
            tx.insert(insert(store_meta), [{"key": IN_USE, "value": value}])
        else:
            tx.run(_note_places, {"urls": value})


class MoveChunks(StoreOperation, frozen=True):
    """Change where live chunks are, if they are still where they were; returns how many. Durable, so that what they
    leave may be deleted.

    Another token than the current one moves nothing: the packs that it has made may have been collected by now.
    """

    token: str
    moved: Sequence[Moved]

    @property
    def size(self) -> int:
        return sum(256 if isinstance(one.new, InPack) else len(one.new) for one in self.moved)

    def apply(self, tx: Tx) -> int:
        if not holds_token(tx, self.token):
            return 0
        count = 0
        for one in sorted(self.moved):
            key = {"sid": one.session_id, "fenced": one.fence, "place": one.number}
            new = one.new if isinstance(one.new, InPack) else None
            content = {"frame": None if new else one.new, **{f"new_{k}": v for k, v in place_columns(new).items()}}
            if one.old is None:
                count += tx.run(_pack, {**key, **content})
            else:
                count += tx.run(_repack, {**key, **content, "old": one.old.pack, "at": one.old.offset})
        reach("in_move")
        return count


class ForgetPacks(StoreOperation, frozen=True):
    """Tombstones no longer name these packs. Returns those that may be deleted now: none with another token than the
    current one, and none that a live chunk refers to.

    Durable: a tombstone that a crash of PostgreSQL could undo must be on disk before its bytes go.
    """

    token: str
    packs: Sequence[str]

    def apply(self, tx: Tx) -> list[str]:
        if not holds_token(tx, self.token):
            return []
        unused = [pack for pack in self.packs if tx.one(_is_used, {"old": pack}) is None]
        for pack in unused:
            tx.run(_forget, {"old": pack})
        return unused


class EndErasures(StoreOperation, frozen=True):
    """No pack holds bytes of these sessions any more. Nothing is ended with another token than the current one: of the
    round that found this, not all was done."""

    token: str
    session_ids: Sequence[str]

    def apply(self, tx: Tx) -> None:
        if not holds_token(tx, self.token):
            return
        for session_id in self.session_ids:
            tx.run(_end_erasure, {"sid": session_id})


def note_erasure(tx: Tx, session_id: str) -> None:
    """Note that the collector must take an erased session out of the packs; in the transaction of the erasure."""
    tx.run(_end_erasure, {"sid": session_id})
    tx.insert(insert(pack_erasures), [{"session_id": session_id}])


KEEPER, PLACE, IN_USE = "pack_keeper", "pack_place", "pack_places_in_use"

_is_keeper = store_meta.c.key == KEEPER
_place_name = select(store_meta.c.value).where(store_meta.c.key == PLACE)
_places_in_use = select(store_meta.c.value).where(store_meta.c.key == IN_USE)
_locked_places = _places_in_use.with_for_update()
_note_places = (
    update(store_meta).where(store_meta.c.key == IN_USE).values(value=bindparam("urls", type_=store_meta.c.value.type))
)
_take = update(store_meta).where(_is_keeper).values(value=bindparam("token", type_=store_meta.c.value.type))
_keeper = select(store_meta.c.value).where(_is_keeper).with_for_update(read=True)


def _decoded(value: str | None) -> list[str]:
    return [] if value is None else [str(one) for one in json.loads(value)]


def holds_token(tx: Tx, token: str) -> bool:
    """Is this the current token? It cannot change before the transaction ends."""
    row = tx.one(_keeper, {})
    return row is not None and row[0] == token


_of_key = (
    chunks.c.session_id == bindparam("sid", type_=SESSION_ID),
    chunks.c.fence == bindparam("fenced", type_=BigInteger),
    chunks.c.number == bindparam("place", type_=Integer),
    _is_live,
)
_new: dict[str, Any] = {
    "data": bindparam("frame", type_=chunks.c.data.type),
    "location": bindparam("new_location", type_=chunks.c.location.type),
    "pack_offset": bindparam("new_pack_offset", type_=BigInteger),
    "pack_length": bindparam("new_pack_length", type_=BigInteger),
}
_of_pack = chunks.c.location == bindparam("old", type_=chunks.c.location.type)
_pack = update(chunks).where(*_of_key, chunks.c.location.is_(None)).values(**_new)
_repack = (
    update(chunks).where(*_of_key, _of_pack, chunks.c.pack_offset == bindparam("at", type_=BigInteger)).values(**_new)
)
_is_used = select(chunks.c.number).where(_of_pack, _is_live).limit(1)
_forget = update(chunks).where(_of_pack).values(location=None, pack_offset=None, pack_length=None)
_end_erasure = delete(pack_erasures).where(pack_erasures.c.session_id == bindparam("sid", type_=SESSION_ID))
