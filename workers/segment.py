"""Memory that two processes share and that has no name: when both are gone, so is it, whatever killed them."""

from __future__ import annotations

import contextlib
import mmap
import os

SMALLEST = 1 << 20
"""Bytes a segment has at least. It is sparse: pages that were never written cost nothing."""


class Segment:
    """One stretch of shared memory, used again for every job: to fault in fresh pages costs more than the copy.

    Both sides map it and hold its file descriptor. They take turns, so it needs no lock: the one whose turn it is
    may `grow` or `shrink` the file, the other calls `fit` before it looks at anything.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`, which `close` closes. A file shorter than SMALLEST is extended."""
        self.fd = fd
        self.size = 0
        self._resident = 0
        self._map: mmap.mmap | None = None
        self.grow(SMALLEST)

    @classmethod
    def create(cls) -> Segment:
        """A new one. OSError: no memory or no descriptor left."""
        fd = os.memfd_create("turnlog") if hasattr(os, "memfd_create") else _unlinked_file()
        try:
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def length(self) -> int:
        """Bytes of the file, which `fit` would map."""
        return os.fstat(self.fd).st_size

    def grow(self, size: int) -> None:
        """Make room for `size` bytes; the file grows by powers of two."""
        if size > self.size:
            target = room_for(size)
            if self.length() < target:
                os.ftruncate(self.fd, target)
            self.fit()

    def fit(self) -> None:
        """Map the file as long as it is now; the other side may have changed that."""
        size = self.length()
        if size != self.size:
            self._unmap()
            self._map = mmap.mmap(self.fd, size)
            self.size = size
            self._resident = min(self._resident, size)

    def shrink(self, keep: int) -> None:
        """Give back all but the first `keep` bytes (a power of two). The other side's mapping ends there, too."""
        if self.size > keep:
            os.ftruncate(self.fd, keep)
            self.fit()

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copy `content` to `offset`, inside what `grow` made room for.

        What has pages is copied through the mapping (three times faster than a system call), what has none is
        written by the kernel (twice as fast as to fault page after page).
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
        """The bytes from `start` to `end` where they are, read-only; valid until the other side has its turn."""
        return memoryview(self._mapped())[start:end].toreadonly()

    def close(self) -> None:
        """Unmap and close. What is left of the memory is freed when the other side has closed it, too."""
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
            with contextlib.suppress(BufferError):  # somebody still holds a view: unmapped with the last one
                self._map.close()
            self._map, self.size = None, 0


def room_for(size: int) -> int:
    """The length in bytes that a segment's file gets so that `size` bytes fit: a power of two, SMALLEST or more."""
    return max(SMALLEST, 1 << max(0, size - 1).bit_length())


def _unlinked_file() -> int:
    """macOS has no memfd_create: a temporary file that has already lost its name."""
    import tempfile  # not above: it is a third of what a worker process would load

    with tempfile.TemporaryFile(prefix="turnlog-") as file:
        return os.dup(file.fileno())
