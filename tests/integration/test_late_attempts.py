"""Requests whose clients have gone before they are read, and replies that were cut by a reset."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest

from integration.stand import Stand, Talk, until, user

RETRY = {"x-stainless-retry-count": "1"}
RESET_AT_ONCE = struct.pack("ii", 1, 0)


def request(talk: Talk, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a chat whose reply has some ten KB."""
    sim = {"completion_tokens": 300, "reasoning": False, "tool_calls": False}
    body = json.dumps(talk.body([*talk.messages, user("Once")], sim=sim)).encode()
    fields = {"host": "127.0.0.1", "content-length": str(len(body)), **(headers or {})}
    head = [f"POST {talk.chat_path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(head).encode() + body


def connected(stand: Stand) -> socket.socket:
    address = httpx.URL(stand.server.base_url)
    return socket.create_connection((address.host, address.port), 30)


@contextlib.contextmanager
def frozen(stand: Stand) -> Iterator[None]:
    os.kill(stand.server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stand.server.pid, signal.SIGCONT)


def gone(stand: Stand) -> int:
    """How many turns the server has not begun because their clients had gone."""
    found = re.search(r'turnlog_turns_total\{outcome="client_disconnected"\} (\d+)', stand.http.get("/metrics").text)
    return 0 if found is None else int(found[1])


def closes(connection: socket.socket) -> None:
    connection.close()


def ends_its_sending(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def sends_more_and_closes(connection: socket.socket) -> None:
    """The end lies behind the beginning of another request."""
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    connection.close()


@pytest.mark.parametrize("by_header", [False, True])
@pytest.mark.parametrize("leaves", [closes, ends_its_sending, sends_more_and_closes])
def test_a_request_whose_client_has_gone_is_not_begun(
    stand: Stand, leaves: Callable[[socket.socket], None], by_header: bool
) -> None:
    talk = stand.talk()
    before = gone(stand)
    sent = request(talk)
    if by_header:
        path, name = talk.chat_path.encode(), talk.id.encode() + b"-named"
        sent = sent.replace(path, b"/v1/chat/completions").replace(b"host:", b"x-session-id: " + name + b"\r\nhost:")
    with frozen(stand):
        connection = connected(stand)
        connection.sendall(sent)
        leaves(connection)
    until(lambda: gone(stand) > before)
    connection.close()
    assert talk.types() == ["SessionCreated"]
    assert talk.generations() == 0
    assert stand.http.get(f"/sessions/{talk.id}-named").status_code == 404


def cut(stand: Stand, talk: Talk, headers: Mapping[str, str] | None = None, *, goes_on: bool = False) -> None:
    """Ask, read a part of the reply, and reset the connection; `goes_on`: after the whole reply and another request."""
    with connected(stand) as connection:
        connection.sendall(request(talk, headers))
        got = connection.recv(100)
        if goes_on:
            while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < length(got):
                got += connection.recv(1 << 16)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            connection.recv(1 << 16)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)


def length(got: bytes) -> int:
    return int(got.partition(b"content-length: ")[2].partition(b"\r\n")[0])


@pytest.mark.parametrize(
    ("history", "headers", "goes_on", "turn"),
    [
        ("tree", RETRY, False, "1"),
        ("tree", RETRY, True, "2"),
        ("tree", {}, False, "2"),
        ("linear", RETRY, False, "1"),
        ("linear", {}, False, "2"),
    ],
)
def test_a_reset_makes_a_delivery_unknown(
    stand: Stand, history: str, headers: Mapping[str, str], goes_on: bool, turn: str
) -> None:
    """Undelivered for a marked retry, until the connection's next request; delivered for one without a mark."""
    talk = stand.talk(history=history)
    cut(stand, talk, goes_on=goes_on)
    again = stand.http.post(talk.chat_path, content=request(talk).partition(b"\r\n\r\n")[2], headers=headers)
    assert (again.status_code, again.headers["x-turnlog-turn"]) == (200, turn)
