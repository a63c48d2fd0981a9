"""A copy of a tree for one job, in which faults are made: the tree itself is never changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools.mutants.edits import Mutant


class Copy:
    """A tree's files as hard links; a changed one is another file in their place."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.base = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.root = self.base / "tree"
        self.scratch = self.base / "tmp"
        self.scratch.mkdir()
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=tree, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (tree / name).is_file():
                self._link(name)

    def _link(self, name: str) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(self.tree / name, target)
        except OSError:
            shutil.copy2(self.tree / name, target)

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the fault meanwhile."""
        file = self.root / mutant.path
        text = mutant.applied(file.read_text())
        file.unlink()
        file.write_text(text)
        self._forget(file)
        try:
            yield
        finally:
            self._link(mutant.path)
            self._forget(file)

    @staticmethod
    def _forget(file: Path) -> None:
        """What was compiled of a file is told by time and size alone."""
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def clear(self) -> None:
        """Remove what a run has left behind."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
