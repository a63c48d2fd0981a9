"""Turnlog on a thread of the test's own process, so that the test can reach into it; all else goes over HTTP."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
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

    def limit_pages(self, pages: int) -> None:
        """The database may not grow past so many pages, or what it has: it is full then, whatever the disk has."""
        self._on_writer(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchall())

    def _on_writer(self, function: Callable[[Any], object]) -> None:
        """SQLite keeps the limit with the connection, so it is the server's own that must be told."""
        writer = self.services.database._sqlite
        done = threading.Event()

        def asked() -> None:
            function(writer.connection)
            done.set()

        writer._jobs.put((asked, _Nobody()))
        assert done.wait(30)


class _Nobody:
    """Takes the place of a future that nobody waits for."""

    def get_loop(self) -> _Nobody:
        return self

    def call_soon_threadsafe(self, *_: object) -> None:
        return


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
