"""`python -m turnlog.keeper.server PLAN DESCRIPTOR`: a server that imports everything, and then waits to be needed.

Until it is told to serve it opens no database and accepts no connection. It ends when its keeper does, in any case.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading

from turnlog.keeper.children import IMPORTED, SERVES
from turnlog.keeper.plan import BACKLOG, Plan

log = logging.getLogger("turnlog.keeper")

KEEPER_GONE = 70
"""The exit code that nobody sees."""


class Orders:
    """What the keeper says is read on a thread: its death must not wait for an event loop that is busy."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._told = threading.Event()
        self._reason = ""
        threading.Thread(target=self._listen, name="turnlog-keeper", daemon=True).start()

    def _listen(self) -> None:
        with self._control.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self._reason = line.strip()
                self._told.set()
        os._exit(KEEPER_GONE)

    def wait(self) -> str:
        """Say that all is imported, wait until told to serve, and return why."""
        self._control.send(IMPORTED)
        if not self._told.is_set():
            log.info("process %d waits to take over", os.getpid())
        self._told.wait()
        return self._reason

    def serves(self) -> None:
        self._control.send(SERVES)


def main() -> None:
    gc.disable()  # what is imported stays
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    plan = Plan.read(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    for descriptor in (*plan.sockets, control.fileno()):
        os.set_inheritable(descriptor, False)  # not the worker processes'
    serve(plan, Orders(control))


def serve(plan: Plan, orders: Orders) -> None:
    import uvicorn

    from app.api.connection import KEEP_ALIVE_S

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._log_started_message(sockets or [])
            orders.serves()

    config = uvicorn.Config(
        "app.main:app",
        host=plan.host,
        port=plan.port,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        # The peer's address decides who is served without a token: no header may change it.
        proxy_headers=False,
        # A line a request costs more than the routing; what a session went through is in its log.
        access_log=False,
        timeout_graceful_shutdown=plan.stop_s,
    )
    config.load()
    config.get_loop_factory()
    _warm()
    gc.enable()
    reason = orders.wait()
    if reason:
        log.warning("%s; process %d takes over", reason, os.getpid())
    Server(config).run([socket.socket(fileno=descriptor) for descriptor in plan.sockets])


def _warm() -> None:
    """What a start needs beyond what `app.main` imports, and a collector that does not look at all of it again."""
    from app.main import app

    app.warm()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
