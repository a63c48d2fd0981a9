"""The object storage of replay payloads: S3, Google Cloud Storage, Azure, or a folder.

Requests are repeated, with growing pauses, for at most `timeout_s` seconds. Credentials, regions and endpoints come
from the environment, by the names that each vendor's own tools use (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, …).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store, from_url

if TYPE_CHECKING:
    from obstore import GetOptions, PutResult
    from obstore.store import BackoffConfig

from app.errors import PayloadsUnavailable, StartupError, StoreFull
from app.extras import install_command
from app.features.objects.names import OWNER, PROBE
from app.settings import Settings

S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINTS = (*S3_ENDPOINTS, "AZURE_STORAGE_ENDPOINT")
"""Variables with the address of an own server; one that begins with `http://` allows HTTP."""

CONNECT_S = 5

PROBE_S = 10.0
"""How long a start waits for the bucket."""

LISTED = 1000
"""Objects of one page of a listing."""

_FAULTS = (BaseError, OSError)


class BucketCounters(msgspec.Struct):
    """Requests of this process: bytes sent and received, and requests that failed for good."""

    put: int = 0
    put_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    deleted: int = 0
    failed: int = 0


def open_bucket(settings: Settings) -> Bucket | None:
    """The object storage that the settings name; None if all payloads are in the database. Raises StartupError."""
    return None if settings.payloads == "database" else Bucket(settings.payloads, settings.payloads_timeout_s)


class Bucket:
    """Objects below one URL. Methods raise PayloadsUnavailable after `timeout_s` seconds without success.

    `keeps_versions`: the storage keeps old versions of its objects, as far as is known.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises StartupError for a URL that names no storage."""
        self.url = url
        self.counters = BucketCounters()
        self.keeps_versions = False
        self._timeout_s = timeout_s
        self._folder = Path(url.removeprefix("file://")) if url.startswith("file://") else None
        self._versions: Any = None
        self._store: S3Store | GCSStore | AzureStore | LocalStore
        try:
            if self._folder is None:
                self._store = _remote(url, timeout_s)
            else:
                self._store = LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
        except (*_FAULTS, ValueError) as error:
            raise StartupError(f"TURNLOG_PAYLOADS={url!r}: {_first_line(error)}") from error

    @property
    def is_folder(self) -> bool:
        return self._folder is not None

    async def probe(self) -> str | None:
        """Write a small object; returns why that failed, if it may pass. Raises StartupError if it cannot: there is
        no such bucket, or it may not be written to."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._probe()
        except (TimeoutError, GenericError) as error:
            return f"{self.url} does not answer: {_first_line(error) or f'{PROBE_S:.0f} s'}"
        except _FAULTS as error:
            raise StartupError(f"TURNLOG_PAYLOADS={self.url!r}: {_first_line(error)}") from error
        return None

    async def _probe(self) -> None:
        """Write the object. Google numbers each writing of an object, and only if versions are kept can an earlier one
        still be read by its number."""
        if not self._is_googles:
            self._note_version(await obstore.put_async(self._store, PROBE, b"", use_multipart=False))
            return
        before = (await obstore.put_async(self._store, PROBE, b"", use_multipart=False))["version"]
        await obstore.put_async(self._store, PROBE, b"", use_multipart=False)
        options: GetOptions = {"head": True, "version": before or ""}
        try:
            await obstore.get_async(self._store, PROBE, options=options)
        except FileNotFoundError:
            return
        self.keeps_versions = True

    @property
    def _is_googles(self) -> bool:
        return self.url.startswith("gs://")

    def _note_version(self, written: PutResult) -> None:
        self.keeps_versions |= written["version"] is not None and not self._is_googles

    async def put(self, name: str, body: bytes) -> None:
        """Create an object; it is durable afterwards. Raises StoreFull, PayloadsUnavailable.

        A repeated request may find what the first one wrote. Another content under the same name is another store's.
        """
        try:
            self._note_version(await obstore.put_async(self._store, name, body, mode="create", use_multipart=False))
        except AlreadyExistsError:
            if await self.read(name) != body:
                self.counters.failed += 1
                raise PayloadsUnavailable(f"{self.url}/{name} belongs to another store") from None
        except _FAULTS as error:
            if self._is_full(error, len(body)):
                self.counters.failed += 1
                raise StoreFull(f"{self.url} is full") from error
            raise self._failed(error) from error
        await self._sync(name)
        self.counters.put += 1
        self.counters.put_bytes += len(body)

    async def copy(self, source: str, target: str) -> None:
        """Copy an object inside the storage; without effect where it is not there."""
        try:
            await obstore.copy_async(self._store, source, target)
        except FileNotFoundError:
            return
        except _FAULTS as error:
            raise self._failed(error) from error
        await self._sync(target)
        self.counters.put += 1

    async def read(self, name: str) -> bytes | None:
        """An object; None if it is not there."""
        try:
            async with asyncio.timeout(self._timeout_s):
                body = bytes(await (await obstore.get_async(self._store, name)).bytes_async())
        except FileNotFoundError:
            return None
        except (*_FAULTS, TimeoutError) as error:
            raise self._failed(error) from error
        self.counters.read += 1
        self.counters.read_bytes += len(body)
        return body

    async def size(self, name: str) -> int | None:
        """The bytes of an object; None if it is not there."""
        try:
            return (await obstore.head_async(self._store, name))["size"]
        except FileNotFoundError:
            return None
        except _FAULTS as error:
            raise self._failed(error) from error

    async def list(self, folder: str | None = None) -> AsyncIterator[list[str]]:
        """The names of all objects, page by page, or of those in a folder."""
        try:
            async for page in obstore.list(self._store, folder, chunk_size=LISTED):
                yield [entry["path"] for entry in page]
        except FileNotFoundError:
            return
        except _FAULTS as error:
            raise self._failed(error) from error

    async def delete(self, name: str) -> None:
        """Delete an object, with all its versions; one that is gone already is no error."""
        try:
            if self.keeps_versions:
                await asyncio.to_thread(self._delete_versions, name)
            else:
                await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return
        except _FAULTS as error:
            raise self._failed(error) from error
        self.counters.deleted += 1

    async def owner(self, name: str) -> str:
        """The name of the store whose objects these are: `name`, unless another one has said so before."""
        try:
            await obstore.put_async(self._store, OWNER, name.encode(), mode="create", use_multipart=False)
        except AlreadyExistsError:
            return (await self.read(OWNER) or b"").decode()
        except _FAULTS as error:
            raise self._failed(error) from error
        return name

    async def url_of(self, name: str, seconds: int) -> str:
        """A URL that anyone may read the object by for so long. A folder has none. Raises PayloadsUnavailable."""
        store = self._store
        assert not isinstance(store, LocalStore), "a folder has no URLs"
        try:
            return await obstore.sign_async(store, "GET", name, timedelta(seconds=seconds))
        except _FAULTS as error:
            raise self._failed(error) from error

    @property
    def consequence_of_versions(self) -> str:
        """What follows from kept versions for who runs the store."""
        if self.url.startswith("s3://"):
            return "an erasure also deletes those"
        return "Turnlog deletes nothing there; turn versioning off"

    def _delete_versions(self, name: str) -> None:
        """Delete all versions of an object, since a deletion alone would hide it. obstore has no call for versions;
        Amazon's own package speaks to every S3. Raises PayloadsUnavailable."""
        place = urlsplit(self.url)
        if place.scheme != "s3":
            raise PayloadsUnavailable("only S3's versions can be deleted: turn versioning off for this bucket")
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            needed = f"the bucket keeps old versions, and deleting them needs a package: {install_command('versions')}"
            raise PayloadsUnavailable(needed) from error
        if self._versions is None:
            region = os.environ.get("AWS_REGION")  # boto3 itself looks for other names than obstore
            endpoint = next((value for name in S3_ENDPOINTS if (value := os.environ.get(name))), None)
            self._versions = boto3.client("s3", endpoint_url=endpoint, region_name=region)
        client, key = self._versions, f"{place.path.strip('/')}/{name}".lstrip("/")
        try:
            for page in client.get_paginator("list_object_versions").paginate(Bucket=place.netloc, Prefix=key):
                for version in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                    if version["Key"] == key:
                        client.delete_object(Bucket=place.netloc, Key=key, VersionId=version["VersionId"])
        except (BotoCoreError, ClientError) as error:
            raise PayloadsUnavailable(f"versions of {key} cannot be deleted: {error}") from error

    def _is_full(self, error: BaseException, size: int) -> bool:
        """Did an upload of `size` bytes fail for want of room? An S3 server that can be full, such as MinIO's, answers
        507, which obstore tells only in its message."""
        if self._folder is not None:
            return shutil.disk_usage(self._folder).free <= size
        return "status code: 507" in _first_line(error)

    async def _sync(self, name: str) -> None:
        """Make a new file and its folders durable, which obstore does not."""
        if self._folder is not None:
            await asyncio.to_thread(_sync, self._folder, self._folder / name)

    def _failed(self, error: BaseException) -> PayloadsUnavailable:
        self.counters.failed += 1
        return PayloadsUnavailable(f"{self.url} does not answer: {_first_line(error) or type(error).__name__}")


def _sync(root: Path, path: Path) -> None:
    for folder_or_file in (path, *path.parents):
        descriptor = os.open(folder_or_file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if folder_or_file == root:
            return


def _remote(url: str, timeout_s: float) -> S3Store | GCSStore | AzureStore:
    """Raises obstore's BaseError, ValueError."""
    pauses: BackoffConfig = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3)}
    store = from_url(
        url,
        client_options={
            "allow_http": any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=timeout_s),
        },
        retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=timeout_s), "backoff": pauses},
    )
    assert isinstance(store, S3Store | GCSStore | AzureStore)
    return store


def _first_line(error: BaseException) -> str:
    """obstore's messages go on with the structure of the fault."""
    return str(error).partition("\n")[0]
