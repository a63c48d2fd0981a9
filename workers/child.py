"""A worker process: takes a job from shared memory, runs its one function, and writes the result after the job.

    python -m workers.child <socket fd> <segment fd> <package.module:function> <deadline, s> <memory, bytes>

The socket carries fixed-size headers, the segment all content: at CONTENT the job, then the body, then the result.
At 0 is a mark that the job has begun, so that the parent can distinguish a job that killed its worker from a worker
that was dead before.

    parent: JOB (job length, body length)       ─▶
                                                ◀─ child: ANSWER (outcome, offset, length); the first one is READY

It never outlives its parent for long. Idle, it reads the end of the socket. During a job, even in C code that holds
the GIL, a signal ends it: standard input is a pipe that only the parent holds, and the kernel signals its end. If
that fails, an alarm goes off after the deadline.
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
"""Offset of the job in the segment."""

WAITS, BEGUN = bytes(CONTENT), b"\1" + bytes(CONTENT - 1)
"""The mark before it: the job waits, or has begun."""

ANSWER = struct.Struct("<QQQ")
"""An Outcome, then offset and length in bytes of the content that belongs to it."""

ALARM_MARGIN_S = 1.0
"""How much later than the parent's deadline the worker ends itself, so that the parent knows the reason."""

STDIN = 0

Function = Callable[[memoryview, memoryview], bytes]
"""(job, body) -> result. Raises Rejected, whose message the parent may show."""


NICE = 5
"""A lower priority than the event loop's, where the two share a processor."""


class Outcome(enum.IntEnum):
    """The outcome of a job."""

    READY = 0
    RESULT = 1
    REJECTED = 2
    """With the message, in UTF-8."""

    PROMPT_DIFFERS = 3
    """The same for `PromptDiffers`, a different error to the caller."""

    OUT_OF_MEMORY = 4
    """The process exits: its state after a failed allocation is unknown."""

    FAULT = 5
    """The function raised an unexpected error; the process exits."""


def main(arguments: list[str]) -> int:
    """Run jobs until the parent closes its end. Returns the exit status: 0, or 1 after a job that failed."""
    channel_fd, segment_fd, name, deadline_s, memory_bytes = arguments
    _set_up_signals()
    os.nice(NICE)
    module, _, attribute = name.partition(":")
    function: Function = getattr(importlib.import_module(module), attribute)
    with socket.socket(fileno=int(channel_fd)) as channel:
        worker = _Worker(channel, Segment(int(segment_fd)), _Memory(int(memory_bytes)), float(deadline_s))
        try:
            return worker.serve(function)
        except ConnectionError:
            return 0  # The parent has ended without reading the last answer.


class _Worker:
    def __init__(self, channel: socket.socket, segment: Segment, memory: _Memory, deadline_s: float) -> None:
        self._channel = channel
        self._segment = segment
        self._memory = memory
        self._alarm_s = deadline_s + ALARM_MARGIN_S
        memory.set_limit(segment.size)

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
        """Run one job and write its result after the body; returns the outcome and the result's length."""
        job_end = CONTENT + job_length
        end = job_end + body_length
        try:
            self._memory.set_limit(self._segment.length())
            self._segment.fit()
            self._segment.write(0, BEGUN)
            try:
                outcome, result = Outcome.RESULT, self._call(function, job_end, end)
            except Rejected as refusal:
                outcome = Outcome.PROMPT_DIFFERS if isinstance(refusal, PromptDiffers) else Outcome.REJECTED
                result = str(refusal).encode(errors="backslashreplace")
            self._memory.set_limit(max(self._segment.size, room_for(end + len(result))))
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
    """Limits the address space to the loaded program, the segment, and `allowance` bytes for the job.

    It counts from what is loaded, because libraries reserve far more than they use, differently on each machine.
    Without /proc (macOS, whose kernel does not enforce the limit anyway) there is no limit.
    """

    def __init__(self, allowance: int) -> None:
        self._segment_bytes = -1
        try:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
        except FileNotFoundError:
            self._limit = None
        else:
            self._limit = pages * resource.getpagesize() + allowance

    def set_limit(self, segment_bytes: int) -> None:
        """Set the limit for a segment of this size, mapped or about to be."""
        if self._limit is None or segment_bytes == self._segment_bytes:
            return
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = self._limit + segment_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        self._segment_bytes = segment_bytes


def _set_up_signals() -> None:
    """Exit with the parent and at the alarm, and ignore other signals to end.

    A terminal or service manager signals the whole group while the parent still finishes its work.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    for deadly in (signal.SIGALRM, signal.SIGIO):
        signal.signal(deadly, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGIO))
    fcntl.fcntl(STDIN, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(STDIN, fcntl.F_SETFL, fcntl.fcntl(STDIN, fcntl.F_GETFL) | os.O_ASYNC)


def _place(error: Exception) -> str:
    """Type and place of an error, for the log. Its message is left out: it may hold content."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "nowhere"
    return f"{type(error).__qualname__} at {where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
