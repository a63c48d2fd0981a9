"""Runs a simulator as a separate process, for tests, the demo and benchmarks."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from ops.server import PORT, ROOT, OwnProcess, ServerDidNotStart


class SimulatorProcess(OwnProcess):
    """A running ``python -m ops.simulator``, as a context manager.

    ``arguments`` are its command line, as in ``SimulatorProcess("--dialect", "vllm", "--seed", "7")``. With a ``port``,
    a test can restart an engine at the same address.
    """

    def __init__(self, *arguments: str, port: int = 0, start_timeout_s: float = 20.0) -> None:
        super().__init__(
            [sys.executable, "-m", "ops.simulator", "--port", PORT, *arguments],
            Path(os.devnull),
            port=port,
            environment={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            start_timeout_s=start_timeout_s,
            stop_s=5.0,
        )

    def start(self) -> Self:
        """Start and wait for the line that it listens, since `/health` may be set to fail. Raises ServerDidNotStart."""
        process = self.spawn(self._command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE)
        self._process = process
        assert process.stdout is not None
        with process.stdout:
            line = self._first_line(process.stdout.fileno())
        if not line.startswith("listening "):
            self.stop()
            raise ServerDidNotStart(f"{' '.join(self._command)} said {line!r}")
        return self

    def _first_line(self, descriptor: int) -> str:
        deadline = time.monotonic() + self._start_timeout_s
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not text.endswith(b"\n") and selector.select(max(deadline - time.monotonic(), 0)):
                piece = os.read(descriptor, 4096)
                if not piece:
                    break
                text += piece
        return text.decode()
