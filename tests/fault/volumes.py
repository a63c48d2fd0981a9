"""A small file system of the test's own, which can be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PIECE = bytes(64 << 10)


class Volume:
    """A mounted tmpfs; whatever grows on it past its size meets a full disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    @property
    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, left: int = 0) -> None:
        """Leave about so many bytes free."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.free > left:
                file.write(PIECE[: max(self.free - left, 1)])

    def clear(self) -> None:
        """All that `fill` took is free again."""
        self._ballast.unlink()


@contextlib.contextmanager
def volume(size: int) -> Iterator[Volume]:
    """Skips the test where this process may not mount anything."""
    with tempfile.TemporaryDirectory(prefix="turnlog-volume-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", folder]
        try:
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        Path(folder).chmod(0o777)
        try:
            yield Volume(Path(folder))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def give(folder: Path, *, like: Path) -> None:
    """Hand a folder and all that is in it to the user that another one belongs to."""
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, like.owner(), like.group())
