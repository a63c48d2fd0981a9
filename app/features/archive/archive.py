"""Moves rollouts into files, brings them back, and takes erased sessions out of files.

    Reserve ──▶ file is written, read back and compared ──▶ Forget, a transaction a rollout ──▶ DropContent, in steps

At most one process does any of it at a time: it holds the lease `archive`. What a crash leaves is ended by the next
process that holds it (`_finish`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from app.crash_points import reach
from app.domain.selection import Selection
from app.errors import (
    AppError,
    ArchiveBusy,
    InvalidRequest,
    NotFound,
    Overloaded,
    SessionArchived,
    SessionClosed,
    SessionUnreadable,
    StartupError,
    Unsupported,
)
from app.export.query import ExportQuery
from app.export.row import Fields
from app.extras import install_command
from app.features.archive import rows
from app.features.archive.checks import require_own, require_whole
from app.features.archive.rows import Indexed, Place, Rollout, StoredRows
from app.features.objects.names import PROBE
from app.process import cancelled
from app.sessions.cache import SessionCache
from app.store import feed
from app.store.content import load_chunks
from app.store.incarnations import ReleaseLease, TakeLease
from app.store.ports import Database, Writer
from turnlog.replies import ArchiveAfter, ArchiveStep, ImportedFile, RefusedSession
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.export.exporter import Exporter
    from app.features.objects.bucket import Bucket
    from app.request_memory import BodyReservation

log = logging.getLogger("turnlog.archive")

FILE_BYTES = 32 << 20
"""Bytes of content in one file, about; the last rollout may go beyond it."""

AT_ONCE = 100
"""Operations submitted together, and sessions shaped together."""

EVERY_S = 30.0
"""Pause between two looks for what is left to do; an erasure does not wait for it."""

LEASE_S = 3600.0
"""A process that dies gives the lease up sooner: its heartbeat ends."""

SCHEMES = ("s3://", "gs://", "az://", "file:///")

UNPACKED = 4
"""Memory of a row group that is imported, in its unpacked bytes: the columns, the rows, and what is written."""

MOST_URL = 1024
"""Characters of a folder's or a file's URL."""

MOST_WAITING = 4
"""Requests that wait for the one that archives or imports."""


class Archive:
    """`file_root`: the folder below which the files of requests must lie. `clock` gives seconds, `incarnation` this
    process's number in the store; `lease_s` seconds without a heartbeat mean that another process is dead. `forget`:
    what other features do with a session that left. Runs a task from `start` to `stop`."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        cache: SessionCache,
        exporter: Exporter,
        clock: Callable[[], float],
        incarnation: Callable[[], int],
        *,
        lease_s: float,
        timeout_s: float,
        file_root: str | None,
        forget: Sequence[Callable[[str], Awaitable[None]]],
    ) -> None:
        self._database = database
        self._writer = writer
        self._cache = cache
        self._exporter = exporter
        self._clock = clock
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._file_root = file_root
        self._forget = forget
        self._waiting = 0
        self._buckets: dict[str, Bucket] = {}
        self._one = asyncio.Lock()
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-archive")

    async def stop(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        while True:
            try:
                if await self._database.read(partial(rows.unfinished, most=1)):
                    async with self._leased() as fence:
                        await self._finish(fence)
            except ArchiveBusy:
                pass
            except AppError as error:
                log.warning("archive upkeep is delayed: %s; it is retried", error)
            except Exception:
                log.exception("unexpected error in archive upkeep")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._due.wait()
            self._due.clear()

    @contextlib.asynccontextmanager
    async def _leased(self) -> AsyncIterator[int]:
        """The fence of the lease. Raises ArchiveBusy if another process has it, Overloaded."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{self._waiting} requests are already waiting for archives")
        self._waiting += 1
        try:
            await self._one.acquire()
        finally:
            self._waiting -= 1
        try:
            fence = await self._writer.submit(TakeLease(rows.LEASE, self._incarnation(), LEASE_S, self._lease_s))
            if fence is None:
                raise ArchiveBusy("another process is archiving or importing")
            try:
                yield fence
            finally:
                await self._writer.submit(ReleaseLease(rows.LEASE, fence))
        finally:
            self._one.release()

    async def _write(self, operation: rows.Fenced | rows.Forget) -> Any:
        """Raises ArchiveBusy if the lease was lost."""
        done = await self._writer.submit(operation)
        if done is None:
            raise ArchiveBusy("another process has taken over the archives")
        return done

    # Leaving.

    async def step(
        self, older_than_s: float, to: str, limit: int, after: Place | None, wanted: Selection
    ) -> ArchiveStep:
        """Move some of the wanted rollouts that were closed `older_than_s` seconds ago, the first `limit` behind
        `after`, into one file below `to`.

        Raises InvalidRequest, Unsupported (without pyarrow), ArchiveBusy, PayloadsUnavailable, StoreUnavailable,
        StoreFull.
        """
        bucket = self._bucket(self._allowed(to))
        async with self._leased() as fence:
            await self._finish(fence)
            cutoff = self._clock() - older_than_s
            begin = after or Place(-1.0, "")
            points = self._database.points
            candidates = await self._database.read(
                partial(rows.candidates, points=points, cutoff=cutoff, after=begin, limit=limit, wanted=wanted)
            )
            taken: list[Rollout] = []
            size, left, at = 0, candidates.left, candidates.after
            for root in candidates.roots:
                rollout = await self._readable(root.session_id)
                if rollout is None:
                    left += 1
                    continue
                taken.append(rollout)
                size += rollout.size
                if size >= FILE_BYTES:
                    at = root
                    break
            step = ArchiveStep(archived=0, left=left, bytes=0, file=None, after=None)
            if at is not None:
                step["after"] = ArchiveAfter(closed_at=at.closed_at, session_id=at.session_id)
            if taken:
                file = f"{bucket.url}/{await self._new_name()}"
                gone, written = await self._archive(fence, bucket, file, taken)
                step["left"] += len(taken) - len(gone)
                if gone:
                    step["archived"] = sum(len(rollout.sessions) for rollout in gone)
                    step["bytes"], step["file"] = written, file
                    log.info("moved %d sessions from the database to %s", step["archived"], file)
            return step

    async def _readable(self, root_id: str) -> Rollout | None:
        """A rollout with all of its content, checked; None if it must stay."""
        try:
            read = partial(rows.read_rollout, root_id=root_id)
            rollout = await self._database.read(read, one_moment=True, session_id=root_id)
            if rollout is None:
                return None
            whole = [await self._whole(session) for session in rollout.sessions]
        except (SessionUnreadable, CorruptContent) as error:
            self._database.unreadable.warn(root_id, error)
            return None
        return Rollout(root_id, whole)

    async def _whole(self, session: StoredRows) -> StoredRows:
        """The session with the bytes of its chunks. Raises CorruptContent, PayloadsUnavailable."""
        for table, column in (("turns", "exchange"), ("blobs", "data")):
            if any(row[column] is None for row in session.rows[table]):
                raise CorruptContent("content is missing")
        live = [row for row in session.rows["chunks"] if row["tombstoned_by"] is None]
        elsewhere = [(row["fence"], row["number"]) for row in live if row["data"] is None]
        frames = await load_chunks(self._database, session.session_id, elsewhere) if elsewhere else {}
        if any(frames.get(key) is None for key in elsewhere):
            raise CorruptContent("a chunk is lost")
        chunks = [
            {**row, "data": frames.get((row["fence"], row["number"]), row["data"])} for row in session.rows["chunks"]
        ]
        whole = session._replace(rows={**session.rows, "chunks": chunks})
        await asyncio.to_thread(require_whole, whole)
        return whole

    async def _archive(
        self, fence: int, bucket: Bucket, file: str, taken: Sequence[Rollout]
    ) -> tuple[list[Rollout], int]:
        """Write a file and forget what is in it: which rollouts left, and the bytes of the file."""
        from app.features.archive.file import decode, encode

        lines = await asyncio.to_thread(
            lambda: [rows.line_of(one, rollout.root_id) for rollout in taken for one in rollout.sessions]
        )
        await self._write(rows.Reserve(fence, file, lines))
        # An erasure that ended before this knows of no file: what it erased must not come into one.
        taken = await self._unchanged(taken)
        if not taken:
            await self._finish(fence)
            return [], 0
        samples = await self._samples([one.session_id for rollout in taken for one in rollout.sessions])
        body = await asyncio.to_thread(encode, taken, samples)
        reach("before_archive_put")
        await bucket.put(_name(file), body)
        reach("after_archive_put")
        stored = await self._read(file) or b""
        if await asyncio.to_thread(lambda: list(itertools.chain(*decode(stored)))) != list(taken):
            raise CorruptContent(f"{file} does not hold what was written")
        gone: list[Rollout] = []
        try:
            for at in range(0, len(taken), AT_ONCE):
                part = taken[at : at + AT_ONCE]
                forgotten = await asyncio.gather(*(self._write(_forget(fence, file, rollout)) for rollout in part))
                gone += [rollout for rollout, is_done in zip(part, forgotten, strict=True) if is_done]
        except ArchiveBusy:
            if not await self._database.read(partial(rows.of_file, file=file)):
                await self._delete(file)  # who took over has done so before it was written
            raise
        reach("after_archived")
        for rollout in gone:
            for session in rollout.sessions:
                self._cache.drop(session.session_id)
                for forget in self._forget:
                    await forget(session.session_id)
        await self._finish(fence)
        return gone, len(body)

    async def _unchanged(self, taken: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts to which nothing has been added since they were read."""
        ids = [session.session_id for rollout in taken for session in rollout.sessions]
        now: dict[str, tuple[str, float, int]] = {}
        for at in range(0, len(ids), AT_ONCE):
            now |= await self._database.read(partial(rows.identities, session_ids=ids[at : at + AT_ONCE]))
        return [
            rollout
            for rollout in taken
            if all(now.get(session.session_id) == session.identity for session in rollout.sessions)
        ]

    async def _samples(self, session_ids: Sequence[str]) -> list[Fields]:
        query = ExportQuery(format="parquet", evaluation=True)
        parts = [session_ids[at : at + AT_ONCE] for at in range(0, len(session_ids), AT_ONCE)]
        return [row for part in parts for row in await self._exporter.rows(part, query) if "excluded" not in row]

    # What is left to do.

    async def _finish(self, fence: int) -> None:
        """End what was begun: files that were being written, content that is still here, erasures."""
        lines = await self._database.read(rows.unfinished)
        for line in lines:
            if line.state == "leaving":
                await self._drop_content(fence, line)
        for file in sorted({line.file for line in lines if line.state == "writing"}):
            if not await self._database.read(partial(rows.has_left, file=file)):
                await self._delete(file)  # before its lines: nothing else names it
            await self._write(rows.EndFile(fence, file))
        tried = set[str]()
        while erasing := await self._database.read(rows.erasing_files) - tried:
            for file in sorted(erasing):
                try:
                    await self._rewrite(fence, file)
                except CorruptContent as error:
                    log.error("erased sessions cannot be removed from %s: %s", file, error)
                    await self._write(rows.EraseCopies(fence, file))
            tried |= erasing

    async def _drop_content(self, fence: int, line: Indexed) -> None:
        while await self._write(rows.DropContent(fence, line.file, line.session_id)):
            reach("in_content_dropped")

    async def _rewrite(self, fence: int, file: str) -> None:
        """Write a file again without the sessions that must leave it."""
        lines = await self._database.read(partial(rows.of_file, file=file))
        for line in lines:
            if line.state == "erasing":  # it may have been leaving
                await self._drop_content(fence, line)
        kept = [line.line for line in lines if line.state not in ("erasing", "erased")]
        body = await self._read(file)
        if body is not None:
            await self._tell_erased(fence, body, {line.session_id for line in lines if line.state == "erasing"})
        if body is not None and kept:
            from app.features.archive.file import without

            erased = frozenset(line.session_id for line in lines) - {line.session_id for line in kept}
            left = await asyncio.to_thread(without, body, erased)
            place = file.rpartition("/")[0]
            new = f"{place}/{await self._new_name()}"
            await self._write(rows.Reserve(fence, new, kept))
            await self._bucket(place).put(_name(new), left)
            if await self._read(new) != left:
                raise CorruptContent(f"{new} does not hold what was written")
            reach("after_archive_rewritten")
            await self._write(rows.Move(fence, file, new))
            log.info("rewrote %s as %s, without %d erased sessions", file, new, len(erased))
        await self._delete(file)
        reach("after_archive_deleted")
        await self._write(rows.EndErasing(fence, file))

    async def _tell_erased(self, fence: int, body: bytes, erasing: Collection[str]) -> None:
        """The logs of erased sessions that are in the file alone come back, without content, and say so."""
        from app.features.archive.file import decode, unpacked_bytes

        ids = list(erasing)
        there: set[str] = set()
        for at in range(0, len(ids), AT_ONCE):
            there |= (await self._database.read(partial(rows.identities, session_ids=ids[at : at + AT_ONCE]))).keys()
        if there.issuperset(erasing):
            return
        try:
            await asyncio.to_thread(unpacked_bytes, body)
            groups = decode(body)
            while (group := await asyncio.to_thread(next, groups, None)) is not None:
                for session in (one for rollout in group for one in rollout.sessions):
                    if session.session_id in erasing and session.session_id not in there:
                        await asyncio.to_thread(
                            require_own, Rollout(session.head["root_id"] or session.session_id, [session])
                        )
                        await self._write(rows.TellErased(fence, session, self._clock()))
        except CorruptContent as error:
            log.error("followers cannot be told of sessions that were erased in an archive: %s", error)

    # For the routes of sessions.

    async def where_is(self, session_id: str) -> AppError | None:
        """The error for a session that is not in the database, if it is in a file or was erased there."""
        lines = await self._database.read(partial(rows.of_session, session_id=session_id))
        for line in lines:
            if line.session_id == session_id and line.state in ("erasing", "erased"):
                return SessionClosed(f"session {session_id} is erased")
            if line.session_id == session_id and line.state in ("leaving", "archived"):
                return SessionArchived(f"session {session_id} is archived in {line.file}")
        return None

    async def erase(self, session_id: str) -> bool | None:
        """Take a session, and for a root its rollout, out of all files. None: it is in none; False: that goes on."""
        lines = await self._database.read(partial(rows.of_session, session_id=session_id))
        if any(line.state not in ("erasing", "erased") for line in lines):
            await self._writer.submit(rows.BeginErasing(session_id))
            reach("after_erasing_begun")
            lines = await self._database.read(partial(rows.of_session, session_id=session_id))
        for line in lines:  # again: a crash may have kept the features from it when the session left
            for forget in self._forget:
                await forget(line.session_id)
        if any(line.state == "erasing" for line in lines):
            self._due.set()
            return False
        ids = [line.session_id for line in lines]
        return None if not lines else not await self._database.read(partial(rows.have_objects, session_ids=ids))

    async def roots_of_run(self, run: str) -> list[str]:
        """The roots of a run's rollouts that are in files and not in the database."""
        return await self._database.read(partial(rows.roots_of_run, run=run))

    # Back.

    async def bring_back(self, file: str, memory: BodyReservation) -> ImportedFile:
        """Write the sessions of a file into the database, but those that are there already, and those that are refused:
        the index names another file for them, or they are not as this version writes them. `memory` is reserved for
        what is read.

        Raises NotFound (no such file), InvalidRequest (not an archive of this store), Overloaded, Unsupported,
        ArchiveBusy, PayloadsUnavailable, StoreUnavailable, StoreFull.
        """
        from app.features.archive.file import MOST_FILE, decode, unpacked_bytes

        file = self._allowed(file)
        bucket = self._bucket(file.rpartition("/")[0])
        async with self._leased() as fence:
            await self._finish(fence)
            if not await self._database.read(partial(rows.of_file, file=file)):
                raise InvalidRequest(f"{file:.1100} has no archived session of this store")
            size = await bucket.size(_name(file))
            if size is None:
                raise NotFound(f"{file} does not exist")
            if size > MOST_FILE:
                raise InvalidRequest(f"{file} has {size} bytes; the limit is {MOST_FILE}")
            memory.grow(size)
            body = await self._read(file)
            if body is None or len(body) != size:
                raise NotFound(f"{file} changed while it was read")
            told = ImportedFile(imported=0, there=0, refused=[])
            try:
                memory.grow(UNPACKED * await asyncio.to_thread(unpacked_bytes, body))
                groups = decode(body)
                while (group := await asyncio.to_thread(next, groups, None)) is not None:
                    for rollout in group:
                        await self._import(fence, file, rollout, told)
                        reach("after_imported")
            except CorruptContent as error:
                raise InvalidRequest(f"{file}: {error}") from error
            return told

    async def _import(self, fence: int, file: str, rollout: Rollout, told: ImportedFile) -> None:
        try:
            await asyncio.to_thread(require_own, rollout)
        except CorruptContent as error:
            reason = str(error)
        else:
            match await self._write(rows.Import(fence, file, rollout)):
                case "imported":
                    told["imported"] += len(rollout.sessions)
                    return
                case "there":
                    told["there"] += len(rollout.sessions)
                    return
                case outcome:
                    reason = _REFUSED[outcome]
        ids = [session.session_id for session in rollout.sessions]
        told["refused"] += [RefusedSession(session_id=one, reason=reason) for one in ids]
        log.warning("%d sessions of %s were not imported: %s", len(ids), file, reason)

    # Files.

    async def _new_name(self) -> str:
        return f"turnlog-{await self._database.read(feed.epoch)}-{secrets.token_hex(8)}.parquet"

    async def _read(self, file: str) -> bytes | None:
        """None: there is no such file. Raises as `_bucket`, PayloadsUnavailable."""
        return await self._bucket(file.rpartition("/")[0]).read(_name(file))

    async def _delete(self, file: str) -> None:
        """Delete a file, with all of its versions."""
        bucket = self._bucket(file.rpartition("/")[0])
        if not bucket.is_folder and not bucket.keeps_versions:
            await bucket.probe()  # which tells whether it does
            await bucket.delete(PROBE)
        await bucket.delete(_name(file))

    def _allowed(self, url: str) -> str:
        """The URL that a request names, a folder's after its symbolic links. Raises InvalidRequest."""
        if not url.startswith(SCHEMES):
            raise InvalidRequest(f"{url:.200}: the URL must begin with one of {', '.join(SCHEMES)}")
        url = url.rstrip("/")
        if not url.startswith("file:"):
            return url
        if self._file_root is None:
            raise InvalidRequest("file:///… requires the server's TURNLOG_FILE_ROOT: the folder in which it must lie")
        if not url.isprintable() or len(url) > MOST_URL:
            raise InvalidRequest("file:///…: not a valid path")
        path, root = (os.path.realpath(one) for one in (url.removeprefix("file://"), self._file_root))
        if os.path.commonpath((path, root)) != root:
            raise InvalidRequest("file:///…: the path is outside the server's TURNLOG_FILE_ROOT")
        return f"file://{path}"

    def _bucket(self, url: str) -> Bucket:
        """Raises InvalidRequest, Unsupported."""
        if find_spec("pyarrow") is None:
            raise Unsupported(f"archives need pyarrow on the server (turnlog[parquet]): {install_command('parquet')}")
        from app.features.objects.bucket import Bucket

        url = url.rstrip("/")
        if url not in self._buckets:
            try:
                self._buckets[url] = Bucket(url, self._timeout_s)
            except StartupError as error:
                raise InvalidRequest(f"{url:.200} is not a valid storage URL") from error
        return self._buckets[url]


_REFUSED = {
    "erased": "it was erased",
    "elsewhere": "it is not archived in this file: GET /sessions/{id} names the file that it is in",
}


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _forget(fence: int, file: str, rollout: Rollout) -> rows.Forget:
    versions = {session.session_id: session.head["version"] for session in rollout.sessions}
    return rows.Forget(rollout.root_id, fence, file, versions)
