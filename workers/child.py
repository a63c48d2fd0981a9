"""A worker process: takes a job from shared memory, runs the one function it was started for, puts the result behind.

    python -m workers.child <socket fd> <segment fd> <package.module:function> <deadline, s> <memory, bytes>

The socket carries fixed headers, the segment all content: at CONTENT the job, behind it the body, behind that the
result. At 0 is a mark that the job has begun, so that the parent can tell a job that killed its child from a child
that was dead already.

    parent: JOB (job length, body length)       ─▶
                                                ◀─ child: ANSWER (outcome, offset, length); the first one is READY

It never outlives its parent for long. Idle, it reads the end of the socket. At work, even in C code that keeps the
GIL, a signal ends it: standard input is a pipe that only the parent holds, and the kernel reports its end; and
where that should fail, an alarm goes off behind the deadline.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import importlib
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from types import TracebackType

from workers.parse import PromptDiffers, Rejected
from workers.segment import Segment, room_for

JOB = struct.Struct("<QQ")
"""Lengths in bytes of job and body."""

CONTENT = 8
"""Where the job lies in the segment."""

WAITS, BEGUN = bytes(CONTENT), b"\1" + bytes(CONTENT - 1)
"""What lies before it."""

ANSWER = struct.Struct("<QQQ")
"""An Outcome, then offset and length in bytes of what goes with it."""

ALARM_MARGIN_S = 1.0
"""How much later than the parent a child ends itself, so that it is the parent who knows why."""

STDIN = 0

Function = Callable[[memoryview, memoryview], bytes]
"""(job, body) -> result. Raises Rejected, whose message the parent may show."""


NICE = 5
"""Below the event loop that serves everybody, where the two share a processor."""


class Outcome(enum.IntEnum):
    """What became of a job."""

    READY = 0
    RESULT = 1
    REJECTED = 2
    """With the message, in UTF-8."""

    PROMPT_DIFFERS = 3
    """The same for a `PromptDiffers`, which is another error to the caller."""

    OUT_OF_MEMORY = 4
    """The process ends: what a failed allocation left behind is not worth finding out."""

    FAULT = 5
    """The function raised what it should not have; the process ends."""


def main(arguments: list[str]) -> int:
    """Serve jobs until the parent closes its end. Returns the exit status: 0, or 1 after a job that failed."""
    channel_fd, segment_fd, name, deadline_s, memory_bytes = arguments
    _heed_signals()
    os.nice(NICE)
    module, _, attribute = name.partition(":")
    function: Function = getattr(importlib.import_module(module), attribute)
    with socket.socket(fileno=int(channel_fd)) as channel:
        worker = _Worker(channel, Segment(int(segment_fd)), _Memory(int(memory_bytes)), float(deadline_s))
        try:
            return worker.serve(function)
        except ConnectionError:
            return 0  # the parent went without having read the last answer


class _Worker:
    def __init__(self, channel: socket.socket, segment: Segment, memory: _Memory, deadline_s: float) -> None:
        self._channel = channel
        self._segment = segment
        self._memory = memory
        self._alarm_s = deadline_s + ALARM_MARGIN_S
        memory.allow_beside(segment.size)

    def serve(self, function: Function) -> int:
        self._answer(Outcome.READY)
        while header := self._channel.recv(JOB.size, socket.MSG_WAITALL):
            job_length, body_length = JOB.unpack(header)
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
            outcome, length = self._attempt(function, job_length, body_length)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._answer(outcome, CONTENT + job_length + body_length, length)
            if outcome in (Outcome.OUT_OF_MEMORY, Outcome.FAULT):
                return 1
        return 0

    def _attempt(self, function: Function, job_length: int, body_length: int) -> tuple[Outcome, int]:
        """Run one job and put what it gave behind the body; how it went, and that many bytes."""
        job_end = CONTENT + job_length
        end = job_end + body_length
        try:
            self._memory.allow_beside(self._segment.length())
            self._segment.fit()
            self._segment.write(0, BEGUN)
            try:
                outcome, result = Outcome.RESULT, self._call(function, job_end, end)
            except Rejected as refusal:
                outcome = Outcome.PROMPT_DIFFERS if isinstance(refusal, PromptDiffers) else Outcome.REJECTED
                result = str(refusal).encode(errors="backslashreplace")
            self._memory.allow_beside(max(self._segment.size, room_for(end + len(result))))
            self._segment.grow(end + len(result))
            self._segment.write(end, result)
        except Exception as error:  # noqa: BLE001 - the process's outermost edge
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
                return Outcome.OUT_OF_MEMORY, 0
            print(f"turnlog worker {os.getpid()}: {_place(error)}", file=sys.stderr, flush=True)
            return Outcome.FAULT, 0
        return outcome, len(result)

    def _call(self, function: Function, job_end: int, end: int) -> bytes:
        return function(self._segment.view(CONTENT, job_end), self._segment.view(job_end, end))

    def _answer(self, outcome: Outcome, offset: int = 0, length: int = 0) -> None:
        self._channel.sendall(ANSWER.pack(outcome, offset, length))


class _Memory:
    """Limits the address space to what the loaded program has, the segment, and `allowance` bytes for the job.

    Counted from what is loaded, because libraries reserve far more than they use, and differently on each machine.
    Without /proc (macOS, whose kernel does not enforce the limit either) there is none.
    """

    def __init__(self, allowance: int) -> None:
        self._beside = -1
        try:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
        except FileNotFoundError:
            self._limit = None
        else:
            self._limit = pages * resource.getpagesize() + allowance

    def allow_beside(self, segment_bytes: int) -> None:
        """Set the limit for a segment of this size, mapped or about to be."""
        if self._limit is None or segment_bytes == self._beside:
            return
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = self._limit + segment_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        self._beside = segment_bytes


def _heed_signals() -> None:
    """End with the parent and at the alarm, whatever was inherited; and not before the parent says so.

    A terminal or service manager signals the whole group while the parent still drains its work.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    for deadly in (signal.SIGALRM, signal.SIGIO):
        signal.signal(deadly, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGIO))
    fcntl.fcntl(STDIN, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(STDIN, fcntl.F_SETFL, fcntl.fcntl(STDIN, fcntl.F_GETFL) | os.O_ASYNC)


def _place(error: Exception) -> str:
    """Type and place of an error, for the log. Its message may hold content."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "nowhere"
    return f"{type(error).__qualname__} at {where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
