"""A way to a server that breaks: connections end after so many bytes of what the server says."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class CuttingRelay:
    """Passes bytes on to `port`; each reply ends after the next of `cuts` bytes, and then none do. `passed` is what a
    client was sent on each connection."""

    def __init__(self, port: int, *cuts: int) -> None:
        self._port = port
        self._cuts = list(cuts)
        self.made = 0
        self.passed: list[bytearray] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)

    @property
    def left(self) -> int:
        """Cuts that have not been made."""
        return len(self._cuts)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.made += 1
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client:
            with contextlib.suppress(OSError):
                self._downwards(client)
            with contextlib.suppress(OSError):
                # Closing alone would not reach the client while the other thread still reads from it.
                client.shutdown(socket.SHUT_RDWR)

    def _downwards(self, client: socket.socket) -> None:
        left = self._cuts.pop(0) if self._cuts else None
        passed = bytearray()
        self.passed.append(passed)
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            threading.Thread(target=self._upwards, args=(client, server), daemon=True).start()
            while data := server.recv(1 << 16):
                client.sendall(data[:left])
                passed += data[:left]
                if left is not None and (left := left - len(data)) <= 0:
                    return

    def _upwards(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> CuttingRelay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A listener that is only closed does not wake the thread that accepts from it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
