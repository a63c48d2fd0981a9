"""The parent's side of one worker process: start it, give it one job at a time, know when and why it ended.

    Child ─▶ its segment (content), its socket (headers) ─▶ workers.child, a process

Children are started with `subprocess` and an environment of their own, because `multiprocessing` hands down all of the
parent's, keys included, and imports its main module again.
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
"""What is copied before the event loop gets its turn: a third of a millisecond, and no turn for most replies."""

KEEP_BYTES = 8 << 20
"""What a segment keeps between jobs. Most replies fit, and their pages are there already."""

START_S = 30.0
"""A child that is not ready by then never will be."""

EXIT_S = 1.0
"""How long an idle child may take to end once its socket is closed."""

INHERITED = ("PATH", "LANG", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
"""What a child needs of the parent's environment, beside LC_*."""


class Reason(enum.Enum):
    """Why a worker ended over a job."""

    DIED = "died"
    DEADLINE = "took longer than {deadline_s:g} s"
    MEMORY = "ran out of memory"
    FAULT = "failed"
    """The function raised what it should not have; the worker's log line has type and place."""

    def told(self, deadline_s: float) -> str:
        """In words that follow "a worker"."""
        return self.value.format(deadline_s=deadline_s)


class Settings(msgspec.Struct, frozen=True):
    """What every child is started with: the function's `package.module:name`, its limits in seconds and bytes."""

    function: str
    deadline_s: float
    memory_bytes: int


class Ended(Exception):
    """The child ended. `reason` is None where it had not begun with the job."""

    def __init__(self, reason: Reason | None) -> None:
        self.reason = reason


class Child:
    """A worker process and its channel. `on_idle` is called when it is ready and each time a job is over."""

    def __init__(self, settings: Settings, on_idle: Callable[[Child], None]) -> None:
        """Start it; it is not ready yet. OSError: no process, memory or descriptor left."""
        self._settings = settings
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.is_ready = False
        self.had_job = False
        self._in_use = asyncio.Lock()
        self._condemned: Reason | None = None
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
        self._timer = self._loop.call_later(START_S, self.condemn, Reason.DEADLINE)

    @property
    def pid(self) -> int:
        """For the log."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Can it still be given a job?"""
        return self._condemned is None and not self.ended.is_set()

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> tuple[Outcome, bytes]:
        """Have one job done on a body of these pieces: RESULT, or a refusal with its message. Raises Ended.

        Cancelled, it leaves the child at work; the answer is taken all the same and frees it.
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
            raise Ended(None)
        self._segment.grow(CONTENT + len(job) + sum(map(len, pieces)))
        at = since = 0
        for piece in (WAITS + job, *pieces) if len(job) <= PIECE_BYTES else (WAITS, job, *pieces):
            with memoryview(piece) as content:
                for start in range(0, len(piece), PIECE_BYTES):
                    part = content[start : start + PIECE_BYTES]
                    if since + len(part) > PIECE_BYTES:
                        since = 0
                        await asyncio.sleep(0)
                    self._segment.write(at, part)
                    at, since = at + len(part), since + len(part)

    def _send(self, job_length: int, body_length: int) -> asyncio.Future[tuple[Outcome, int, int]]:
        if not self.usable:
            raise Ended(None)
        try:
            self._socket.send(JOB.pack(job_length, body_length))  # one header at a time always fits
        except OSError as error:
            self._lost()
            raise Ended(None) from error
        self._answer = self._loop.create_future()
        self._timer = self._loop.call_later(self._settings.deadline_s, self.condemn, Reason.DEADLINE)
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
            self._lost()
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
            self.condemn(Reason.MEMORY)
        elif outcome == Outcome.FAULT:
            self.condemn(Reason.FAULT)
        elif self._answer is None or offset + length > self._now_mapped():
            self.condemn(Reason.DIED)  # no answer that a sound child gives
        elif self._answer.cancelled():
            self._free()
        else:
            self._answer.set_result((Outcome(outcome), offset, length))

    def _now_mapped(self) -> int:
        self._segment.fit()
        return self._segment.size

    def _free(self) -> None:
        """Its job is over."""
        self._answer = None
        if self.usable:
            self._segment.shrink(KEEP_BYTES)
            self._on_idle(self)

    def condemn(self, reason: Reason) -> None:
        """Kill it; whoever waits for its answer hears the reason as soon as it is gone."""
        if self._condemned is None:
            self._condemned = reason
            self._process.kill()

    def _lost(self) -> None:
        """The other end is closed: the process is ending, or has ended."""
        if self.ended.is_set():
            return
        self.hang_up()
        self._process.kill()
        if self._answer is not None:
            begun = self._segment.read(0, CONTENT) == BEGUN
            self.had_job |= begun
            if not self._answer.done():
                self._answer.set_exception(Ended(self._condemned or Reason.DIED if begun else None))
        self.ended.set()

    def hang_up(self) -> None:
        """Close the socket, which an idle child takes for the end."""
        self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def reap(self) -> str:
        """Wait until the process is gone, free what it had, tell how it ended. May be called again.

        By asking: what every platform and event loop can do. Once the socket is closed it is a matter of milliseconds.
        """
        wait_s = 0.001
        while (status := self._process.poll()) is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)
        self._lost()
        async with self._in_use:
            self._segment.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._condemned is not None:
            return self._condemned.told(self._settings.deadline_s)
        return f"died of signal {-status}" if status < 0 else f"ended with status {status}"

    async def leave(self) -> None:
        """Let it end, which an idle child does at once; kill it where it does not."""
        self.hang_up()
        try:
            async with asyncio.timeout(EXIT_S):
                await self.reap()
        except TimeoutError:
            self._process.kill()
            await self.reap()


def _spawn(settings: Settings, channel_fd: int, segment_fd: int) -> subprocess.Popen[bytes]:
    """The process. Its standard input is a pipe that only we hold: that it ends tells the child that we are gone."""
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
    """No setting and no key of ours; our modules before others of their names, and numpy starts no threads."""
    taken = {name: value for name, value in ours.items() if name in INHERITED or name.startswith("LC_")}
    here = str(Path(__file__).resolve().parent.parent)
    return {
        **taken,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *map(os.path.abspath, sys.path)])),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
