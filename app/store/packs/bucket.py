"""The object storage of replay payloads: S3, Google Cloud Storage, Azure, or a folder.

Requests are repeated, with growing pauses, for at most `timeout_s` seconds (`store.object_storage`).
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import LocalStore

if TYPE_CHECKING:
    from obstore import GetOptions, PutResult

from app.errors import PayloadsUnavailable, StartupError, StoreFull
from app.store.object_storage import RemoteStore, first_line, open_remote
from app.store.packs.versions import Versions

SCHEMES = ("s3", "gs", "az", "file")

PROBE_S = 10.0
"""How long a start waits for the bucket."""

GAP_BYTES = 1 << 20
"""Parts of an object that are no farther apart are read together."""

LISTED = 1000
"""Objects of one page of a listing."""

OWNER = "turnlog-owner"
"""An object that names the store whose packs these are."""

PROBE = "turnlog-probe"

_FAULTS = (BaseError, OSError)


class Listed(NamedTuple):
    """An object of the bucket and its bytes."""

    name: str
    size: int


class BucketCounters(msgspec.Struct):
    """Requests of this process: bytes sent and received, and requests that failed for good."""

    put: int = 0
    put_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    deleted: int = 0
    failed: int = 0


class Bucket:
    """Objects below one URL. Methods raise PayloadsUnavailable after `timeout_s` seconds without success.

    `versions` is set if the bucket keeps old versions of its objects, as far as is known.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises StartupError for a URL that names no storage."""
        self.url = url
        self.counters = BucketCounters()
        self.versions: Versions | None = None
        self._timeout_s = timeout_s
        self._folder: Path | None = None
        self._is_googles = url.startswith("gs://")
        try:
            self._store = self._opened(url, timeout_s)
        except (*_FAULTS, ValueError) as error:
            raise StartupError(f"TURNLOG_PAYLOADS={url!r}: {first_line(error)}") from error

    def _opened(self, url: str, timeout_s: float) -> RemoteStore | LocalStore:
        if url.startswith("file://"):
            self._folder = Path(url.removeprefix("file://"))
            return LocalStore(self._folder, mkdir=True)
        return open_remote(url, answer_s=timeout_s, retry_s=timeout_s)

    async def probe(self) -> str | None:
        """Write a small object; returns why that failed, if it may pass. Raises StartupError if it cannot: there is
        no such bucket, or it may not be written to."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._probe()
        except (TimeoutError, GenericError) as error:
            return f"{self.url} does not answer: {first_line(error) or f'{PROBE_S:.0f} s'}"
        except _FAULTS as error:
            raise StartupError(f"TURNLOG_PAYLOADS={self.url!r}: {first_line(error)}") from error
        return None

    async def _probe(self) -> None:
        """Write the object. Google numbers each writing of an object, and only if versions are kept can an earlier one
        still be read by its number."""
        if not self._is_googles:
            await self._written()
            return
        before = await self._version_of(PROBE) or await self._written()
        await self._written()
        if await self._version_of(PROBE, before) is not None:
            self.versions = Versions(self.url)

    async def _written(self) -> str | None:
        written = await obstore.put_async(self._store, PROBE, b"", use_multipart=False)
        self._note_version(written)
        return written["version"]

    async def _version_of(self, name: str, version: str | None = None) -> str | None:
        """The version of an object, or the given one of it; None if that is not there."""
        options: GetOptions = {"head": True} if version is None else {"head": True, "version": version}
        try:
            found = await obstore.get_async(self._store, name, options=options)
        except FileNotFoundError:
            return None
        return found.meta["version"]

    async def put(self, name: str, body: bytes) -> None:
        """Create an object; it is durable afterwards. Raises StoreFull, PayloadsUnavailable.

        A repeated request may find what the first one wrote. Another content under the same name is another store's.
        """
        try:
            written = await obstore.put_async(self._store, name, body, mode="create", use_multipart=False)
            self._note_version(written)
        except AlreadyExistsError:
            if await self.read(name, 0, len(body)) != body:
                self.counters.failed += 1
                raise PayloadsUnavailable(f"{self.url}/{name} is another store's") from None
        except _FAULTS as error:
            self.counters.failed += 1
            if self._is_full(error, len(body)):
                raise StoreFull(f"{self.url} is full") from error
            raise self._unavailable(error) from error
        if self._folder is not None:
            await asyncio.to_thread(_sync, self._folder, self._folder / name)
        self.counters.put += 1
        self.counters.put_bytes += len(body)

    async def read(self, name: str, offset: int, length: int) -> bytes | None:
        """A part of an object; None if it is not there."""
        found = await self.read_parts(name, [(offset, length)])
        return None if found is None else found[0]

    async def read_parts(self, name: str, parts: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Parts (offset, length) of an object, neighbours in one request; None if it is not there or shorter."""
        spans = _spans(parts)
        end = max((end for _, end in spans), default=0)
        try:
            if self._folder is not None and (self._folder / name).stat().st_size < end:
                return None  # obstore does not raise for this, it panics
            async with asyncio.timeout(self._timeout_s):
                reads = (obstore.get_range_async(self._store, name, start=first, end=last) for first, last in spans)
                found = [memoryview(piece) for piece in await asyncio.gather(*reads)]
        except FileNotFoundError:
            return None
        except (*_FAULTS, TimeoutError) as error:
            if await self._is_shorter(name, end):
                return None
            self.counters.failed += 1
            raise self._unavailable(error) from error
        self.counters.read += 1
        self.counters.read_bytes += sum(map(len, found))
        if [len(piece) for piece in found] != [last - first for first, last in spans]:
            return None
        firsts = [first for first, _ in spans]
        pieces: list[bytes] = []
        for offset, length in parts:
            span = bisect_right(firsts, offset) - 1
            pieces.append(bytes(found[span][offset - firsts[span] :][:length]))
        return pieces

    async def _is_shorter(self, name: str, end: int) -> bool:
        """Does an object end before `end`? Storage refuses to read behind its end, in ways that differ."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return (await obstore.head_async(self._store, name))["size"] < end
        except FileNotFoundError:
            return True
        except (*_FAULTS, TimeoutError):
            return False

    def open(self, name: str) -> BinaryIO:
        """An object as a file, for a thread: it blocks. Raises FileNotFoundError; PayloadsUnavailable, as its reads
        do."""
        try:
            size = obstore.head(self._store, name)["size"]
        except FileNotFoundError:
            raise
        except _FAULTS as error:
            raise self._unavailable(error) from error
        return io.BufferedReader(_ObjectFile(self, name, size))

    def read_now(self, name: str, offset: int, length: int) -> bytes:
        """As `read`, for a thread. Raises FileNotFoundError."""
        try:
            found = bytes(obstore.get_range(self._store, name, start=offset, length=length))
        except FileNotFoundError:
            raise
        except _FAULTS as error:
            self.counters.failed += 1
            raise self._unavailable(error) from error
        self.counters.read += 1
        self.counters.read_bytes += len(found)
        return found

    async def owner(self) -> str | None:
        """The name of the store whose packs these are; None if none has said so."""
        try:
            return bytes(await (await obstore.get_async(self._store, OWNER)).bytes_async()).decode()
        except FileNotFoundError:
            return None
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def owned_by(self, name: str) -> str:
        """Say that the packs belong to the store of this name, unless one has said so before; whose they are."""
        while (owner := await self.owner()) is None:
            try:
                await obstore.put_async(self._store, OWNER, name.encode(), mode="create", use_multipart=False)
            except AlreadyExistsError:
                continue  # by another store since, or by this one: the request was repeated
            except _FAULTS as error:
                raise self._unavailable(error) from error
        return owner

    async def own(self, name: str) -> None:
        """Say that the packs belong to the store of this name, whoever has said so before."""
        try:
            await obstore.put_async(self._store, OWNER, name.encode(), use_multipart=False)
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def pages(self) -> AsyncIterator[list[Listed]]:
        """All objects, page by page."""
        listing = obstore.list(self._store, chunk_size=LISTED)
        try:
            async for page in listing:
                yield [Listed(one["path"], one["size"]) for one in page]
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects, with all their versions; one that is gone already is no error."""
        for name in names:
            try:
                if self.versions is None:
                    await obstore.delete_async(self._store, name)
                else:
                    await asyncio.to_thread(self.versions.delete, name)
            except FileNotFoundError:
                continue
            except _FAULTS as error:
                self.counters.failed += 1
                raise self._unavailable(error) from error
            self.counters.deleted += 1

    def _is_full(self, error: BaseException, size: int) -> bool:
        """Did an upload of `size` bytes fail for want of room? An S3 server that can be full, such as MinIO's, answers
        507, which obstore tells only in its message."""
        if self._folder is not None:
            return shutil.disk_usage(self._folder).free <= size
        return "status code: 507" in first_line(error)

    def _note_version(self, written: PutResult) -> None:
        if written["version"] is not None and self.versions is None and not self._is_googles:
            self.versions = Versions(self.url)

    @property
    def is_folder(self) -> bool:
        return self._folder is not None

    async def url_of(self, name: str, seconds: int) -> str:
        """A URL that anyone may read the object by for so long. A folder has none. Raises PayloadsUnavailable."""
        store = self._store
        assert not isinstance(store, LocalStore), "a folder has no URLs"
        try:
            return await obstore.sign_async(store, "GET", name, timedelta(seconds=seconds))
        except _FAULTS as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> PayloadsUnavailable:
        return PayloadsUnavailable(f"{self.url} does not answer: {first_line(error) or type(error).__name__}")


class _ObjectFile(io.RawIOBase):
    """Reads an object from any place on."""

    def __init__(self, bucket: Bucket, name: str, size: int) -> None:
        self._bucket = bucket
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._bucket.read_now(self._name, self._at, length)
        self._at += length
        return length


def _spans(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What to read (first byte, end) for parts (offset, length), in order and apart.

    obstore's own call for several parts panics if the object is shorter.
    """
    spans: list[tuple[int, int]] = []
    for offset, length in sorted(parts):
        if spans and offset - spans[-1][1] <= GAP_BYTES:
            spans[-1] = (spans[-1][0], max(spans[-1][1], offset + length))
        else:
            spans.append((offset, offset + length))
    return spans


def _sync(root: Path, path: Path) -> None:
    """Make a new file and its folders durable, which obstore does not."""
    for one in (path, *path.parents):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if one == root:
            return
