"""A server that wants tokens, and clients that bring them, or others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from integration.places import Place
from integration.stand import Stand, Talk, serving, user

ADMIN, ADMIN_BEFORE = "canary-admin-token-current", "canary-admin-token-before"
SECRET, SECRET_BEFORE = "canary-session-secret-current", "canary-session-secret-before"

ENVIRONMENT = {
    "TURNLOG_ADMIN_TOKEN": f"{ADMIN}, {ADMIN_BEFORE}",
    "TURNLOG_SESSION_SECRET": f"{SECRET}, {SECRET_BEFORE}",
    "TURNLOG_UPSTREAM_API_KEY": "canary-key-of-the-engines",
    "TURNLOG_ROUTER_WORKERS": "*.engines.invalid",
}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class Client(Talk):
    """One session, and who holds its token."""

    def __init__(self, stand: Stand, session_id: str, token: str) -> None:
        super().__init__(stand, session_id)
        self.token = token
        self.http = httpx.Client(base_url=stand.server.base_url, headers=bearer(token), timeout=20)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.http.request(method, path, **more)

    def chat_at(
        self, path: str, text: str = "Hello", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "simulator", "messages": [user(text)], **fields}
        return self.ask("POST", path, json=body, headers=headers)


CHAT = "/v1/chat/completions"


class Guarded:
    """A stand whose own client is the admin's; `stranger` has no token."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.admin = httpx.Client(base_url=stand.server.base_url, headers=bearer(ADMIN), timeout=20)
        self.stranger = stand.http
        self._clients: list[Client] = []

    def close(self) -> None:
        self.admin.close()
        for client in self._clients:
            client.http.close()

    def client(self, **body: Any) -> Client:
        """A new session, and a client with its token alone."""
        response = self.admin.post("/sessions", json=body)
        assert response.status_code == 200, response.text
        made = response.json()
        self._clients.append(Client(self.stand, made["session_id"], made["token"]))
        return self._clients[-1]

    def events(self, session_id: str) -> str:
        """A session's whole log as the admin reads it."""
        response = self.admin.get(f"/sessions/{session_id}/events")
        assert response.status_code == 200, response.text
        return response.text


class Team:
    """Who holds the token of a run."""

    def __init__(self, guarded: Guarded, run: str) -> None:
        self.run = run
        self.token: str = guarded.admin.post(f"/runs/{run}/token").json()["token"]
        self.http = httpx.Client(base_url=guarded.stand.server.base_url, headers=bearer(self.token), timeout=20)

    def session(self, **body: Any) -> str:
        made = self.http.post("/sessions", json=body)
        assert made.status_code == 200, made.text
        session_id: str = made.json()["session_id"]
        return session_id

    def chat(self, session_id: str, text: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": "simulator", "messages": [user(text)], **fields}
        return self.http.post(f"/sessions/{session_id}{CHAT}", json=body)


@contextlib.contextmanager
def guarded_serving(place: Place, *upstreams: str, environment: Mapping[str, str] | None = None) -> Iterator[Guarded]:
    with serving(place, *upstreams, environment={**ENVIRONMENT, **(environment or {})}) as stand:
        made = Guarded(stand)
        try:
            yield made
        finally:
            made.close()


def raw(port: int, *lines: str, body: bytes = b"", endless: bytes = b"", source: str = "") -> tuple[int, bytes]:
    """A request's lines as they are written here; the status of the reply, and all that came.

    `endless` is sent in place of the head's end. `source` is the address to come from.
    """
    end = endless or b"Connection: close\r\n\r\n"
    head = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
    with socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0)) as connection:
        connection.sendall(head + end + body)
        return reply_on(connection)


def reply_on(connection: socket.socket) -> tuple[int, bytes]:
    """Read to the end; status 0 where nothing came."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            came += piece
    return (int(came.split(b" ", 2)[1]) if came else 0), came
