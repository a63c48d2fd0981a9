"""Which process an SQLite file belongs to: an exclusive flock(2) on the file itself, for as long as the process has it.

On Linux a flock and the locks of fcntl(2) that SQLite takes do not see each other, so this one is in nobody's way, and
it is on the file that is written, by whatever name that is opened. But the kernel takes a process's fcntl locks away
when the process closes *any* descriptor of the file. So the descriptor is opened before SQLite opens the file, is
closed after SQLite has closed it, and no child inherits it (Python opens all files close-on-exec).

`<file>.lock` is locked as well: releases that know no other lock look there. On network file systems, and elsewhere
than on Linux, the two kinds of lock exclude each other. There that file is all that is locked, and it is watched, as
the database is: whoever deletes it ends the server.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

log = logging.getLogger("turnlog.lock")

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "afs"})
"""File systems whose locks and shared memory SQLite's log of writes cannot rely on."""

_LISTED = Path("/proc/locks")


class Held(Exception):
    """Another process has the file; `pid` where the kernel tells."""

    def __init__(self, pid: int | None) -> None:
        super().__init__("another process" if pid is None else f"another process (pid {pid})")
        self.pid = pid


class _File(NamedTuple):
    """What a path led to, device and inode, and the descriptor that has its lock, if it is locked."""

    path: Path
    identity: tuple[int, int]
    handle: int | None

    def lost(self) -> str | None:
        """Why its path leads to it no more. Raises OSError."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{self.path} was deleted or moved"
        if (found.st_dev, found.st_ino) != self.identity:
            return f"{self.path} was replaced by another file"
        return None


class SqliteLock:
    """Take it before SQLite opens the file, and release it after SQLite has closed it.

    `create`: a file that is not there yet is made, for its user alone; otherwise only `<file>.lock` is locked then.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path = path
        self._beside = Path(f"{path.resolve()}.lock")
        self._create = create
        self._locked: list[_File] = []
        self._watched: list[_File] = []

    def acquire(self) -> None:
        """The file's folder is made. Raises Held, and OSError where that or the file cannot be written to."""
        try:
            _make(self._path.parent)
            if sys.platform == "linux" and file_system(self._beside.parent) not in REMOTE:
                self._lock(self._path, create=self._create)
                self._watched = list(self._locked)
                self._lock_beside()
            else:
                self._lock(self._beside, create=True)
                self._watched = [*self._locked, *_found(self._path)]
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._watched = []
        while self._locked:
            handle = self._locked.pop().handle
            assert handle is not None
            # A child that is being started has the descriptor for some microseconds, and with it the lock.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def lost(self) -> str | None:
        """Why this process has lost the file; None while it is its own. Raises OSError where that cannot be told.

        Costs a look at the file's name: some microseconds.
        """
        return next((reason for file in self._watched if (reason := file.lost()) is not None), None)

    def _lock_beside(self) -> None:
        """A disk without room is no reason not to start: the lock on the database itself is what counts."""
        try:
            self._lock(self._beside, create=True)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.warning("%s cannot be made (%s): releases before this one are not kept off", self._beside, error)

    def _lock(self, path: Path, *, create: bool) -> None:
        """Until the file that was locked is the one that the path leads to: another may have taken its place."""
        while True:
            pid = holder(path)
            if pid is not None:
                # Without opening it: to close it again would end the locks of what else this process has open there.
                raise Held(pid)
            try:
                handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return
            found = os.fstat(handle)
            self._locked.append(_File(path, (found.st_dev, found.st_ino), handle))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Held(holder(path)) from None
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


def _found(path: Path) -> list[_File]:
    """The file as it is now, without a lock; nothing where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return []
    return [_File(path, (found.st_dev, found.st_ino), None)]


def holder(path: Path) -> int | None:
    """The process that has a flock on the file, by the kernel's list, which asks nobody.

    None where nobody has, the process is in another container, or there is no list.
    """
    try:
        found = path.stat()
        lines = _LISTED.read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF"
        parts = line.split()
        if len(parts) > 5 and parts[1] == "FLOCK" and parts[3] == "WRITE" and parts[5] == place:
            return int(parts[4])
    return None


def file_system(folder: Path) -> str:
    """Its kind, of Linux's list of mounts the longest that holds the folder; empty where there is no list."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        _, place, found, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if len(place) >= len(best) and folder.is_relative_to(place):
            best, kind = place, found
    return kind
