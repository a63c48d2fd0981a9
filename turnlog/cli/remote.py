"""The server, over HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from turnlog.cli.run import Failure, Usage

TRIES = 4
"""How often a GET is sent at most, where the server says when to come again."""

LONGEST_WAIT_S = 30.0

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
        if hasattr(socket, name)
    ),
]
"""A log that is followed may be silent for hours; a host that vanished is noticed all the same."""


class Refused(Failure):
    """The server's own error: its status, its stable code, its message."""

    def __init__(self, status: int, code: str, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.error_code = code
        self.body = body


class Unreachable(Failure):
    """No connection, or one that ended before the answer was whole."""


class Remote:
    """One server. No environment proxies and no `.netrc`: the token goes nowhere else."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises Usage where `url` is no HTTP URL, or the token is none that a header can hold."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise Usage(f"--url: {error}") from None
        if parsed.userinfo:
            raise Usage("--url holds a name or a password: use --token")
        if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
            raise Usage(f"--url: {url!r} is not an http:// or https:// URL")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise Usage("the token holds characters that a header cannot hold")
        self.url = str(parsed).rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            # To read the machine's certificates takes longer than most commands.
            transport=httpx.HTTPTransport(verify=parsed.scheme == "https", socket_options=_KEEPALIVE),
            timeout=httpx.Timeout(60, connect=5),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> Any:
        """The JSON of a GET; parameters that are None are left out. Raises Refused, Unreachable."""
        given = {name: value for name, value in parameters.items() if value is not None}
        for attempt in range(1, TRIES + 1):
            response = self._send("GET", path, params=given)
            wait = _wait(response)
            if wait is None or attempt == TRIES:
                break
            time.sleep(wait)
        return self._json(response)

    def send(self, method: str, path: str, **more: Any) -> Any:
        """What changes something is sent once. The JSON of the answer; None where it has no body."""
        return self._json(self._send(method, path, **more))

    @contextmanager
    def stream(self, path: str, parameters: Mapping[str, Any], *, silent: bool = False) -> Iterator[httpx.Response]:
        """A GET whose body is read piece by piece; `silent`: it may be silent for as long as it likes.

        Raises Refused, Unreachable; reading the body raises Unreachable too.
        """
        timeout = httpx.Timeout(None if silent else 60, connect=5)
        given = {name: value for name, value in parameters.items() if value is not None}
        try:
            with self._http.stream("GET", path, params=given, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused(response)
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        match error:
            case httpx.ConnectError():
                why = f"cannot connect to {self.url} ({error}): is the server running, and is --url right?"
            case httpx.TimeoutException():
                why = f"{self.url} did not answer in time"
            case _:
                why = f"the connection to {self.url} ended before the answer was whole ({type(error).__name__})"
        return Unreachable(why)

    def _json(self, response: httpx.Response) -> Any:
        if response.status_code >= 300:
            raise _refused(response)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise Failure(f"{self.url} answers {response.url.path} with what is no JSON: is it Turnlog?") from None


def session_path(session_id: str, rest: str = "") -> str:
    """An id with a `/` stays one part of the path, and is then an id that no session has."""
    return f"/sessions/{quote(session_id, safe='')}{rest}"


def _wait(response: httpx.Response) -> float | None:
    """Seconds that the server asks to be left alone; None where it does not."""
    text = response.headers.get("retry-after", "")
    if response.status_code not in (429, 503) or not text.isdecimal():
        return None
    return min(float(text), LONGEST_WAIT_S)


def _refused(response: httpx.Response) -> Refused:
    try:
        body = response.json()
    except ValueError:
        body = None
    match body:
        case {"error": {"code": str(code), "message": str(message)}}:
            return Refused(response.status_code, code, message, body)
        case dict():
            return Refused(response.status_code, "no_code", response.reason_phrase, body)
    return Refused(response.status_code, "no_code", f"{response.reason_phrase or 'an answer'}: is it Turnlog?", {})
