"""`turnlog serve` as a process of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.server import ServerProcess


class KeptServer(ServerProcess):
    """`turnlog serve` on a store that is migrated already; `pid` and the signals are the supervisor's."""

    def __init__(self, folder: Path, *, arguments: Sequence[str] = (), **more: Any) -> None:
        super().__init__(folder, **more)
        command = [sys.executable, "-m", "turnlog.cli", "serve", "--no-migrate", "--port", str(self.port)]
        self._command = [*command, *arguments]

    @property
    def started(self) -> list[int]:
        """The processes that have served or begun to, in order."""
        said = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", said)]
