"""Names of sessions that come again: generations, and the requests that belong to an ended one."""

from __future__ import annotations

import json
from typing import Any

import uuid

import httpx
import pytest

from integration.stand import CHAT, Stand, error_of, user

TOLD = "x-turnlog-session-id"


class Named:
    """A client that names its session in a header alone."""

    def __init__(self, stand: Stand, header: str = "x-session-id") -> None:
        self.stand = stand
        self.name = uuid.uuid4().hex
        self.headers = {header: self.name}

    def chat(self, text: str = "Hello", path: str = CHAT, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"model": "simulator", "messages": [user(text)]}
        return self.stand.http.post(path, json=body, headers={**self.headers, **sent})

    def finish(self, name: str | None = None) -> dict[str, Any]:
        response = self.stand.http.post("/finish_session", params={"session_id": name or self.name})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def generations(self) -> list[tuple[int, str, str, int]]:
        """Number, id, status and turns of each session of the name, the oldest first."""
        listed = self.stand.get("/sessions", name=self.name, order="asc")["sessions"]
        assert all(one["name"] == self.name for one in listed)
        return [(one["generation"], one["session_id"], one["status"], one["turns"]) for one in listed]


def test_a_finished_name_begins_another_session(stand: Stand) -> None:
    """The first has the name as its id, each later one an id like any other."""
    named = Named(stand)
    for number in (1, 2, 3):
        first = named.chat()
        assert first.status_code == named.chat("More").status_code == 200
        session_id = first.headers.get(TOLD, named.name)
        assert named.finish() == {"session_id": session_id, "name": named.name, "generation": number}
        assert named.finish() == {"session_id": session_id, "name": named.name, "generation": number}
    generations = named.generations()
    assert [(number, status, turns) for number, _, status, turns in generations] == [
        (1, "closed", 2),
        (2, "closed", 2),
        (3, "closed", 2),
    ]
    assert generations[0][1] == named.name
    for number, session_id, _, _ in generations:
        created, *_, closed = (
            stand.known(session_id if number > 1 else f"{named.name}").events()
            if number > 1
            else [
                json.loads(line)
                for line in stand.http.get(f"/sessions/{named.name}/events?generation=1").text.splitlines()
            ]
        )
        assert (created["name"], created["generation"], closed["reason"]) == (named.name, number, "finished")
