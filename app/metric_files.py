"""Manages the folder in which the processes of one supervisor share metrics, so that a scrape of any one covers all.

The workers of `uvicorn --workers` share only the secret key that multiprocessing gives them, so the folder is named by
a hash of it. prometheus_client keeps each process's values in files there, and adds them up at a scrape. Each process
locks a file of its own. The kernel frees the lock when the process dies, so a dead process is never taken for alive.

With another supervisor that forks workers (gunicorn), set PROMETHEUS_MULTIPROC_DIR to an empty folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client reads this variable once, when it is imported."""

PREFIX = "turnlog-metrics-"
_LOCK_SUFFIX = ".lock"


def folder() -> Path | None:
    """The shared folder, created if necessary; None for a single process. Raises PermissionError, OSError."""
    given = os.environ.get(VARIABLE)
    if given:
        chosen = Path(given)
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    parent = multiprocessing.parent_process()
    if parent is None:
        return None
    # Processes with different databases are different services, even if they have the same parent.
    own = multiprocessing.current_process().authkey + os.environ.get("TURNLOG_DATABASE_URL", "").encode()
    name = f"{PREFIX}{parent.pid}-{hashlib.sha256(b'turnlog metrics' + own).hexdigest()[:32]}"
    made = Path(tempfile.gettempdir()) / name
    made.mkdir(mode=0o700, exist_ok=True)
    found = made.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{made} is not a folder of this user")
    os.environ[VARIABLE] = str(made)
    return made


class ProcessLock:
    """This process's lock in the folder, held until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        lock = folder / f"{os.getpid()}{_LOCK_SUFFIX}"
        unlocked = lock.with_suffix(".new")
        self._file = unlocked.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Renamed after locking: another process that found it unlocked would take this one for dead.
        unlocked.rename(lock)

    def close(self) -> None:
        self._file.close()


def dead(folder: Path) -> Iterator[int]:
    """Numbers of the processes that have written here and have died; each is returned once."""
    for path in folder.glob(f"*{_LOCK_SUFFIX}"):
        if _is_unlocked(path):
            path.unlink(missing_ok=True)
            yield int(path.name.removesuffix(_LOCK_SUFFIX))


def delete_unused() -> None:
    """Delete the folders whose supervisor and workers have all ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.stat().st_uid == os.getuid() and not _has_supervisor(path) and _has_no_process(path):
                shutil.rmtree(path, ignore_errors=True)


def _has_supervisor(path: Path) -> bool:
    """Is the supervisor whose process number is in the folder's name alive?"""
    try:
        os.kill(int(path.name.removeprefix(PREFIX).partition("-")[0]), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True


def _has_no_process(folder: Path) -> bool:
    return all(_is_unlocked(path) for path in folder.glob(f"*{_LOCK_SUFFIX}"))


def _is_unlocked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return False
    return True
