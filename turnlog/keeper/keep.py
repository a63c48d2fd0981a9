"""The keeper's loop: who serves, who is spare, what becomes of them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time

from turnlog.keeper.children import Child, Phase
from turnlog.keeper.plan import Plan

BACKOFF_S = 0.1, 5.0
"""First and longest wait before another process is started in place of one that did not live long."""

STEADY_S = 10.0
"""A process that lived so long did not die of its start."""

GIVE_UP_S = 60.0
"""For so long successors are tried that cannot start, as while a database is away. Then the keeper gives up, too."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """`run` returns the exit code, negative for a signal, as `subprocess` has it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._reason = ""
        self._has_served = False
        self._failing_since: float | None = None
        self._wait_s = 0.0
        self._start_at = 0.0
        self._code: int | None = None

    def run(self) -> int:
        with _woken() as wakes:
            self._selector.register(wakes, selectors.EVENT_READ)
            while self._code is None or self._children:
                wait_s = self._fill() if self._code is None else None
                for key, _ in self._selector.select(wait_s):
                    if key.data is None:
                        for number in wakes.recv(256):
                            self._heed(number)
                    else:
                        self._hear(key.data)
                self._reap()
        return self._code

    def _serving(self) -> list[Child]:
        return [child for child in self._children.values() if not child.is_spare]

    def _spare(self) -> Child | None:
        """One that has imported everything, where there is one."""
        spares = [child for child in self._children.values() if child.is_spare]
        return max(spares, key=lambda child: child.phase, default=None)

    def _fill(self) -> float | None:
        """Enough that serve, and once they do, one that waits: it is not to keep them from starting.

        Returns the seconds after which to come back, None where somebody else has to do something first.
        """
        while len(self._serving()) < self._plan.servers:
            child = self._spare() or self._start()
            if child is None:
                return self._too_early_by()
            child.serve(self._reason)
        if self._spare() is not None or any(child.phase != Phase.SERVES for child in self._serving()):
            return None
        return None if self._start() else self._too_early_by()

    def _too_early_by(self) -> float:
        return max(0.0, self._start_at - time.monotonic())

    def _start(self) -> Child | None:
        """None where it is too early after the last one that died, or there is no room."""
        if self._too_early_by():
            return None
        try:
            child = Child(self._plan)
        except OSError as error:
            self._back_off()
            _say(f"no server process could be started ({error.strerror}); next try in {self._wait_s:g} s")
            return None
        self._children[child.pid] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)
        return child

    def _back_off(self) -> None:
        self._wait_s = min(max(2 * self._wait_s, BACKOFF_S[0]), BACKOFF_S[1])
        self._start_at = time.monotonic() + self._wait_s

    def _hear(self, child: Child) -> None:
        if not child.hear():
            self._selector.unregister(child.control)
        elif child.phase == Phase.SERVES:
            self._has_served = True
            self._failing_since = None

    def _reap(self) -> None:
        """All that have ended, also what a container leaves to its first process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                if child.control in self._selector.get_map():
                    self._selector.unregister(child.control)
                self._mourn(child, os.waitstatus_to_exitcode(status))

    def _mourn(self, child: Child, status: int) -> None:
        self._reason = child.ended(status)
        if self._code is not None:
            return
        if child.age_s < STEADY_S:
            self._back_off()
        else:
            self._wait_s = 0.0
        if child.phase == Phase.STARTS:
            self._could_not_start(status)
        elif child.is_spare:
            _say(f"{self._reason} before it was needed; the next one starts in {self._wait_s:g} s")

    def _could_not_start(self, status: int) -> None:
        """It has said why. A wrong setting ends the service; what is only away for a while must not."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        is_new = not self._has_served and status > 0
        is_long = now - self._failing_since > GIVE_UP_S and not any(
            child.phase == Phase.SERVES for child in self._children.values()
        )
        if is_new or is_long:
            self._end(status)
            for one in self._serving():
                one.signal(signal.SIGTERM)
        else:
            _say(f"{self._reason} before it served; next try in {self._wait_s:g} s")

    def _heed(self, number: int) -> None:
        """A stop is passed on as often as it comes: the second Ctrl-C means that open requests are not waited for."""
        if number not in STOPS:
            return
        if self._code is None:
            self._end(-number)
        for child in self._serving():
            child.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _end(self, code: int) -> None:
        """Nobody takes over any more, and who connects is refused."""
        self._code = code
        for descriptor in self._plan.sockets:
            os.close(descriptor)
        for child in self._children.values():
            if child.is_spare:
                child.signal(signal.SIGKILL)


class _woken:
    """The numbers of signals come out of a socket, so that none is missed between a look and a wait."""

    def __enter__(self) -> socket.socket:
        self._out, self._into = socket.socketpair()
        self._out.setblocking(False)
        self._into.setblocking(False)
        signal.set_wakeup_fd(self._into.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda received, frame: None)
        return self._out

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._out.close()
        self._into.close()


def _say(line: str) -> None:
    print(f"turnlog: {line}", file=sys.stderr, flush=True)
