"""Anonymous memory shared by two processes; it is freed when both have ended, however they did."""

from __future__ import annotations

import contextlib
import mmap
import os

SMALLEST = 1 << 20
"""Smallest size in bytes. It is sparse: pages never written cost nothing."""


class Segment:
    """One region of shared memory, reused for every job: faulting in fresh pages costs more than the copy.

    Both sides map it and hold its file descriptor. They take turns, so it needs no lock: the active side may `grow` or
    `shrink` the file; the other calls `fit` before it reads anything.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`; `close` closes it. A file shorter than SMALLEST is extended."""
        self.fd = fd
        self.size = 0
        self._resident = 0
        self._map: mmap.mmap | None = None
        self.grow(SMALLEST)

    @classmethod
    def create(cls) -> Segment:
        """A new segment. OSError: no memory or descriptor left."""
        fd = os.memfd_create("turnlog") if hasattr(os, "memfd_create") else _unlinked_file()
        try:
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def length(self) -> int:
        """Length of the file in bytes, which `fit` would map."""
        return os.fstat(self.fd).st_size

    def grow(self, size: int) -> None:
        """Ensure room for `size` bytes; the file grows by powers of two."""
        if size > self.size:
            target = room_for(size)
            if self.length() < target:
                os.ftruncate(self.fd, target)
            self.fit()

    def fit(self) -> None:
        """Map the file at its current length, which the other side may have changed."""
        size = self.length()
        if size != self.size:
            self._unmap()
            self._map = mmap.mmap(self.fd, size)
            self.size = size
            self._resident = min(self._resident, size)

    def shrink(self, keep: int) -> None:
        """Free all but the first `keep` bytes (a power of two). The other side's mapping ends there too."""
        if self.size > keep:
            os.ftruncate(self.fd, keep)
            self.fit()

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copy `content` to `offset`, within the room made by `grow`.

        Existing pages are written through the mapping (three times faster than a system call), new ones by the kernel
        (twice as fast as faulting page after page).
        """
        end = offset + len(content)
        if end <= self._resident:
            self._mapped()[offset:end] = content
            return
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self.fd, rest, offset)
            rest, offset = rest[written:], offset + written
        self._resident = end

    def read(self, offset: int, length: int) -> bytes:
        """A copy of `length` bytes."""
        return self._mapped()[offset : offset + length]

    def view(self, start: int, end: int) -> memoryview:
        """A read-only view of the bytes from `start` to `end`, valid until the other side's turn."""
        return memoryview(self._mapped())[start:end].toreadonly()

    def close(self) -> None:
        """Unmap and close. The memory is freed when the other side has closed it too."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the segment is closed")
        return self._map

    def _unmap(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # A view still exists; the last one unmaps it.
                self._map.close()
            self._map, self.size = None, 0


def room_for(size: int) -> int:
    """The file length in bytes for `size` bytes of content: a power of two, at least SMALLEST."""
    return max(SMALLEST, 1 << max(0, size - 1).bit_length())


def _unlinked_file() -> int:
    """For macOS, which has no memfd_create: a temporary file that is already unlinked."""
    import tempfile  # Imported here: it would be a third of a worker process's imports.

    with tempfile.TemporaryFile(prefix="turnlog-") as file:
        return os.dup(file.fileno())
