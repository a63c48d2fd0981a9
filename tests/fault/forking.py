"""A server that a test starts again and again, over a migrated database and each time with other settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.server import VERBATIM, ServerProcess

TESTS = Path(__file__).resolve().parents[1]


class ForkedServer(ServerProcess):
    """As `ServerProcess`, with one worker, and the engine's bytes for its clients, which are compared with the log.
    `application`, what uvicorn serves, may be a module of the tests."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        upstreams: Sequence[str],
        *,
        application: str = "app.main:app",
        **settings: str,
    ) -> None:
        own = {"TURNLOG_WORKERS": "1", **VERBATIM, "PYTHONPATH": str(TESTS)}
        environment: dict[str, Any] = {**own, **settings}
        super().__init__(
            folder, upstreams=upstreams, database_url=database_url, environment=environment, application=application
        )
        self._settings = self.environment

    def start(self, **settings: str) -> ForkedServer:
        """Start with further `settings`; one that still runs is stopped. Raises ServerDidNotStart."""
        self.stop()
        self.environment = {**self._settings, **settings}
        super().start()
        return self

    def ended(self) -> int:
        """Wait for the process to end by itself; its exit code, negative for a signal's number."""
        code = self.wait()
        assert code is not None, "it was not started"
        return code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
