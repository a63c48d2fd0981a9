"""Opening a database: the lock that reserves an SQLite file for one process, the revision that this code needs, or one
line for an operator why the database cannot be opened, with the remedy and without a password.

The lock is an exclusive flock(2) on the file itself, while the process has it open. On Linux, flock and SQLite's
fcntl(2) locks are independent, so it does not disturb SQLite, and it holds for any name of the file. But the kernel
drops a process's fcntl locks when the process closes *any* descriptor of the file. So the descriptor is opened before
SQLite opens the file and closed after SQLite has closed it, and no child inherits it (Python opens files
close-on-exec). On network file systems and other systems than Linux the two kinds of lock exclude each other: there
`<file>.lock` is locked instead, and watched like the database. Deleting it ends the server.

Alembic knows the revisions too, but its import takes a tenth of the start-up time, and only migrations need it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import sys
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sqlalchemy import Connection, column, delete, insert, inspect, select, table
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from app.errors import StartupError, StoreFull, StoreLost
from app.extras import release
from app.store.dialect import Tx
from app.store.incarnations import require_unserved
from app.store.schema import store_meta

REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "afs"})
"""File systems whose locks and shared memory SQLite's write-ahead log cannot rely on."""

_LISTED = Path("/proc/locks")


class Held(Exception):
    """Another process has the file; `pid` if the kernel tells."""

    def __init__(self, pid: int | None) -> None:
        super().__init__("another process" if pid is None else f"another process (pid {pid})")
        self.pid = pid


class LockedFile(NamedTuple):
    """A file's identity (device, inode), and the descriptor that holds its lock, if locked."""

    path: Path
    identity: tuple[int, int]
    handle: int | None

    def lost(self) -> str | None:
        """Why the path no longer leads to this file. Raises OSError."""
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{self.path} was deleted or moved"
        if (status.st_dev, status.st_ino) != self.identity:
            return f"{self.path} was replaced by another file"
        return None


class SqliteLock:
    """Acquire before SQLite opens the file, and release after SQLite has closed it.

    `create`: create a missing file, private to its user; otherwise nothing is locked then.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path = path
        self._lock_file = Path(f"{path.resolve()}.lock")
        self._create = create
        self._locked: list[LockedFile] = []
        self._watched: list[LockedFile] = []
        """The files whose paths must go on leading to them; `LockedFile.lost` says why one does not."""

    def acquire(self) -> None:
        """Create the folder and lock the file. Raises Held, and OSError if either cannot be written."""
        try:
            _make(self._path.parent)
            if sys.platform == "linux" and file_system(self._lock_file.parent) not in REMOTE:
                self._lock(self._path, create=self._create)
                self._watched = list(self._locked)
            else:
                self._lock(self._lock_file, create=True)
                self._watched = [*self._locked, *_current(self._path)]
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._watched = []
        while self._locked:
            handle = self._locked.pop().handle
            assert handle is not None
            # A child that is just being started holds the descriptor, and so the lock, for some microseconds.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def lost(self) -> str | None:
        """Why this process has lost the file; None while it has it. Raises OSError if that cannot be determined.

        Costs some microseconds.
        """
        for file in self._watched:
            if (reason := file.lost()) is not None:
                return reason
        return None

    def _lock(self, path: Path, *, create: bool) -> None:
        """Lock the file that the path leads to; retried if it was replaced meanwhile."""
        while True:
            pid = lock_owner(path)
            if pid is not None:
                # Do not open the file here: closing it would drop this process's other locks on it.
                raise Held(pid)
            try:
                handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return
            status = os.fstat(handle)
            self._locked.append(LockedFile(path, (status.st_dev, status.st_ino), handle))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Held(lock_owner(path)) from None
            if self._locked[-1].lost() is None:
                return
            self._locked.pop()
            os.close(handle)

    def __enter__(self) -> SqliteLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _make(folder: Path) -> None:
    """Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _current(path: Path) -> list[LockedFile]:
    """The file as it is now, without a lock; empty if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return []
    return [LockedFile(path, (status.st_dev, status.st_ino), None)]


def lock_owner(path: Path) -> int | None:
    """The process that holds a flock on the file, from the kernel's list.

    None if there is none, if the process is in another container, or if there is no list.
    """
    try:
        status = path.stat()
        lines = _LISTED.read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF"
        parts = line.split()
        if len(parts) > 5 and parts[1] == "FLOCK" and parts[3] == "WRITE" and parts[5] == place:
            return int(parts[4])
    return None


def file_system(folder: Path) -> str:
    """The type of the file system, from Linux's list of mounts; empty if there is no list."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        _, place, fs_type, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if len(place) >= len(best) and folder.is_relative_to(place):
            best, kind = place, fs_type
    return kind


MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_LINE = re.compile(r'^(down_)?revision = "(\w+)"$', re.MULTILINE)
_VERSION = table("alembic_version", column("version_num"))
_KEPT = select(_VERSION.c.version_num).with_for_update(read=True, key_share=True)
_RELEASE = "release"

_PLACE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})


def file_of(url: URL | str) -> Path:
    """The file with links resolved: SQLite keeps its log file beside the real file."""
    return Path(make_url(url).database or "").resolve()


def acquire(lock: SqliteLock, url: str) -> None:
    """Raises StartupError where another process has the file, or it cannot be opened."""
    try:
        lock.acquire()
    except Held as held:
        raise StartupError(
            f"{held} serves {file_of(url)}: SQLite is for one API process; stop that one, "
            "run without --workers, or set TURNLOG_DATABASE_URL to another file or PostgreSQL"
        ) from None
    except OSError as error:
        raise unopened(url, error) from error


def unopened(url: str, error: BaseException) -> StartupError:
    """The start-up error for a driver's or the system's error."""
    parsed = make_url(url)
    cause = _cause(error)
    if parsed.get_backend_name() == "sqlite":
        place, todo = _file(parsed, cause)
    else:
        # The query may hold a password as well.
        place = parsed.set(query={}).render_as_string(hide_password=True)
        todo = "is PostgreSQL running there, and is TURNLOG_DATABASE_URL right?"
    if isinstance(cause, StoreFull):
        todo = "free disk space (docs/operations.md#the-disk-is-full)"
    return StartupError(f"the database cannot be opened: {place}: {_reason(cause)}; {todo}")


def _cause(error: BaseException) -> BaseException:
    """The driver's own error, without the two that SQLAlchemy and its adapter wrap around it."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return error
    return error.orig.__cause__ or error.orig


def _file(url: URL, error: BaseException) -> tuple[str, str]:
    """The file or folder concerned, and what to do."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if not isinstance(error, OSError) and code not in _PLACE:
        return str(file_of(url)), "is TURNLOG_DATABASE_URL right? (docs/operations.md#the-server-does-not-start)"
    place = getattr(error, "filename", None) or file_of(url)
    return str(place), "TURNLOG_DATABASE_URL must name a file in a folder that this user may write to"


def _reason(error: BaseException) -> str:
    """The message, without the number and file name that system errors add."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return next(iter(text.splitlines()), type(error).__name__)


@cache
def revision_head() -> str:
    """The revision that this code needs: the one without a successor. It is the format of all that is stored, and of
    what the processes of a store agree on: whoever changes any of it adds a revision."""
    revisions, followed = _named()
    return max(revisions - followed, default="")


def is_known(revision: str | None) -> bool:
    """Can this code serve such a database, or migrate it?"""
    return not revision or revision in _named()[0]


def instead(by: str | None) -> str:
    """What to do about a database at a revision that is not known; `by`: the release that brought it there."""
    if by is None:
        return "a version from before the first release made it: export it with the checkout that made it"
    return (
        f"release {by} made it, and this is {release()}: install {by} or newer, or restore the backup from "
        "before that upgrade"
    )


def require_known(revision: str | None, by: str | None = None) -> None:
    """Raises StartupError for a database of another version; `by` as in `instead`."""
    if not is_known(revision):
        raise StartupError(
            f"the database is at revision {revision}, this version needs {revision_head()}: {instead(by)}"
        )


def require_head(connection: Connection, lease_s: float | None = None) -> None:
    """Raises StartupError, which says how to get there, for a database at another revision than this code's.

    `lease_s`: it names the processes that serve the database, which lose their claims after so many seconds, too.
    """
    found, head = revision_of(connection), revision_head()
    if found == head:
        return
    require_known(found, release_of(connection))
    if found and lease_s is not None:
        require_unserved(connection, lease_s, _order(found))
    raise StartupError(
        f"the database is at revision {found or 'none'}, this version needs {head}: "
        "run `turnlog migrate` (in a checkout also `alembic upgrade head`)"
    )


def _order(found: str) -> str:
    return (
        f", which is at revision {found}; this version ({release()}) needs {revision_head()}: stop them, run `turnlog "
        "migrate`, then start this version"
    )


def change_revision(connection: Connection, lease_s: float) -> None:
    """A PostgreSQL store is about to be migrated: nobody registers before the transaction has ended. Raises
    StartupError while a process may be serving it."""
    found = connection.execute(select(_VERSION.c.version_num).with_for_update()).scalar_one()
    require_unserved(connection, lease_s, _order(found))


def keep_revision(tx: Tx) -> None:
    """Nobody migrates a PostgreSQL store before the transaction has ended. Raises StoreLost if somebody has since this
    process began, as when it was frozen for longer than its lease. On SQLite the file's lock does all that."""
    if not tx.is_remote:
        return
    row = tx.one(_KEPT, {})
    found = None if row is None else row[0]
    if found != revision_head():
        raise StoreLost(f"the database was migrated to revision {found}")


def note_release(connection: Connection) -> None:
    """This release has brought the database to its revision."""
    connection.execute(delete(store_meta).where(store_meta.c.key == _RELEASE))
    connection.execute(insert(store_meta).values(key=_RELEASE, value=release()))


def release_of(connection: Connection) -> str | None:
    """The release that brought the database to its revision; None from before the first one."""
    if not inspect(connection).has_table(store_meta.name):
        return None
    return connection.execute(select(store_meta.c.value).where(store_meta.c.key == _RELEASE)).scalar()


def upgrade(url: str) -> None:
    """Run the migrations that were installed with the code. Raises StartupError."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StartupError(str(error)) from None
    except SystemExit as error:  # the migrations' environment reports its errors so
        raise StartupError(str(error.code).removeprefix("turnlog: ")) from None


def _named() -> tuple[set[str], set[str]]:
    """All revisions, and those that have a successor."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for down, revision in _LINE.findall(path.read_text("utf-8")):
            names[bool(down)].add(revision)
    return names[False], names[True]


def revision_of(connection: Connection) -> str | None:
    """The database's revision; None if it has none yet."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    return connection.execute(select(_VERSION.c.version_num)).scalar()
