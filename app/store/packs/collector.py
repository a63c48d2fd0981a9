"""Collects packs: deletes those that nothing refers to, and copies out of those that are mostly dead.

A round lists the bucket and compares it with the rows. What is unused is known without clocks: a pack's index names
the turns that brought its frames, and a turn whose open row is gone can refer to the pack no more than it does already.

    no live chunk                        deleted after `keep_s`, so that URLs and backups from before still find it
    frames that no row knows             a turn that came to nothing, or an erased session: copied without them
    more than half of it is dead         copied without that
    frames of a session that is erased   as above, and deleted at once, also if they came after the erasure
    not whole, or without a sound index  deleted at once, or after `keep_s`, unless a live chunk is in it

Only the holder of a token that each round takes anew changes anything (`rows.TakeKeeping`): a process that was frozen
in the middle of a round finds that its token is another's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from app.crash_points import reach
from app.errors import AppError
from app.store import incarnations
from app.store.packs.format import Entry, InPack, Packed, distinct_bytes, frame_bytes, read_index
from app.store.packs.rows import (
    ChunkRow,
    EndErasures,
    ForgetPacks,
    MoveChunks,
    Moved,
    NamePlace,
    NotePlace,
    TakeKeeping,
    erased_among,
    erasures,
    open_among,
    place_name,
    places_in_use,
    rows_of,
)
from app.store.packs.writer import PACK_BYTES, PackWriter
from app.store.ports import Database, Writer
from app.tasks import cancelled
from workers import codec
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.store.packs.bucket import Listed

log = logging.getLogger("turnlog.packs")

EVERY_S = 30.0
"""Pause between two rounds; an erasure does not wait for it."""

MOVED_AT_ONCE = 500
"""Chunks moved in one transaction."""


class Collected(msgspec.Struct):
    """What the collector has done since the process began."""

    deleted: int = 0
    rewritten: int = 0
    moved: int = 0


class _Candidate(msgspec.Struct):
    """A pack that may be changed, with its rows, and the erased sessions that it has frames of."""

    name: str
    index: list[Entry]
    rows: list[ChunkRow]
    erased: set[str]

    @property
    def live(self) -> list[ChunkRow]:
        return [row for row in self.rows if row.is_live]


class Collector:
    """Runs as one task from `start` to `stop`. `clock` gives seconds; a pack without live chunks is kept for `keep_s`
    of them. `incarnation` is this process's number in the store."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        packs: PackWriter,
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
        clock: Callable[[], float],
        *,
        keep_s: float,
    ) -> None:
        self.collected = Collected()
        self._database = database
        self._writer = writer
        self._bucket = packs.bucket
        self._packs = packs
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._clock = clock
        self._keep_s = keep_s
        self._dead_since: dict[str, float] = {}
        self._examined: set[str] = set()  # dead packs without bytes of erased sessions
        self._told_of: str | None = None
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-packs")

    async def stop(self) -> None:
        await cancelled(self._task)

    def hurry(self) -> None:
        """A session is being erased: begin a round now."""
        self._due.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            try:
                if await self.is_first():
                    await self.round()
            except AppError as error:
                log.warning("a round over the packs was cut short: %s", error)
            except Exception:
                log.exception("an unexpected fault in a round over the packs")

    async def is_first(self) -> bool:
        """Only one process should collect: the living one with the lowest number. Two would only repeat work."""
        first = await self._database.read(partial(incarnations.first_alive, lease_s=self._lease_s()))
        return first is None or first >= self._incarnation()

    async def round(self) -> None:
        """One round. Raises PayloadsUnavailable, StoreUnavailable, StoreFull."""
        async with self._packs.keeping:
            if not await self._owns_place():
                return
            token = await self._take_token()
            pending = await self._database.read(erasures)
            holding: set[str] = set()
            seen: set[str] = set()
            async for page in self._bucket.pages():
                packs = [one for one in page if frame_bytes(one.name) is not None]
                seen.update(one.name for one in packs)
                holding |= await self._page(token, packs, pending)
            self._dead_since = {name: since for name, since in self._dead_since.items() if name in seen}
            self._examined &= seen
            if done := sorted(pending - holding):
                await self._writer.submit(EndErasures(token, done))
            await self._note_place(is_used=bool(seen))

    async def _note_place(self, *, is_used: bool) -> None:
        """Note in the store where its objects are, so that a start without this place's settings can warn of them."""
        if is_used != (self._bucket.url in await self._database.read(places_in_use)):
            await self._writer.submit(NotePlace(self._bucket.url, is_used))

    async def _owns_place(self) -> bool:
        """Do the packs here belong to this store? A copy of a database must not delete what its original needs."""
        own = await self._name()
        owner = await self._bucket.owned_by(own)
        if owner != own and owner != self._told_of:
            log.warning(
                "%s belongs to another store, or to this one before a restore: nothing is collected there, and "
                "erasures wait; if no other store uses it: turnlog payloads adopt",
                self._bucket.url,
            )
            self._told_of = owner
        return owner == own

    async def adopt(self) -> None:
        """Make this store the owner of the bucket's place."""
        await self._bucket.own(await self._name())

    async def _name(self) -> str:
        """The name that the store has for its place. A restore takes it away."""
        known = await self._database.read(place_name)
        return await self._writer.submit(NamePlace(secrets.token_hex(8))) if known is None else known

    async def _take_token(self) -> str:
        token = f"{self._incarnation()}-{secrets.token_hex(8)}"
        await self._writer.submit(TakeKeeping(token))
        return token

    async def _page(self, token: str, page: Sequence[Listed], pending: set[str]) -> set[str]:
        """Collect the packs of one page of the listing; the sessions of `pending` of which one of them may still hold
        bytes."""
        rows = await self._database.read(partial(rows_of, packs=[one.name for one in page]))
        holding: set[str] = set()
        unused: list[_Candidate] = []
        partly: list[_Candidate] = []
        for one in page:
            if not _is_due(one.name, rows[one.name]):
                continue
            is_old = not _has_live(rows[one.name]) and self._is_kept_long_enough(one.name)
            if not (_has_live(rows[one.name]) or is_old or self._may_have_erased(one.name, rows[one.name], pending)):
                continue
            found = await self._candidate(one)
            if found is None:
                if not _has_live(rows[one.name]) and (is_old or _is_cut_short(one)):
                    unused.append(_Candidate(one.name, [], [], pending))
                elif _has_unknown(one.name, rows[one.name]):
                    holding |= pending
            elif await self._database.read(partial(open_among, turns={entry.turn for entry in found.index})):
                holding |= found.erased
            else:
                # Read again: the last turns may have been committed since the first look.
                found.rows = (await self._database.read(partial(rows_of, packs=[one.name])))[one.name]
                if _has_live(found.rows):
                    partly.append(found)
                elif found.erased or is_old:
                    unused.append(found)
                else:
                    self._examined.add(one.name)
        deleted = await self._delete(token, [one.name for one in unused])
        holding |= {session_id for one in unused if one.name not in deleted for session_id in one.erased}
        for group in _groups(partly):
            holding |= await self._rewrite(token, group)
        return holding

    def _may_have_erased(self, name: str, rows: Sequence[ChunkRow], pending: set[str]) -> bool:
        """May the pack have bytes of erased sessions? They have no rows."""
        return _has_unknown(name, rows) and (bool(pending) or name not in self._examined)

    async def _candidate(self, one: Listed) -> _Candidate | None:
        """The pack with its index; None if that cannot be read."""
        if _is_cut_short(one):
            log.error("pack %s is %d bytes long: it was not written whole", one.name, one.size)
            return None
        frames = _frame_bytes(one.name)
        raw = await self._bucket.read(one.name, frames, one.size - frames)
        if raw is None:
            return None
        try:
            index = read_index(raw)
        except CorruptContent as error:
            log.error("pack %s: %s", one.name, error)
            return None
        named = {entry.session_id for entry in index}
        return _Candidate(one.name, index, [], await self._database.read(partial(erased_among, session_ids=named)))

    def _is_kept_long_enough(self, name: str) -> bool:
        return self._clock() - self._dead_since.setdefault(name, self._clock()) >= self._keep_s

    async def _delete(self, token: str, names: Sequence[str]) -> Sequence[str]:
        """Delete those of the packs that nothing refers to; which these are."""
        if not names:
            return names
        free = await self._writer.submit(ForgetPacks(token, names))
        reach("after_forgotten")
        await self._bucket.delete(free)
        reach("after_pack_deleted")
        self.collected.deleted += len(free)
        return free

    async def _rewrite(self, token: str, group: Sequence[_Candidate]) -> set[str]:
        """Copy the live chunks of packs into a new one; the erased sessions whose bytes could not be taken out."""
        moving: list[tuple[ChunkRow, bytes]] = []
        for one in group:
            frames = await self._frames(one)
            if frames is not None:
                moving += [(row, frames[row.place]) for row in one.live]
        if moving:
            await self.repack(token, moving)
            self.collected.rewritten += len(group)
        deleted = await self._delete(token, [one.name for one in group if one.erased])
        return {session_id for one in group if one.name not in deleted for session_id in one.erased}

    async def repack(self, token: str, moving: Sequence[tuple[ChunkRow, bytes]]) -> int:
        """Put frames into new packs and let their chunks refer to them; how many did."""
        packed = [Packed(row.session_id, row.fence, row.number, frame) for row, frame in moving]
        places = await self._packs.put(packed)
        reach("after_repacked")
        count = 0
        moved = [
            Moved(row.session_id, row.fence, row.number, row.place, place)
            for (row, _), place in zip(moving, places, strict=True)
        ]
        for at in range(0, len(moved), MOVED_AT_ONCE):
            count += await self._writer.submit(MoveChunks(token, moved[at : at + MOVED_AT_ONCE]))
        self.collected.moved += count
        return count

    async def _frames(self, one: _Candidate) -> dict[InPack, bytes] | None:
        """The live frames of a pack, checked; None if one is lost: the pack then stays as it is.

        If it has bytes of an erased session, a damaged frame is copied with the others.
        """
        places = sorted({row.place for row in one.live}, key=lambda place: place.offset)
        parts = await self._bucket.read_parts(one.name, [(place.offset, place.length) for place in places])
        try:
            if parts is None:
                raise CorruptContent("it is gone")
            await asyncio.to_thread(_check, parts)
        except CorruptContent as error:
            log.error("pack %s is damaged: %s", one.name, error)
            if parts is None or not one.erased:
                return None
        return dict(zip(places, parts, strict=True))


def _is_due(name: str, rows: Sequence[ChunkRow]) -> bool:
    """Is anything in the pack dead or unknown?"""
    live = distinct_bytes(row.place for row in rows if row.is_live)
    return _has_unknown(name, rows) or live < (_frame_bytes(name) + 1) // 2


def _has_unknown(name: str, rows: Sequence[ChunkRow]) -> bool:
    """Has the pack frames of which there is no row?"""
    return distinct_bytes(row.place for row in rows) < _frame_bytes(name)


def _is_cut_short(one: Listed) -> bool:
    """Is the object not whole? A crash in the middle of an upload into a folder may leave it. No turn refers to it."""
    return one.size <= _frame_bytes(one.name)


def _frame_bytes(name: str) -> int:
    found = frame_bytes(name)
    assert found is not None, f"{name} is no pack"
    return found


def _has_live(rows: Iterable[ChunkRow]) -> bool:
    return any(row.is_live for row in rows)


def _groups(packs: Iterable[_Candidate]) -> list[list[_Candidate]]:
    """Packs whose live chunks together make one new pack."""
    groups: list[list[_Candidate]] = []
    size = PACK_BYTES
    for one in packs:
        own = distinct_bytes(row.place for row in one.live)
        if size + own > PACK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += own
    return groups


def _check(frames: Iterable[bytes]) -> None:
    """Raises CorruptContent for a frame that was changed."""
    for frame in frames:
        codec.decompress(frame)
