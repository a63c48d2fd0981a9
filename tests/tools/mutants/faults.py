"""The list of faults, copies of a tree in which they are made, and a command that is run until it fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("list.txt")

MARK = "MUTANTS_JOB"
"""A variable of all processes of a run, by which those are found that it has left behind."""

LOOK_S = 0.2

_FAILED = re.compile(r"(?:^|schedule with )seed (\d+)|^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
"""What found the fault, in the output of the simulation and of pytest."""


class Fault(NamedTuple):
    """`before`, which the file `path` has once, is `after` instead. `equivalent` says why nobody could see that."""

    path: str
    area: str
    before: str
    after: str
    equivalent: str = ""

    @property
    def id(self) -> str:
        return f"{self.path}: {self.before!r} → {self.after!r}"

    def applied(self, source: str) -> str:
        """The file's text with the fault. Raises LookupError where `before` is not there, or more than once."""
        if source.count(self.before) != 1:
            raise LookupError(f"{source.count(self.before)} times there: {self.id}")
        return source.replace(self.before, self.after)


def read_list(file: Path = LIST) -> list[Fault]:
    """One fault a line, its parts between tabs; line ends in them are written `\\n`, backslashes twice."""
    return [Fault(*map(_unescaped, line.split("\t"))) for line in file.read_text().splitlines()]


def _unescaped(part: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], part)


class Copy:
    """A tree's files as hard links; a changed one is another file in their place."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.base = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.base.chmod(0o755)  # Databases run as other users.
        self.root = self.base / "tree"
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
    def broken(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault meanwhile. Raises LookupError."""
        file = self.root / fault.path
        text = fault.applied(file.read_text())
        file.unlink()
        file.write_text(text)
        self._forget(file)
        try:
            yield
        finally:
            self._link(fault.path)
            self._forget(file)

    @staticmethod
    def _forget(file: Path) -> None:
        """What was compiled of a file is told by time and size alone."""
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


class Outcome(NamedTuple):
    """`how`: "found", "hangs" (which counts as found), "passed", or "broken" (nothing starts: any test finds that).
    `what`: the seed or the test that found it, or the error with which nothing starts."""

    how: str
    seconds: float
    what: str = ""

    @property
    def is_found(self) -> bool:
        return self.how in ("found", "hangs")


def run(command: Sequence[str], copy: Copy, limit_s: float) -> Outcome:
    """Run a command in a copy until its first failure."""
    scratch = copy.base / "tmp"
    scratch.mkdir()
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(copy.root), "TMPDIR": str(scratch), MARK: mark}
    output, began = copy.base / "output", time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=copy.root, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        while True:
            code, seconds = process.poll(), round(time.monotonic() - began, 1)
            text = output.read_text(errors="replace")
            if (seen := _FAILED.search(text)) is not None:
                return Outcome("found", seconds, seen[1] or seen[2])
            if code is not None:
                last = text.strip().splitlines()[-1:] or [f"exit {code}"]
                return Outcome("passed", seconds) if code == 0 else Outcome("broken", seconds, last[0][:80])
            if seconds > limit_s:
                return Outcome("hangs", seconds)
            time.sleep(LOOK_S)
    finally:
        end_all(mark)
        process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def end_all(mark: str) -> None:
    """Kill every process of a run: also servers and databases that their tests have not stopped."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # It has ended, or is another user's.
