"""The parent's side of one worker process: starts it, gives it one job at a time, knows when and why it ended.

    WorkerProcess ─▶ its segment (content), its socket (headers) ─▶ workers.child, a process

Workers are started with `subprocess` and their own environment: `multiprocessing` would pass on the parent's whole
environment, keys included, and import its main module again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from workers.child import ANSWER, BEGUN, CONTENT, JOB, WAITS, Outcome
from workers.segment import Segment

PIECE_BYTES = 2 << 20
"""Bytes copied before the event loop runs other tasks: a third of a millisecond. Most replies are smaller."""

KEEP_BYTES = 8 << 20
"""Bytes that a segment keeps between jobs. Most replies fit, in pages that are already mapped."""

START_S = 30.0
"""A worker that is not ready by then is killed."""

EXIT_S = 1.0
"""How long an idle worker may take to exit after its socket is closed."""

INHERITED = ("PATH", "LANG", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
"""Environment variables passed on from the parent, besides LC_*."""


class Reason(enum.Enum):
    """Why a worker ended during a job."""

    DIED = "died"
    DEADLINE = "took longer than {deadline_s:g} s"
    MEMORY = "ran out of memory"
    FAULT = "failed"
    """The function raised an unexpected error; the worker's log line has its type and place."""

    def describe(self, deadline_s: float) -> str:
        """As text that follows "a worker"."""
        return self.value.format(deadline_s=deadline_s)


class WorkerSettings(msgspec.Struct, frozen=True):
    """How workers are started: the function's `package.module:name`, limits in seconds and bytes."""

    function: str
    deadline_s: float
    memory_bytes: int


class WorkerEnded(Exception):
    """The worker ended. `reason` is None if it had not begun the job."""

    def __init__(self, reason: Reason | None) -> None:
        self.reason = reason


class WorkerProcess:
    """A worker process and its channel. `on_idle` is called when it is ready and after each job."""

    def __init__(self, settings: WorkerSettings, on_idle: Callable[[WorkerProcess], None]) -> None:
        """Start the process; it is not ready yet. OSError: no process, memory or descriptor left."""
        self._settings = settings
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.is_ready = False
        self.had_job = False
        self._in_use = asyncio.Lock()
        self._kill_reason: Reason | None = None
        self._answer: asyncio.Future[tuple[Outcome, int, int]] | None = None
        self._partial = b""
        with contextlib.ExitStack() as undo:
            self._segment = Segment.create()
            undo.callback(self._segment.close)
            self._socket, theirs = socket.socketpair()
            undo.callback(self._socket.close)
            with theirs:
                self._process = _spawn(settings, theirs.fileno(), self._segment.fd)
            undo.pop_all()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        self._timer = self._loop.call_later(START_S, self.kill, Reason.DEADLINE)

    @property
    def pid(self) -> int:
        """For the log."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Can it still take a job?"""
        return self._kill_reason is None and not self.ended.is_set()

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> tuple[Outcome, bytes]:
        """Run one job on a body of these pieces: RESULT, or a rejection with its message. Raises WorkerEnded.

        If cancelled, the worker goes on; its answer is received and frees it.
        """
        answer: asyncio.Future[tuple[Outcome, int, int]] | None = None
        async with self._in_use:
            try:
                await self._load(job, *pieces)
                answer = self._send(len(job), sum(map(len, pieces)))
                outcome, offset, length = await answer
                return outcome, await self._fetch(offset, length)
            finally:
                if answer is None or not answer.cancelled():
                    self._free()

    async def _load(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> None:
        if not self.usable:
            raise WorkerEnded(None)
        self._segment.grow(CONTENT + len(job) + sum(map(len, pieces)))
        at = since_yield = 0
        for piece in (WAITS + job, *pieces) if len(job) <= PIECE_BYTES else (WAITS, job, *pieces):
            with memoryview(piece) as content:
                for start in range(0, len(piece), PIECE_BYTES):
                    part = content[start : start + PIECE_BYTES]
                    if since_yield + len(part) > PIECE_BYTES:
                        since_yield = 0
                        await asyncio.sleep(0)
                    self._segment.write(at, part)
                    at, since_yield = at + len(part), since_yield + len(part)

    def _send(self, job_length: int, body_length: int) -> asyncio.Future[tuple[Outcome, int, int]]:
        if not self.usable:
            raise WorkerEnded(None)
        try:
            self._socket.send(JOB.pack(job_length, body_length))  # one header at a time always fits
        except OSError as error:
            self._ended()
            raise WorkerEnded(None) from error
        self._answer = self._loop.create_future()
        self._timer = self._loop.call_later(self._settings.deadline_s, self.kill, Reason.DEADLINE)
        return self._answer

    async def _fetch(self, offset: int, length: int) -> bytes:
        if length <= PIECE_BYTES:
            return self._segment.read(offset, length)
        whole = io.BytesIO()  # whose bytes are taken out without a last large copy
        for start in range(offset, offset + length, PIECE_BYTES):
            whole.write(self._segment.read(start, min(PIECE_BYTES, offset + length - start)))
            await asyncio.sleep(0)
        return whole.getvalue()

    def _readable(self) -> None:
        try:
            received = self._socket.recv(ANSWER.size - len(self._partial))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._ended()
            return
        self._partial += received
        if len(self._partial) == ANSWER.size:
            outcome, offset, length = ANSWER.unpack(self._partial)
            self._partial = b""
            self._answered(outcome, offset, length)

    def _answered(self, outcome: int, offset: int, length: int) -> None:
        self._timer.cancel()
        self.had_job = self.is_ready
        if outcome == Outcome.READY:
            self.is_ready = True
            self._free()
        elif outcome == Outcome.OUT_OF_MEMORY:
            self.kill(Reason.MEMORY)
        elif outcome == Outcome.FAULT:
            self.kill(Reason.FAULT)
        elif self._answer is None or offset + length > self._mapped_size():
            self.kill(Reason.DIED)  # An answer that no sound worker gives.
        elif self._answer.cancelled():
            self._free()
        else:
            self._answer.set_result((Outcome(outcome), offset, length))

    def _mapped_size(self) -> int:
        self._segment.fit()
        return self._segment.size

    def _free(self) -> None:
        """The job is over."""
        self._answer = None
        if self.usable:
            self._segment.shrink(KEEP_BYTES)
            self._on_idle(self)

    def kill(self, reason: Reason) -> None:
        """Kill the process; the waiting job gets the reason as soon as it has ended."""
        if self._kill_reason is None:
            self._kill_reason = reason
            self._process.kill()

    def _ended(self) -> None:
        """The other end is closed: the process is ending or has ended."""
        if self.ended.is_set():
            return
        self.close_socket()
        self._process.kill()
        if self._answer is not None:
            begun = self._segment.read(0, CONTENT) == BEGUN
            self.had_job |= begun
            if not self._answer.done():
                self._answer.set_exception(WorkerEnded(self._kill_reason or Reason.DIED if begun else None))
        self.ended.set()

    def close_socket(self) -> None:
        """Close the socket, upon which an idle worker exits."""
        self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def reap(self) -> str:
        """Wait until the process has ended, free its resources, and describe how it ended. May be called again.

        By polling, which works on every platform and event loop; after the socket is closed it takes milliseconds.
        """
        wait_s = 0.001
        while (status := self._process.poll()) is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)
        self._ended()
        async with self._in_use:
            self._segment.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._kill_reason is not None:
            return self._kill_reason.describe(self._settings.deadline_s)
        return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"

    async def shut_down(self) -> None:
        """Let the process exit, which an idle one does at once; kill it if it does not."""
        self.close_socket()
        try:
            async with asyncio.timeout(EXIT_S):
                await self.reap()
        except TimeoutError:
            self._process.kill()
            await self.reap()


def _spawn(settings: WorkerSettings, channel_fd: int, segment_fd: int) -> subprocess.Popen[bytes]:
    """Start the process. Its standard input is a pipe that only the parent holds: its end tells the worker that the
    parent is gone."""
    limits = (str(settings.deadline_s), str(settings.memory_bytes))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.child", str(channel_fd), str(segment_fd), settings.function, *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=(channel_fd, segment_fd),
        env=_environment(os.environ),
    )


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: none of our settings and keys; our modules come first; numpy starts no threads."""
    inherited = {name: value for name, value in ours.items() if name in INHERITED or name.startswith("LC_")}
    here = str(Path(__file__).resolve().parent.parent)
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *map(os.path.abspath, sys.path)])),
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
