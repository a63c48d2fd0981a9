"""The live stream: every change of every session, also of another process, also after the connection was lost."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from integration.stand import Stand, until
from ops.server import ServerProcess


class Ended(Exception):
    """The server has nothing more to say."""


TIMEOUT_S = 60.0


class Stream:
    """What a browser hears, as (event, data); `cursor` is the last id."""

    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.iter_bytes()
        self._rest = b""
        self.cursor = ""

    def next(self) -> tuple[str, Any]:
        name, data = "", ""
        for line in self._lines():
            field, _, value = line.decode().partition(": ")
            match field:
                case "event":
                    name = value
                case "data":
                    data = value
                case "id":
                    self.cursor = value
                case "" if name:
                    return name, json.loads(data)
        raise Ended

    def _lines(self) -> Iterator[bytes]:
        """Not httpx's, which also end at characters that JSON leaves as they are, such as U+2028."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                yield line
            elif piece := next(self._pieces, b""):
                self._rest += piece
            else:
                return

    def until(self, wanted: str) -> Any:
        """The data of the next event of this name."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            name, data = self.next()
            if name == wanted:
                return data
        raise AssertionError(f"no event {wanted}")

    def versions(self, expected: dict[str, int]) -> list[dict[str, Any]]:
        """The rows until each of these sessions was told of as of its version."""
        rows: list[dict[str, Any]] = []
        seen: dict[str, int] = {}
        while any(seen.get(name, 0) < version for name, version in expected.items()):
            part = self.until("sessions")["rows"]
            rows += part
            seen |= {row["session_id"]: row["version"] for row in part}
        return rows


@contextlib.contextmanager
def listening(
    base_url: str, cursor: str | None = None, header: str | None = None, client: httpx.Client | None = None
) -> Iterator[Stream]:
    headers = {} if header is None else {"last-event-id": header}
    parameters = {} if cursor is None else {"cursor": cursor}
    stream = httpx.stream if client is None else client.stream
    with stream("GET", f"{base_url}/ui/api/live", params=parameters, headers=headers, timeout=TIMEOUT_S) as found:
        assert found.status_code == 200
        assert found.headers["content-type"].startswith("text/event-stream")
        assert found.headers["cache-control"] == "no-store"
        yield Stream(found)


def test_a_browser_hears_of_what_is_new_and_of_the_whole(stand: Stand) -> None:
    with listening(stand.server.base_url) as stream:
        name, hello = stream.next()
        assert (name, hello["cursor"]) == ("hello", stream.cursor)
        assert stream.until("overview").keys() == stand.http.get("/ui/api/overview").json().keys()
        talk = stand.talk(group_id="live")
        talk.say("Hello")
        rows = stream.versions({talk.id: len(talk.events())})
        [listed] = stand.http.get("/ui/api/sessions", params={"q": talk.id}).json()["sessions"]
        assert [row for row in rows if row["session_id"] == talk.id][-1] == listed
        assert stream.cursor != hello["cursor"]
        cursor = stream.cursor
    before, first = stand.talk(), {}
    for again in ({"cursor": cursor}, {"header": cursor}, {"cursor": "x", "header": cursor}):
        with listening(stand.server.base_url, **again) as stream:
            assert stream.next() == ("hello", {"cursor": cursor})
            first = {row["session_id"]: row["version"] for row in stream.versions({before.id: 1})}
            assert talk.id not in first
    assert stand.http.get("/ui/api/live", params={"cursor": "x"}).status_code == 400


def test_what_one_process_writes_the_listeners_of_another_hear(postgres_url: str, tmp_path: Path) -> None:
    """Also what is written while nobody listens: each session's last version, and with nothing twice at the end."""
    servers = [ServerProcess(tmp_path, database_url=postgres_url) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            server.launch()
            stack.callback(server.stop)
        until(lambda: all(server.answers() for server in servers), TIMEOUT_S)
        writer, other = (stack.enter_context(httpx.Client(base_url=one.base_url, timeout=20)) for one in servers)

        def write(names: list[str]) -> dict[str, int]:
            for name in names:
                writer.post("/sessions", json={"session_id": name}).raise_for_status()
                for value in (0.5, 1.0):
                    writer.put(f"/sessions/{name}/reward", json={"reward": value}).raise_for_status()
            return dict.fromkeys(names, 3)

        with listening(servers[1].base_url) as stream:
            stream.next()
            rows = stream.versions(write(["first"]))
            assert rows[-1]["reward"] == 1.0
            cursor = stream.cursor
        expected = write([f"s{number}" for number in range(50)])
        with listening(servers[1].base_url, cursor) as stream:
            assert stream.next() == ("hello", {"cursor": cursor})
            # A row is as new as its read, the cursor as the event that had it read: the first may be told again.
            rows = [row for row in stream.versions(expected) if row["session_id"] != "first"]
            assert {row["session_id"] for row in rows} == expected.keys()
            assert len(rows) == len(expected)
            page = other.get("/ui/api/sessions", params={"limit": 100}).json()
            listed = {row["session_id"]: row for row in page["sessions"]}
            assert {row["session_id"]: row for row in rows} == {name: listed[name] for name in expected}
