"""Keeps the archives in object storage in line with the database: deletes and rewrites them.

    no session is in it any more        deleted after `keep_s`, or at once if it holds an erased session
    it holds an erased session          copied without it, and deleted at once
    its writer died                     no session refers to it: as the first
    it is being written                 left alone; no erasure ends meanwhile

An archive has its row before its sessions are read, so that an erasure which it has missed waits for it. If a living
writer is taken for a dead one, the row goes first, and the writer finds that no session may refer to it
(`rows.Archive`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from app.crash_points import reach
from app.store import reads
from app.store.archives import rows
from app.store.archives.format import ArchivedSession, Place, object_of, samples_of
from app.store.archives.rows import AddArchive, ForgetArchive, Listed, MoveArchived
from app.store.packs.rows import erased_among
from app.store.ports import Database, Writer
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

log = logging.getLogger("turnlog.archives")


async def new_archive(database: Database, writer: Writer, by: int | None = None) -> tuple[int, str]:
    """Name a new archive; its id and its name. `by` as in `AddArchive`."""
    epoch = await database.read(reads.epoch)
    name = f"{epoch}-{secrets.token_hex(6)}"
    return await writer.submit(AddArchive(name, by)), name


class ArchiveKeeper:
    """Used by the collector of packs, which holds the token. `clock` gives seconds."""

    def __init__(
        self, database: Database, writer: Writer, bucket: Bucket, clock: Callable[[], float], *, keep_s: float
    ) -> None:
        self._database = database
        self._writer = writer
        self._bucket = bucket
        self._clock = clock
        self._keep_s = keep_s
        self._unused_since: dict[str, float] = {}
        self._members: dict[str, frozenset[str]] = {}

    async def round(self, token: str, stored: Collection[str], pending: set[str]) -> set[str]:
        """Look at all archives; `stored` are those that have objects. Returns the sessions of `pending`, which are
        erased, of which one may still hold bytes. Raises PayloadsUnavailable, StoreUnavailable, StoreFull."""
        known = {one.name: one for one in await self._database.read(rows.listed)}
        holding: set[str] = set()
        for name in sorted({*stored, *known}):
            holding |= await self._look_at(token, name, known.get(name), pending)
        self._unused_since = {name: since for name, since in self._unused_since.items() if name in {*stored, *known}}
        self._members = {name: ids for name, ids in self._members.items() if name in stored}
        return holding

    async def _look_at(self, token: str, name: str, known: Listed | None, pending: set[str]) -> set[str]:
        if known is not None and known.is_being_written:
            return pending
        is_used = known is not None and known.sessions > 0
        try:
            erased = await self._erased_in(name, pending, is_used=is_used)
        except CorruptContent as error:
            log.error("archive %s: %s", name, error)
            if is_used:
                return pending
            erased = pending
        if known is not None and is_used:
            self._unused_since.pop(name, None)
            if not erased:
                return set()
            if not await self._rewritten(token, known, erased):
                return erased
        elif not (erased or self._clock() - self._unused_since.setdefault(name, self._clock()) >= self._keep_s):
            return set()
        return set() if await self._deleted(token, name) else erased

    async def _erased_in(self, name: str, pending: set[str], *, is_used: bool) -> set[str]:
        """The erased sessions that the archive holds, or may hold once its writer, who was frozen, has uploaded it.
        Raises CorruptContent."""
        if is_used and not pending:
            return set()
        members = await self._sessions_in(name)
        if members is None:
            return set() if is_used else pending
        return await self._database.read(partial(erased_among, session_ids=members))

    async def _sessions_in(self, name: str) -> frozenset[str] | None:
        """All sessions that the archive holds; None if it has no objects. Raises CorruptContent."""
        from app.store.archives.parquet import session_ids
        from app.store.archives.reader import ObjectGone, read_object

        if name in self._members:
            return self._members[name]
        for one in (object_of(name), samples_of(name)):
            try:
                found = self._members[name] = frozenset(await read_object(self._bucket, one, session_ids))
            except ObjectGone:
                continue
            return found
        return None

    async def _deleted(self, token: str, name: str) -> bool:
        if not await self._writer.submit(ForgetArchive(token, name)):
            return False
        reach("after_archive_forgotten")
        await self._bucket.delete([samples_of(name), object_of(name)])
        return True

    async def _rewritten(self, token: str, old: Listed, erased: set[str]) -> bool:
        """Copy the sessions that are in this archive and nowhere else into a new one."""
        from app.store.archives.parquet import encode, rows_without
        from app.store.archives.reader import read_group, read_object

        live = await self._database.read(partial(rows.sessions_of, archive=old.name))
        groups: list[list[ArchivedSession]] = []
        try:
            for row_group in sorted(set(live.values())):
                found = await read_group(self._bucket, Place(old.name, row_group))
                groups.append([one for session_id, one in found.items() if session_id in live])
            body = encode(groups)
            gone = (await self._sessions_in(old.name) or frozenset()) - live.keys()
            samples = await read_object(self._bucket, samples_of(old.name), partial(rows_without, session_ids=gone))
        except CorruptContent as error:
            log.error("archive %s cannot be rewritten: %s", old.name, error)
            return False
        new_id, name = await new_archive(self._database, self._writer)
        await self._bucket.put(object_of(name), body)
        await self._bucket.put(samples_of(name), samples)
        reach("after_archive_rewritten")
        await self._writer.submit(MoveArchived(token, old.id, new_id, _row_groups(groups)))
        log.info("archive %s was rewritten without %d erased sessions", old.name, len(erased))
        return True


def _row_groups(groups: Iterable[Iterable[ArchivedSession]]) -> dict[str, int]:
    return {one.session_id: number for number, group in enumerate(groups) for one in group}
