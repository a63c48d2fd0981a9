"""Runs a simulator as a separate process, for tests, the demo and benchmarks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ops.server import PORT, ROOT, OwnProcess, is_healthy


class SimulatorProcess(OwnProcess):
    """A running ``python -m ops.simulator``, as a context manager.

    ``arguments`` are its command line, as in ``SimulatorProcess("--dialect", "vllm", "--seed", "7")``. With a ``port``,
    a test can restart an engine at the same address.
    """

    def __init__(self, *arguments: str, port: int = 0, start_timeout_s: float = 60.0) -> None:
        super().__init__(
            [sys.executable, "-m", "ops.simulator", "--port", PORT, *arguments],
            Path(os.devnull),
            port=port,
            environment={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            start_timeout_s=start_timeout_s,
            stop_s=5.0,
        )

    def answers(self) -> bool:
        return is_healthy(self.port, "/sim/stats")  # `/health` may be set to fail
