"""The keeper's loop: start servers, promote the spare, restart with backoff, pass on signals."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time

from turnlog.keeper.children import Child, Phase
from turnlog.keeper.options import ServeOptions

BACKOFF_S = 0.1, 5.0
"""First and longest wait before another process is started in place of one that did not live long."""

STEADY_S = 10.0
"""A process that lived this long did not die of its start: the backoff begins anew."""

GIVE_UP_S = 60.0
"""How long servers are restarted that cannot start, as while the database is away. Then the keeper ends as well."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """Supervises the servers. `run` returns the exit code, negative for a signal, as `subprocess` has it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._last_exit = ""
        self._has_served = False
        self._failing_since: float | None = None
        self._backoff_s = 0.0
        self._next_start_at = 0.0
        self._exit_code: int | None = None

    def run(self) -> int:
        with _SignalSocket() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            while self._exit_code is None or self._children:
                wait_s = self._start_missing() if self._exit_code is None else None
                for key, _ in self._selector.select(wait_s):
                    if key.data is None:
                        for number in signals.recv(256):
                            self._on_signal(number)
                    else:
                        self._read_status(key.data)
                self._reap()
        return self._exit_code

    def _active(self) -> list[Child]:
        return [child for child in self._children.values() if not child.is_spare]

    def _spare(self) -> Child | None:
        """One that has imported everything, where there is one."""
        spares = [child for child in self._children.values() if child.is_spare]
        return max(spares, key=lambda child: child.phase, default=None)

    def _start_missing(self) -> float | None:
        """Start the servers that are missing, and once all serve, a spare: it must not slow their start.

        Returns after how many seconds to try again; None: at the next event.
        """
        while len(self._active()) < self._options.servers:
            child = self._spare() or self._spawn()
            if child is None:
                return self._backoff_left_s()
            child.promote(self._last_exit)
        if self._spare() is not None or any(child.phase != Phase.SERVING for child in self._active()):
            return None
        return None if self._spawn() else self._backoff_left_s()

    def _backoff_left_s(self) -> float:
        return max(0.0, self._next_start_at - time.monotonic())

    def _spawn(self) -> Child | None:
        """None during the backoff, or where there is no room for a process."""
        if self._backoff_left_s():
            return None
        try:
            child = Child(self._options)
        except OSError as error:
            self._back_off()
            _say(f"no server process could be started ({error.strerror}); next try in {self._backoff_s:g} s")
            return None
        self._children[child.pid] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)
        return child

    def _back_off(self) -> None:
        self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_S[0]), BACKOFF_S[1])
        self._next_start_at = time.monotonic() + self._backoff_s

    def _read_status(self, child: Child) -> None:
        if not child.read_status():
            self._selector.unregister(child.control)
        elif child.phase == Phase.SERVING:
            self._has_served = True
            self._failing_since = None

    def _reap(self) -> None:
        """All children that have ended, also orphans, which a container leaves to its first process."""
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
                self._on_exit(child, os.waitstatus_to_exitcode(status))

    def _on_exit(self, child: Child, status: int) -> None:
        self._last_exit = child.record_exit(status)
        if self._exit_code is not None:
            return
        if child.age_s < STEADY_S:
            self._back_off()
        else:
            self._backoff_s = 0.0
        if child.phase == Phase.STARTING:
            self._on_failed_start(status)
        elif child.is_spare:
            _say(f"{self._last_exit} before it was needed; the next one starts in {self._backoff_s:g} s")

    def _on_failed_start(self, status: int) -> None:
        """It has logged why. A first start that fails ends the keeper; later failures may pass, and are retried."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        is_new = not self._has_served and status > 0
        is_long = now - self._failing_since > GIVE_UP_S and not any(
            child.phase == Phase.SERVING for child in self._children.values()
        )
        if is_new or is_long:
            self._shut_down(status)
            for one in self._active():
                one.signal(signal.SIGTERM)
        else:
            _say(f"{self._last_exit} before it served; next try in {self._backoff_s:g} s")

    def _on_signal(self, number: int) -> None:
        """Each stop is passed on: the second Ctrl-C tells servers not to wait for open requests."""
        if number not in STOPS:
            return
        if self._exit_code is None:
            self._shut_down(-number)
        for child in self._active():
            child.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _shut_down(self, code: int) -> None:
        """No more promotions, and connections are refused."""
        self._exit_code = code
        for descriptor in self._options.sockets:
            os.close(descriptor)
        for child in self._children.values():
            if child.is_spare:
                child.signal(signal.SIGKILL)


class _SignalSocket:
    """Signal numbers arrive through a socket, so that the loop misses none (`signal.set_wakeup_fd`)."""

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
