"""What tests of pausing share: orders to a fleet, and what became of its turns."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import httpx
from integration.stand import Api, Talk, until, user

from fleet.stands import Fleet

SLOW_S = 30.0
"""Longer than any test: such a generation ends by being aborted."""


class Client:
    """A request whose connection the test ends when it likes."""

    def __init__(self, talk: Talk, url: str, *, stream: bool = False, head: str = "", upto: int | None = None) -> None:
        body = json.dumps({"model": "simulator", "messages": [user("Hello")], "stream": stream}).encode()
        lines = [
            f"POST {talk.chat_path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            *head.splitlines(),
        ]
        where = urlsplit(url)
        self.socket = socket.create_connection((where.hostname, where.port))
        self.socket.settimeout(20)
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body[:upto])

    def until(self, wanted: bytes) -> bytes:
        """What comes, up to where `wanted` has."""
        found = b""
        while wanted not in found and (piece := self.socket.recv(1 << 16)):
            found += piece
        assert wanted in found, found
        return found

    def leave(self) -> None:
        self.socket.close()


def elsewhere(api: Api, talk: Talk) -> Talk:
    """The same conversation at another process."""
    found = api.known(talk.id)
    found.messages = list(talk.messages)
    return found


def new_name() -> str:
    """An adapter that no other test on the same database has."""
    return f"lora-{uuid.uuid4().hex[:8]}"


def order(api: Api, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = api.http.post(path, json=body or None)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


def adapter(api: Api, name: str) -> dict[str, Any]:
    response = api.http.get(f"/adapters/{name}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def of_fleet(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api.http.get("/fleet").json()
    return found


@contextlib.contextmanager
def paused_fleet(api: Api, **body: Any) -> Iterator[dict[str, Any]]:
    """The whole fleet, and whatever becomes of the test, nothing stays paused."""
    try:
        yield order(api, "/fleet/pause", **body)
    finally:
        api.http.post("/fleet/resume")


def speaking(fleet: Fleet, talk: Talk, **fields: Any) -> Future[httpx.Response]:
    """A turn in the background."""
    future: Future[httpx.Response] = fleet.meanwhile(talk.chat, [user("Hello")], **fields)
    return future


def until_held(api: Api, name: str, count: int = 1) -> None:
    until(lambda: adapter(api, name)["held"] == count)


def until_generating(fleet: Fleet, *talks: Talk) -> None:
    until(lambda: all(fleet.chats(talk.id) for talk in talks))


def finish(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    reason: str = response.json()["choices"][0]["finish_reason"]
    return reason
