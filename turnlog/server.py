"""`python -m turnlog.server OPTIONS DESCRIPTOR`: a server process, as `turnlog.supervisor` starts it.

It ends when its supervisor does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

from turnlog.server_code import put_on_path
from turnlog.supervisor import BACKLOG, ServeOptions

SUPERVISOR_GONE = 70
"""The exit code of a server whose supervisor died; nobody sees it."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the supervisor's is inherited
    put_on_path()
    options = ServeOptions.from_json(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    for descriptor in (*options.sockets, control.fileno()):
        os.set_inheritable(descriptor, False)  # not the worker processes'
    # A thread, so that a busy event loop does not delay the end.
    threading.Thread(target=_end_with_supervisor, args=(control,), name="turnlog-supervisor", daemon=True).start()

    import uvicorn
    from uvicorn.config import STARTUP_FAILURE

    from app.api.connection import KEEP_ALIVE_S

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                self._log_started_message(sockets or [])
                control.send(b"serving")

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
    server = Server(config)
    server.run([socket.socket(fileno=descriptor) for descriptor in options.sockets])
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _end_with_supervisor(control: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):  # it died before it had read what was sent
        control.recv(1)
    os._exit(SUPERVISOR_GONE)


if __name__ == "__main__":
    main()
