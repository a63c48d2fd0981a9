"""`python -m turnlog.server OPTIONS DESCRIPTOR`: a server process, as `turnlog.supervisor` starts it.

It ends when its supervisor does.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from turnlog.server_code import put_on_path
from turnlog.supervisor import BACKLOG, ServeOptions, in_url

if TYPE_CHECKING:
    from app.settings import Settings

SUPERVISOR_GONE = 70
"""The exit code of a server whose supervisor died, where the kernel did not kill it; nobody sees it."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the supervisor's is inherited
    put_on_path()
    options = ServeOptions.from_json(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    for descriptor in (*options.sockets, control.fileno()):
        os.set_inheritable(descriptor, False)  # not the worker processes'
    _end_with_supervisor(control)

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
    config.load()
    _prepare(options)
    server = Server(config)
    server.run([socket.socket(fileno=descriptor) for descriptor in options.sockets])
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _prepare(options: ServeOptions) -> None:
    """Bring the database up to date, and say where the server is. Exits with the line of what went wrong."""
    from app.errors import StartupError
    from app.main import app
    from app.store.database import bring_up_to_date

    if options.migrates:
        try:
            bring_up_to_date(app.settings.database_url)
        except StartupError as error:
            sys.exit(error.under("turnlog"))
    if options.greets:
        with contextlib.suppress(OSError):  # nobody reads the log
            for line in _greeting(app.settings, options.host, options.port):
                print(f"turnlog: {line}", file=sys.stderr, flush=True)


def _greeting(settings: Settings, host: str, port: int) -> list[str]:
    """The address and who has access."""
    url = f"http://{in_url(host, port)}"
    if settings.admin_token:
        access = "sign in with the first token of TURNLOG_ADMIN_TOKEN"
    elif _is_loopback(host):
        access = "no TURNLOG_ADMIN_TOKEN: every program on this machine is served, no other machine is"
    else:
        access = "no TURNLOG_ADMIN_TOKEN: other machines are only served from TURNLOG_TRUSTED_NETWORKS; set a token"
    engines = "no TURNLOG_UPSTREAMS: chats get 503 no_upstream until an engine is added (turnlog engines add URL)"
    return [f"{url}, the page at {url}/ui", access, *([] if settings.upstreams else [engines])]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _end_with_supervisor(control: socket.socket) -> None:
    """Let this process end when the other end of `control` is closed, whatever it is doing."""
    if sys.platform == "linux":
        # The kernel kills it, also while C code holds the interpreter, and a stopped one; but not if a thread waits for
        # the socket.
        fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([control], [], [], 0)[0]:  # it was closed before
            os._exit(SUPERVISOR_GONE)
    else:
        threading.Thread(target=_wait_for, args=(control,), name="turnlog-supervisor", daemon=True).start()


def _wait_for(control: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):  # it died before it had read what was sent
        control.recv(1)
    os._exit(SUPERVISOR_GONE)


if __name__ == "__main__":
    main()
