"""An HTTP server of a test's own, in threads of its process: one function answers whatever it is asked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

Pairs = Sequence[tuple[str, str]]


class Asked(NamedTuple):
    """A request; the headers' names are in lower case."""

    method: str
    path: str
    headers: Pairs
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Answer(NamedTuple):
    """`Content-Length` is the body's, unless the headers name one."""

    body: bytes = b""
    headers: Pairs = (("Content-Type", "application/json"),)
    status: int = 200


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Answering

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = [(name.lower(), value) for name, value in self.headers.items()]
        answer = self.server.answer(Asked(self.command, self.path, headers, body))
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in answer.headers}:
            self.send_header("Content-Length", str(len(answer.body)))
        else:
            self.close_connection = True
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class Answering(ThreadingHTTPServer):
    """Listens inside `with`. Requests come from several threads."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Asked], Answer], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.base_url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, because it was killed or has waited long enough, is no fault of the server's."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
