"""Notes for a test module which of the service's functions its tests call, in whatever process: see `reach`.

It is loaded before pytest loads it as a plugin: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent
APP = f"{ROOT}{os.sep}app{os.sep}"
NOTES = os.environ.get("MUTANTS_NOTES")


class Noted:
    """Calls of one process since the module of its tests began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.began = time.monotonic()
        self.look()

    def look(self) -> None:
        """Read which module's tests run now."""
        self._seen: set[object] = set()
        self.module = ""
        with contextlib.suppress(OSError):
            self.module = (self._folder / "now").read_text()

    def begin(self, module: str) -> None:
        now = time.monotonic()
        if self.module:
            self.write(f"seconds {now - self.began:.2f}")
        self.began = now
        (self._folder / "now").write_text(module)
        self.look()

    def write(self, line: str) -> None:
        with (self._folder / self.module).open("a") as file:
            file.write(f"{line}\n")

    def called(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code in self._seen:
            return
        self._seen.add(code)
        if self.module and code.co_filename.startswith(APP):
            name = ".".join(part for part in code.co_qualname.split(".") if not part.startswith("<"))
            self.write(f"{code.co_filename[len(APP) - 4 :]} {name}")


if NOTES is not None:
    noted = Noted(Path(NOTES))
    sys.settrace(noted.called)
    threading.settrace(noted.called)
    os.register_at_fork(after_in_child=noted.look)


def pytest_runtest_setup(item: Any) -> None:
    """Is called before each test."""
    module = str(item.path.relative_to(ROOT)).replace(os.sep, ".")
    if noted.module != module:
        noted.begin(module)


def pytest_sessionfinish() -> None:
    noted.begin("")
