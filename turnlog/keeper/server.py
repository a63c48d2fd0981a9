"""`python -m turnlog.keeper.server OPTIONS DESCRIPTOR`: a server that imports everything, then waits to be promoted.

Until then it opens no database and accepts no connection. It ends when its keeper does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading

from turnlog.keeper.children import READY, SERVING
from turnlog.keeper.options import BACKLOG, ServeOptions
from turnlog.server_code import put_on_path

log = logging.getLogger("turnlog.keeper")

KEEPER_GONE = 70
"""The exit code of a server whose keeper died; nobody sees it."""


class ControlSocket:
    """This server's end. A thread reads it, so that a busy event loop does not delay the end when the keeper dies."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._promoted = threading.Event()
        self._reason = ""
        threading.Thread(target=self._listen, name="turnlog-keeper", daemon=True).start()

    def _listen(self) -> None:
        # A keeper that dies before it has read what was sent to it resets the connection.
        with contextlib.suppress(ConnectionError), self._control.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self._reason = line.strip()
                self._promoted.set()
        os._exit(KEEPER_GONE)

    def wait_for_promotion(self) -> str:
        """Report that everything is imported, and wait. Returns how the server before this one ended, or nothing."""
        self._control.send(READY)
        if not self._promoted.is_set():
            log.info("process %d waits to take over", os.getpid())
        self._promoted.wait()
        return self._reason

    def report_serving(self) -> None:
        self._control.send(SERVING)


def main() -> None:
    gc.disable()  # what is imported stays
    put_on_path()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = ServeOptions.from_json(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    for descriptor in (*options.sockets, control.fileno()):
        os.set_inheritable(descriptor, False)  # not the worker processes'
    serve(options, ControlSocket(control))


def serve(options: ServeOptions, control: ControlSocket) -> None:
    import uvicorn

    from app.api.connection import KEEP_ALIVE_S

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._log_started_message(sockets or [])
            control.report_serving()

    config = uvicorn.Config(
        "app.main:app",
        host=options.host,
        port=options.port,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        # The peer's address decides who is served without a token: no header may change it.
        proxy_headers=False,
        # A line a request costs more than the routing; what a session went through is in its log.
        access_log=False,
        timeout_graceful_shutdown=options.stop_s,
    )
    config.load()
    config.get_loop_factory()
    _warm()
    gc.enable()
    reason = control.wait_for_promotion()
    if reason:
        log.warning("%s; process %d takes over", reason, os.getpid())
    Server(config).run([socket.socket(fileno=descriptor) for descriptor in options.sockets])


def _warm() -> None:
    """What a start needs beyond what `app.main` imports, and a collector that does not look at all of it again."""
    from app.main import app

    app.warm()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
