"""A place for backups: an S3, Google Cloud Storage or Azure bucket, or a folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore

from app.errors import StartupError
from app.store.object_storage import RemoteStore, first_line, open_remote

CREDENTIALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_ID"),
    }
)
"""Of each scheme, variables of which one is set unless the machine itself has a role."""

PROBE_S, RETRY_S = 10, 120
"""For how many seconds a first request and a later one are repeated before they fail."""

ANSWER_S = 60

DELETED_AT_ONCE = 500


class Listed(NamedTuple):
    """An object: its name, its size in bytes, and when it was written, by the bucket's clock."""

    name: str
    size: int
    modified: datetime


def bucket_url(place: str) -> str | None:
    """The URL of a place for backups; None if `place` is a file. A folder that exists is a `file://` URL."""
    if "://" in place:
        return place.rstrip("/")
    return Path(place).absolute().as_uri() if Path(place).is_dir() else None


class Bucket:
    """Objects below one URL. Methods raise StartupError, in one line, if the place does not answer or refuses."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        """Open the place and list it once. `create`: make a folder that is missing, for its owner alone."""
        self.url = url
        parts = urlsplit(url)
        self._scheme = parts.scheme
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if parts.scheme == "file":
            is_place = parts.path != "" and parts.netloc == ""
        else:
            is_place = parts.scheme in CREDENTIALS and parts.netloc != ""
        if not is_place:
            raise StartupError(f"{url}: a place is s3://bucket/prefix, gs://…, az://container/prefix, file:///folder")
        with self._answering():
            self._store = self._opened(PROBE_S, create)
            for _ in obstore.list(self._store, "backups/", chunk_size=1):
                break
            self._store = self._opened(RETRY_S, create)

    def _opened(self, retry_s: int, create: bool) -> RemoteStore | LocalStore:
        if self._folder is not None:
            if create:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return LocalStore(self._folder)
        return open_remote(self.url, answer_s=ANSWER_S, retry_s=retry_s)

    @property
    def is_folder(self) -> bool:
        return self._folder is not None

    def put(self, name: str, body: bytes) -> None:
        """Write an object, in place of one of the same name. In a folder it is durable after the next `create`."""
        with self._answering():
            if self._folder is not None:
                _write_file(self._folder, name, body, is_new=False)
            else:
                obstore.put(self._store, name, body, use_multipart=False)

    def create(self, name: str, body: bytes) -> None:
        """Write an object under a name that nobody has used. It is durable then, and so are those that were put before.

        A repeated request may meet what the first one wrote; that is no error.
        """
        with self._answering():
            try:
                if self._folder is not None:
                    _sync_folders(self._folder)
                    _write_file(self._folder, name, body, is_new=True)
                    _sync_folders(self._folder)
                else:
                    obstore.put(self._store, name, body, mode="create", use_multipart=False)
            except (AlreadyExistsError, FileExistsError):
                if self.get(name) != body:
                    raise StartupError(f"{self.url}/{name} is there already, with another content") from None

    def get(self, name: str) -> bytes | None:
        """The object's bytes; None if there is none."""
        with self._answering():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def beginning(self, name: str, length: int) -> bytes | None:
        """The first `length` bytes of an object, or all of a shorter one; None if there is none."""
        with self._answering():
            try:
                return bytes(obstore.get(self._store, name, options={"range": (0, length)}).bytes())
            except FileNotFoundError:
                return None

    def listed(self, prefix: str) -> Iterator[Listed]:
        """The objects below `prefix`, in no order."""
        with self._answering():
            for page in obstore.list(self._store, prefix):
                for one in page:
                    yield Listed(one["path"], one["size"], one["last_modified"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        with self._answering():
            for start in range(0, len(names), DELETED_AT_ONCE):
                some = list(names[start : start + DELETED_AT_ONCE])
                try:
                    obstore.delete(self._store, some)
                except FileNotFoundError:
                    for name in some:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._store, name)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise StartupError(f"{self.url}: {self._hint()}{first_line(error)}") from error

    def _hint(self) -> str:
        """What may be missing, judged by the environment."""
        names = CREDENTIALS.get(self._scheme, ())
        if not names or any(os.environ.get(name) for name in names):
            return ""
        return f"no credentials in the environment ({', '.join(names)}), and then: "


def _write_file(folder: Path, name: str, body: bytes, *, is_new: bool) -> None:
    """Write a file and sync it, which obstore does not do; only its owner may read it.

    It gets its name when it is complete. Raises FileExistsError if it `is_new` and there is one, OSError.
    """
    path = folder / name
    temporary = folder / "running" / f"partial-{secrets.token_hex(8)}"
    for parent in (temporary.parent, *reversed(path.parents)):
        if folder in parent.parents:
            parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folders(folder: Path) -> None:
    """Make the names of all files durable, also of those that a killed run left."""
    for one in (folder, *(path for path in folder.glob("*/**") if path.is_dir())):
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
