"""A proxy that records what passes through it, and says things that only its own connection may say."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import httpx

OWN_HEADERS = (
    ("Server", "engine/1"),
    ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ("X-Engine-Id", "seven"),
    ("X-Request-Id", "of-the-engine"),
    ("Connection", "keep-alive, X-Hop"),
    ("X-Hop", "one"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authenticate", "Basic"),
    ("Set-Cookie", "engine=1"),
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, because it was killed or has waited long enough, is no fault of the proxy's."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class RecordingProxy:
    """Forwards to `target`, or where the client of a proxy wants to go; keeps requests' headers and replies' bytes."""

    def __init__(self, target: str) -> None:
        self.requests: list[list[tuple[str, str]]] = []
        self.replies: list[bytes] = []
        self.compresses = False
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                recorder.requests.append([(name.lower(), value) for name, value in self.headers.items()])
                reply = self.forwarded()
                recorder.replies.append(reply.content)
                self.answer(reply)

            def do_GET(self) -> None:
                """What a client that uses a proxy sends; before an engine, only generations are recorded."""
                if self.path.startswith("http://"):
                    self.do_POST()
                else:
                    self.answer(self.forwarded())

            do_PUT = do_GET

            def forwarded(self) -> httpx.Response:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                url = self.path if self.path.startswith("http://") else target + self.path
                kept = {"content-type": self.headers.get("content-type", "application/json")}
                with httpx.Client(trust_env=False, timeout=20) as client:
                    return client.request(self.command, url, content=body, headers=kept)

            def answer(self, reply: httpx.Response) -> None:
                self.send_response_only(reply.status_code)
                for name, value in OWN_HEADERS:
                    self.send_header(name, value)
                for name in ("content-type", "retry-after", "location"):
                    if name in reply.headers:
                        self.send_header(name, reply.headers[name])
                content = reply.content
                if recorder.compresses:
                    content = gzip.compress(content)
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Tests read the recording instead."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
