"""The folder in which several processes share their metrics, so that a scrape of any one covers all.

`turnlog serve` sets PROMETHEUS_MULTIPROC_DIR; whoever starts several processes otherwise sets it to an empty folder.
prometheus_client keeps each process's values in files there, and adds them up at a scrape. Each process locks a file of
its own: the kernel frees the lock when the process dies, so a dead process is never taken for alive.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_LOCK_SUFFIX = ".lock"


def folder() -> Path | None:
    """The shared folder, created if necessary; None where none is set. Raises OSError."""
    given = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not given:
        return None
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given)


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


def _is_unlocked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
