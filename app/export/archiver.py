"""Moves closed sessions out of the database into archives: Parquet files in object storage.

The archive is complete in the bucket before the first session refers to it. A session's rows are deleted in the
transaction that makes it refer to the archive, the many of a large one in steps after that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from app.crash_points import reach
from app.errors import AppError, InvalidRequest, SessionUnreadable, StoreDamaged, Unsupported
from app.export import formats
from app.export.exporter import Exporter
from app.export.faults import instead, told
from app.export.query import ExportQuery
from app.export.row import Fields
from app.extras import install
from app.sessions.archives import Archives
from app.store import reads
from app.store.archives import rows
from app.store.archives.format import ArchivedSession, object_of, samples_of
from app.store.archives.keeping import new_archive
from app.store.archives.rows import Archive, DropArchived, EndArchive, places_in
from app.store.packs.collector import Collector
from app.store.packs.format import InPack
from app.store.packs.reader import fetch_frames
from app.store.ports import Database, Writer
from app.store.schema import blobs, chunks, events, turns
from app.tasks import cancelled
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

log = logging.getLogger("turnlog.archives")

EVERY_S = 30.0
"""Pause between two rounds of the background task."""

WHOLE_EVERY = 20
"""Of so many rounds, one looks at all closed sessions; the others at those that were closed since the last one."""

EXAMINED = 1000
"""Sessions of one step."""

READ_AT_ONCE = 25
"""Sessions read and shaped together."""

ARCHIVE_BYTES = 32 << 20
"""Bytes of one archive, about; one session may have more."""

GROUP_BYTES, GROUP_SESSIONS = 2 << 20, 200
"""Bytes and sessions of a row group, about: a read of one session reads its whole group."""

LARGEST_BYTES = 256 << 20
"""A session whose live payloads are more than this, before compression, stays until they have been freed."""

WRITTEN_AT_ONCE = 100
"""Sessions submitted to the writer together."""

CLEAN_EVERY_S = 86400.0
"""How often to look for what another process has left of archived sessions: that asks for each of them."""

Place = tuple[float, str]
START: Place = (-1.0, "")


class ArchiveStep(msgspec.Struct, frozen=True):
    """What one step has done: sessions `archived`, and `left` where they are, because they have changed or cannot be
    read; `bytes` uploaded; the place that the next step begins behind, None at the end."""

    archived: int
    left: int
    bytes: int
    after: Place | None


class Archiver:
    """`clock` gives seconds, `incarnation` this process's number in the store. `closed_for_s`: the background task
    archives sessions that have been closed for so long; None: there is no such task."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        archives: Archives,
        exporter: Exporter,
        collector: Collector | None,
        clock: Callable[[], float],
        incarnation: Callable[[], int],
        *,
        closed_for_s: float | None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._archives = archives
        self._exporter = exporter
        self._collector = collector
        self._clock = clock
        self._incarnation = incarnation
        self._closed_for_s = closed_for_s
        self._one_step = asyncio.Lock()
        self._clean_until: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the background task, if there is one. Raises InvalidRequest, Unsupported as `step` does."""
        if self._closed_for_s is not None:
            self._require()
            self._task = asyncio.create_task(self._run(self._closed_for_s), name="turnlog-archives")

    async def stop(self) -> None:
        await cancelled(self._task)

    async def _run(self, closed_for_s: float) -> None:
        upto = START
        for number in itertools.count():
            await asyncio.sleep(EVERY_S)
            try:
                if self._collector is not None and await self._collector.is_first():
                    after: Place | None = upto if number % WHOLE_EVERY else START
                    while after is not None:
                        upto = after
                        after = (await self.step(closed_for_s, after)).after
            except AppError as error:
                log.warning("sessions are not archived: %s", error)
            except Exception:
                log.exception("an unexpected fault while sessions were being archived")

    async def step(self, closed_for_s: float, after: Place = START) -> ArchiveStep:
        """Archive some sessions that have been closed for `closed_for_s` seconds, behind `after`.

        Raises InvalidRequest without object storage, Unsupported without pyarrow, PayloadsUnavailable,
        StoreUnavailable, StoreFull.
        """
        bucket = self._require()
        async with self._one_step:
            await self._drop_left_over()
            cutoff = self._clock() - closed_for_s
            found = await self._database.read(partial(rows.candidates, cutoff=cutoff, after=after, limit=EXAMINED))
            if not found:
                return ArchiveStep(0, 0, 0, None)
            archive_id, name = await new_archive(self._database, self._writer, self._incarnation())
            try:
                taken, examined = await self._take([session_id for _, session_id in found])
                archived, put = await self._archive(bucket, archive_id, name, taken) if taken else (0, 0)
            finally:
                if not await self._writer.submit(EndArchive(archive_id)):
                    await bucket.delete([samples_of(name), object_of(name)])
            is_last = examined == len(found) < EXAMINED
            return ArchiveStep(archived, examined - archived, put, None if is_last else found[examined - 1])

    async def _take(self, session_ids: Sequence[str]) -> tuple[list[ArchivedSession], int]:
        """The first of the sessions, as many as fit into an archive, and how many were looked at for that."""
        taken: list[ArchivedSession] = []
        examined = size = 0
        async for part, sessions in self._readable(session_ids):
            taken += sessions
            examined += part
            size += sum(one.size for one in sessions)
            if size >= ARCHIVE_BYTES:
                break
        return taken, examined

    def _require(self) -> Bucket:
        if self._database.bucket is None:
            raise InvalidRequest("there is no object storage for archives: TURNLOG_PAYLOADS is not set")
        if find_spec("pyarrow") is None:
            raise Unsupported(f"archives need pyarrow on the server (turnlog[parquet]): {install('parquet')}")
        return self._database.bucket

    async def _readable(self, session_ids: Sequence[str]) -> AsyncIterator[tuple[int, list[ArchivedSession]]]:
        """Sessions as an archive holds them, part by part, with the number that the part was made of."""
        for at in range(0, len(session_ids), READ_AT_ONCE):
            part = session_ids[at : at + READ_AT_ONCE]
            sizes = await self._database.read(partial(rows.live_bytes, session_ids=part))
            small = [one for one in part if sizes.get(one, 0) <= LARGEST_BYTES]
            found: list[ArchivedSession] = []
            for one in await self._read(small):
                if one.head["status"] != "closed":
                    continue
                try:
                    found.append(await self._checked(one))
                except SessionUnreadable as error:
                    self._database.unreadable.warn(one.session_id, error)
                except AppError:
                    raise
                except Exception as error:  # noqa: BLE001 - a session's fault, whatever it is, leaves it where it is
                    self._database.unreadable.warn(one.session_id, told(error))
            yield len(part), found

    async def _read(self, session_ids: Sequence[str]) -> list[ArchivedSession]:
        try:
            return await self._database.read(partial(rows.read_whole, session_ids=session_ids), one_moment=True)
        except StoreDamaged:
            pass
        found: list[ArchivedSession] = []
        for session_id in session_ids:
            read = partial(rows.read_whole, session_ids=[session_id])
            try:
                found += await self._database.read(read, one_moment=True, session_id=session_id)
            except SessionUnreadable:
                continue
        return found

    async def _checked(self, session: ArchivedSession) -> ArchivedSession:
        """The session with its chunks in packs fetched. Raises UnknownEvent, CorruptContent and SessionUnreadable if it
        is not whole."""
        rows_of_log = session.rows[events.name]
        entries = [reads.EventRow(*(row[name] for name in reads.EventRow._fields)) for row in rows_of_log]
        folded = await asyncio.to_thread(reads.fold_rows, session.session_id, None, entries)
        if folded is None or folded.version != session.head["version"]:
            raise CorruptContent("its log is not whole")
        for table, column in ((turns, "facts"), (turns, "wire"), (blobs, "data")):
            if any(row[column] is None for row in session.rows[table.name]):
                raise CorruptContent("content is missing")
        return await self._with_frames(session)

    async def _with_frames(self, session: ArchivedSession) -> ArchivedSession:
        """Raises CorruptContent if a chunk's frame is lost; SessionUnreadable if the session was archived meanwhile,
        and the archive is damaged."""
        live = {
            (row["fence"], row["number"]): InPack(row["location"], row["pack_offset"], row["pack_length"])
            for row in session.rows[chunks.name]
            if row["location"] is not None and row["tombstoned_by"] is None
        }
        frames = await fetch_frames(self._database, session.session_id, live)
        own = []
        for row in session.rows[chunks.name]:
            key = (row["fence"], row["number"])
            data = frames.get(key) if key in live else row["data"]
            if data is None and row["tombstoned_by"] is None:
                raise CorruptContent("a chunk is lost")
            own.append({**row, "data": data, "location": None, "pack_offset": None, "pack_length": None})
        return session._replace(rows={**session.rows, chunks.name: own})

    async def _archive(
        self, bucket: Bucket, archive_id: int, name: str, taken: Sequence[ArchivedSession]
    ) -> tuple[int, int]:
        """Write an archive and let the sessions refer to it; how many do, and the bytes uploaded."""
        from app.store.archives.parquet import encode

        groups = _groups(taken)
        body = await asyncio.to_thread(encode, groups)
        samples = await self._samples([one.session_id for one in taken])
        reach("before_archive_put")
        await bucket.put(object_of(name), body)
        await bucket.put(samples_of(name), samples)
        reach("after_archive_put")
        operations = [
            Archive(one.session_id, one.head["version"], archive_id, number, *places_in(one.rows))
            for number, group in enumerate(groups)
            for one in group
        ]
        archived: list[str] = []
        clean_until, self._clean_until = self._clean_until, None  # until all is dropped
        for at in range(0, len(operations), WRITTEN_AT_ONCE):
            part = operations[at : at + WRITTEN_AT_ONCE]
            done = await asyncio.gather(*map(self._writer.submit, part))
            archived += [one.session_id for one, is_done in zip(part, done, strict=True) if is_done]
        reach("after_archived")
        await self._drop(archived)
        self._clean_until = clean_until
        self._archives.counters.archived += len(archived)
        log.info("%d sessions are in archive %s", len(archived), name)
        return len(archived), len(body) + len(samples)

    async def _samples(self, session_ids: Sequence[str]) -> bytes:
        """The sessions' training rows, as an export with `format=parquet` gives them."""
        query = ExportQuery(format="parquet")
        writer = formats.open_writer("parquet", formats.DEFAULT, False, self._not_written)
        pieces: list[bytes] = []
        try:
            for at in range(0, len(session_ids), READ_AT_ONCE):
                found = await self._exporter.rows(session_ids[at : at + READ_AT_ONCE], query)
                kept = [row for row in found if formats.EXCLUDED not in row]
                pieces += await asyncio.to_thread(_all, writer.write, kept)
            pieces += await asyncio.to_thread(_all, writer.finish)
        finally:
            writer.close()
        return b"".join(pieces)

    def _not_written(self, row: Fields, error: Exception) -> None:
        self._database.unreadable.warn(str(instead(row, error)["session_id"]), told(error))

    async def _drop(self, session_ids: Sequence[str]) -> None:
        """Delete what archived sessions still have in the database."""
        for session_id in session_ids:
            more = True
            while more:
                more = await self._writer.submit(DropArchived(session_id))

    async def _drop_left_over(self) -> None:
        """Finish what a step that was cut short has left: of this process at the next step, of another one that died at
        this process's first step, or within `CLEAN_EVERY_S`."""
        if self._clean_until is not None and self._clock() < self._clean_until:
            return
        after: str | None = ""
        while after is not None:
            found = await self._database.read(partial(rows.left_over, after=after, limit=EXAMINED))
            await self._drop(found)
            after = found[-1] if len(found) == EXAMINED else None
        self._clean_until = self._clock() + CLEAN_EVERY_S


def _all(write: Callable[..., Iterable[bytes]], *rows: Sequence[Fields]) -> list[bytes]:
    return list(write(*rows))


def _groups(sessions: Sequence[ArchivedSession]) -> list[list[ArchivedSession]]:
    groups: list[list[ArchivedSession]] = []
    size = GROUP_BYTES
    for one in sessions:
        if size >= GROUP_BYTES or len(groups[-1]) == GROUP_SESSIONS:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size
    return groups
