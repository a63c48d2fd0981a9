"""Where a process keeps its metrics: numbers in its memory, or in a file of a folder that several processes share.

`turnlog serve` sets PROMETHEUS_MULTIPROC_DIR; whoever starts several processes otherwise sets it to an
empty folder. Each process maps a file of its own there and counts in it, so that a scrape of any process
covers all, and nothing is lost when one is killed. It holds a lock on its file, which the kernel frees
when it dies: a dead process is never taken for alive.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_SUFFIX = ".metrics"
_HEAD = struct.Struct("<Q")
_VALUE = struct.calcsize("d")

Series = tuple[str, str, int]
"""A series in a file: its metric's name, the value of its label, and how many numbers it has."""

_SERIES = msgspec.json.Decoder(list[Series])


def folder() -> Path | None:
    """The shared folder, created if necessary; None where none is set. Raises OSError."""
    given = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not given:
        return None
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given)


class MetricValues:
    """This process's numbers, which `values` reads and writes. They begin at 0, in the order of `series`.

    With a folder they are in a file there, locked until `close` or the end of the process.
    """

    def __init__(self, folder: Path | None, series: Sequence[Series]) -> None:
        size = _VALUE * sum(width for _, _, width in series)
        if folder is None:
            self._file = None
            self.values = memoryview(bytearray(size)).cast("d")
            return
        head = msgspec.json.encode(series)
        head += b" " * (-len(head) % _VALUE)
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        begun = path.with_suffix(".new")
        self._file = begun.open("w+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(_HEAD.pack(len(head)) + head + bytes(size))
        self._file.flush()
        whole = memoryview(mmap.mmap(self._file.fileno(), 0))
        self.values = whole[_HEAD.size + len(head) :].cast("d")
        # Renamed when it is locked and whole: another process would take it for a dead one's.
        begun.rename(path)

    def close(self) -> None:
        """Free the lock; the numbers stay as a dead process's."""
        if self._file is not None:
            # The map holds the same open file, so closing alone would keep the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def read(folder: Path, name: str = "*") -> Iterator[tuple[bool, dict[tuple[str, str], list[float]]]]:
    """Of each process that has counted here: does it live, and the numbers of each of its series by metric
    and label. A file of another version is read by its own names. `name` is a pattern of the files' names."""
    for path in sorted(folder.glob(name + _SUFFIX)):
        with path.open("rb") as file:
            is_alive = _is_locked(file.fileno())
            content = file.read()
        (length,) = _HEAD.unpack_from(content)
        values = memoryview(content)[_HEAD.size + length :].cast("d")
        numbers: dict[tuple[str, str], list[float]] = {}
        place = 0
        for metric, label, width in _SERIES.decode(content[_HEAD.size : _HEAD.size + length]):
            numbers[metric, label] = list(values[place : place + width])
            place += width
        yield is_alive, numbers


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
