"""Turnlog on a thread of the test's own process, so that the test can reach into it; all else goes over HTTP."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import uvicorn
from integration.stand import until

from app.main import create_app
from app.settings import Settings


class Hosted:
    """A running server."""

    def __init__(self, base_url: str, server: uvicorn.Server, app: Any) -> None:
        self.base_url = base_url
        self._server = server
        self._app = app

    @property
    def services(self) -> Any:
        return self._app.services


@contextlib.contextmanager
def hosted(database_url: str, *upstreams: str, **settings: Any) -> Iterator[Hosted]:
    """A server over a migrated SQLite file, stopped at the end."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # the server collects at its start, and what earlier tests left behind is not this one's
    app = create_app(
        Settings(database_url=database_url, upstreams=upstreams, workers=1, **{"client_reply": "verbatim", **settings})
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Hosted(f"http://127.0.0.1:{listening.getsockname()[1]}", server, app)
        finally:
            server.should_exit = True
            thread.join()
