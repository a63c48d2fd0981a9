"""Where the processes of one supervisor put their metrics, so that a scrape that meets any of them tells of all.

`uvicorn --workers` spawns its workers, which share nothing but what multiprocessing gives them all: a secret key. A
folder is named by it. prometheus_client keeps each process's values in files there, and adds them up at a scrape. A
process holds a lock on a file of its own, which the kernel frees when it dies, so nobody takes a dead one for alive.

Whoever forks workers some other way (gunicorn) sets PROMETHEUS_MULTIPROC_DIR to an empty folder himself.
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
"""prometheus_client reads it once, when it is imported."""

PREFIX = "turnlog-metrics-"
_LOCK_SUFFIX = ".lock"


def folder() -> Path | None:
    """The folder that this process shares with others, made where need be; None for a process by itself."""
    given = os.environ.get(VARIABLE)
    if given:
        chosen = Path(given)
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    parent = multiprocessing.parent_process()
    if parent is None:
        return None
    # Servers of one parent with different stores are not one service.
    own = multiprocessing.current_process().authkey + os.environ.get("TURNLOG_DATABASE_URL", "").encode()
    name = f"{PREFIX}{parent.pid}-{hashlib.sha256(b'turnlog metrics' + own).hexdigest()[:32]}"
    made = Path(tempfile.gettempdir()) / name
    made.mkdir(mode=0o700, exist_ok=True)
    found = made.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{made} is not a folder of this user")
    os.environ[VARIABLE] = str(made)
    return made


class Presence:
    """This process's lock in the folder, from its making to `close` or its death."""

    def __init__(self, folder: Path) -> None:
        lock = folder / f"{os.getpid()}{_LOCK_SUFFIX}"
        unlocked = lock.with_suffix(".new")
        self._file = unlocked.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Under its name only now: a sibling that found it free would take this process for dead.
        unlocked.rename(lock)

    def close(self) -> None:
        self._file.close()


def dead(folder: Path) -> Iterator[int]:
    """The processes that have put something here and live no more; each is told once."""
    for path in folder.glob(f"*{_LOCK_SUFFIX}"):
        if _is_free(path):
            path.unlink(missing_ok=True)
            yield int(path.name.removesuffix(_LOCK_SUFFIX))


def sweep() -> None:
    """Delete the folders of supervisors that are gone with all of their workers."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.stat().st_uid == os.getuid() and not _is_alive(path) and _is_deserted(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(path: Path) -> bool:
    """Does the supervisor live, whose number the folder's name has?"""
    try:
        os.kill(int(path.name.removeprefix(PREFIX).partition("-")[0]), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True


def _is_deserted(folder: Path) -> bool:
    return all(_is_free(path) for path in folder.glob(f"*{_LOCK_SUFFIX}"))


def _is_free(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return False
    return True
