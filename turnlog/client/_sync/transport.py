# Made from turnlog/client/_async by `python -m ops.unasync`. Do not edit.
"""Requests to one server, with retries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx

from turnlog.client.address import address, authorization
from turnlog.client.lines import LARGEST, UNPACKED, Lines, Object, Place, decode, present, require_unpacked
from turnlog.client.waits import Waits
from turnlog.errors import NotTurnlog, TurnlogError, Unreachable, refusal

CONNECT_S = 5.0
SILENCE_S = 60.0
"""A followed log that is silent for this long is requested again, because its connection may be dead."""

SLOW_S = 600.0
"""Timeout of slow requests: erasing a large session, aborting a fleet's generations, an export's first row."""


class Transport:
    """`token` is sent with every request that has none of its own; `proxy` is the proxy's URL.

    Without `waits_for_start`, a server that has never answered is not retried.
    Raises ValueError for an invalid address, token or proxy.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None,
        patience_s: float,
        timeout_s: float,
        proxy: str | None = None,
        *,
        waits_for_start: bool = True,
    ) -> None:
        self.base_url = address(base_url)
        authorization(token)
        self.token = token
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._may_be_starting = waits_for_start
        self.proxy = proxy
        self._client = httpx.Client(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            # HTTP_PROXY is not read: prompts and tokens go only to the server, or to a proxy that was asked for.
            trust_env=False,
            proxy=proxy,
            # Loading the machine's certificates takes 0.1 s.
            verify=self.base_url.startswith("https:"),
        )

    def close(self) -> None:
        self._client.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        file: tuple[str, bytes] | None = None,
        parameters: Mapping[str, Any] | None = None,
        token: str | None = None,
        slow: bool = False,
        once: bool = False,
        key: str | None = None,
    ) -> tuple[int, bytes]:
        """Send a request and return the successful reply's status and body. Parameters that are None are left out.
        `file`: a body's media type and bytes, instead of JSON. `once`: do not repeat a request that may have
        arrived. `key` is sent as `Idempotency-Key`.

        Raises TurnlogError.
        """
        waits = Waits(self._patience_s)
        headers = self._headers(token) | ({} if key is None else {"idempotency-key": key})
        if body is not None:  # NaN is sent too: the server's refusal names the field that holds it
            file = "application/json", json.dumps(dict(body), separators=(",", ":")).encode()
        if file is not None:
            headers["content-type"] = file[0]
        while True:
            try:
                with self._client.stream(
                    method,
                    self.base_url + path,
                    content=None if file is None else file[1],
                    params=present(parameters or {}),
                    headers=headers,
                    timeout=self._timeout(SLOW_S if slow else self._timeout_s),
                ) as response:
                    self._may_be_starting = True
                    content = self._content(response)
                    if response.is_success:
                        return response.status_code, content
                    raise refusal(response.status_code, response.headers, content)
            except httpx.TransportError as cause:
                if once and not isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
                    raise self._unreachable(cause) from cause
                self._pause(waits, self._unreachable(cause), cause)
            except TurnlogError as error:
                self._pause(waits, error, None)

    def call(self, method: str, path: str, **options: Any) -> bytes:
        """The reply's body. Options as in `send`. Raises TurnlogError."""
        return (self.send(method, path, **options))[1]

    def erase(self, path: str, *, token: str | None = None) -> bool:
        """Erase what has this path. False: object storage or archives still have some of it, and the server goes on.

        Raises TurnlogError.
        """
        status, _ = self.send("DELETE", path, parameters={"erase": "true"}, token=token, slow=True)
        return status != HTTPStatus.ACCEPTED

    def read(self, method: str, path: str, **options: Any) -> Object:
        """The reply's JSON object. Options as in `send`. Raises TurnlogError."""
        return decode(self.call(method, path, **options))

    @contextmanager
    def stream(
        self, path: str, parameters: Mapping[str, Any], *, token: str | None = None, silence_s: float = SLOW_S
    ) -> Iterator[httpx.Response]:
        """The reply to a GET, to be read piece by piece; the timeout is the longest pause between two. Sent once.

        Raises TurnlogError, also while it is read.
        """
        try:
            with self._client.stream(
                "GET",
                self.base_url + path,
                params=present(parameters),
                headers=self._headers(token),
                timeout=self._timeout(silence_s),
            ) as response:
                self._may_be_starting = True
                if not response.is_success:
                    raise refusal(response.status_code, response.headers, self._content(response))
                require_unpacked(response.headers)
                yield response
        except httpx.TransportError as cause:
            raise self._unreachable(cause) from cause

    def lines(self, path: str, place: Place, token: str | None = None) -> Iterator[Object]:
        """The objects of a reply of lines; after a broken connection it is requested again from that place.

        Raises TurnlogError.
        """
        waits = Waits(self._patience_s)
        silence_s = SILENCE_S if place.is_open_ended else SLOW_S
        while True:
            error: TurnlogError = Unreachable("the server ended the stream")
            try:
                with self.stream(path, place.parameters(), token=token, silence_s=silence_s) as response:
                    place.begin(response.headers)
                    lines = Lines()
                    for data in response.iter_raw():
                        for line in lines.feed(data):
                            place.read(line)
                            waits.reset()
                            yield line
                if place.is_done:
                    return
            except TurnlogError as caught:
                if isinstance(caught, Unreachable) and place.has_all:
                    return  # the connection broke between the last line and the reply's end
                if isinstance(caught.__cause__, httpx.ReadTimeout) and place.is_open_ended:
                    continue
                error = caught
            self._pause(waits, error, error.__cause__)

    def _content(self, response: httpx.Response) -> bytes:
        """Raises NotTurnlog for more than LARGEST bytes, httpx.TransportError."""
        require_unpacked(response.headers)
        parts: list[bytes] = []
        size = 0
        for data in response.iter_raw():
            size += len(data)
            if size > LARGEST:
                raise NotTurnlog(f"a reply of more than {LARGEST} bytes: ask for less at once")
            parts.append(data)
        return b"".join(parts)

    def _pause(self, waits: Waits, error: TurnlogError, cause: BaseException | None) -> None:
        """Raises the error if another attempt cannot help."""
        is_worth_it = self._may_be_starting or not isinstance(error, Unreachable)
        wait_s = waits.after(error) if is_worth_it else None
        if wait_s is None:
            raise error from cause
        time.sleep(wait_s)

    def _headers(self, token: str | None) -> dict[str, str]:
        return UNPACKED | authorization(token or self.token)

    def _timeout(self, read_s: float) -> httpx.Timeout:
        return httpx.Timeout(read_s, connect=CONNECT_S)

    def _unreachable(self, cause: httpx.TransportError) -> Unreachable:
        match cause:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                why = f"cannot connect to {self.base_url} ({cause}): is the server running, and is its address right?"
            case httpx.TimeoutException():
                why = f"{self.base_url} did not answer in time"
            case _:
                why = f"the connection to {self.base_url} ended before the answer was whole ({type(cause).__name__})"
        return Unreachable(why)
