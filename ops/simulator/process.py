"""Start a simulator as a process of its own: for tests, the demo, benchmarks."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 5.0


class SimulatorDidNotStart(Exception):
    """The process ended, or said nothing in time."""


class SimulatorProcess:
    """A running ``python -m ops.simulator``, as a context manager.

    ``arguments`` are its command line, as in
    ``SimulatorProcess("--dialect", "vllm", "--seed", "7")``. ``port`` 0 picks a
    free one; naming one lets a test bring an engine back where it was.
    """

    def __init__(self, *arguments: str, port: int = 0, start_timeout_s: float = 20.0) -> None:
        self._arguments = arguments
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    @property
    def pid(self) -> int:
        """The process's id, for whoever measures it."""
        if self._process is None:
            raise SimulatorDidNotStart("not started")
        return self._process.pid

    def start(self) -> SimulatorProcess:
        """Start and wait until it listens. Raises :class:`SimulatorDidNotStart`."""
        command = [sys.executable, "-m", "ops.simulator", "--port", str(self._port), *self._arguments]
        environment = {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE)
        line = self._first_line(self._process)
        if not line.startswith("listening "):
            self.stop()
            raise SimulatorDidNotStart(f"{' '.join(command)} said {line!r}")
        self.base_url = line.removeprefix("listening ").strip()
        return self

    def _first_line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        deadline = time.monotonic() + self._start_timeout_s
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n") and selector.select(max(deadline - time.monotonic(), 0)):
                piece = os.read(process.stdout.fileno(), 4096)
                if not piece:
                    break
                text += piece
        return text.decode()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(graceful=False)

    def stop(self) -> None:
        """Ask it to end, and insist after a few seconds."""
        self._end(graceful=True)

    def _end(self, graceful: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if graceful:
            process.terminate()
        else:
            process.kill()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> SimulatorProcess:
        """Start it."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()
