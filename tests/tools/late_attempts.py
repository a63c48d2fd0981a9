"""`python -m tests.tools.late_attempts`: first attempts that lie unread at a server which is frozen or killed.

Two `turnlog serve` share a PostgreSQL. A client's first attempts go to one whose process is frozen; the client gives up
and tries again at the other, which answers. Then the first goes on, or is killed and its successor takes what waits in
the listening queue, and the client continues from what it was told. Each way is a history of its session, a mark of its
retries, a route (a proxy keeps its connection when its client has gone) and what becomes of the process.

    lost       a turn that was answered 200 is not in the store as it was given
    undone     the client cannot continue from it
    doubled    generations that nobody asked for

All are 0, but for the ways that docs/concepts.md names (`named`): behind a proxy, an attempt whose retry says nothing
about it is a new request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from app.store.database import Database
from app.store.dialect import StorePoints
from ops.server import KeptServer
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged, verify

HISTORIES, MARKS = ("linear", "tree"), ("counted", "keyed", "none")
ROUTES, ENDS = ("direct", "proxied"), ("frozen", "killed")

TIMEOUT_S = 60.0

PATIENCE_S = 0.5
"""After which a client gives its first attempts up: clients wait longer."""

LEASE_S = "2"

Message = dict[str, Any]


class Way(NamedTuple):
    """`route`: does the connection end with the client, or does a proxy keep it? `end`: that of the frozen process."""

    history: str
    mark: str
    route: str
    end: str

    @property
    def is_named(self) -> bool:
        """Does docs/concepts.md say that it generates twice?"""
        return self.route == "proxied" and (self.mark == "none" or (self.mark == "counted" and self.history == "tree"))


class Result(msgspec.Struct):
    """What became of a way's sessions. `late`: attempts that lay unread."""

    way: Way
    late: int = 0
    lost: int = 0
    undone: int = 0
    doubled: int = 0

    def __str__(self) -> str:
        faults = f"lost {self.lost}  undone {self.undone}  doubled {self.doubled}"
        named = "  named" if self.way.is_named else ""
        return f"{' '.join(f'{part:8}' for part in self.way)} late {self.late:4}  {faults}{named}"

    @property
    def faults(self) -> int:
        """Behind a proxy a doubled turn of a linear session undoes the one before it: both are named."""
        return self.lost + (0 if self.way.is_named else self.undone + self.doubled)


class Talk:
    """A session whose second turn is asked for by attempts that come late, and one that is answered."""

    def __init__(self, way: Way, number: int) -> None:
        self.way = way
        self.id = f"late-{'-'.join(way)}-{number}"
        self.path = f"/sessions/{self.id}/v1/chat/completions"
        self.late = 1 + number % 2
        self.messages: list[Message] = []
        self.acknowledged: list[Acknowledged] = []

    def begin(self, server: httpx.Client) -> None:
        created = server.post("/sessions", json={"session_id": self.id, "history": self.way.history})
        assert created.status_code == 200, created.text
        assert self.say(server, "One")
        self.messages.append({"role": "user", "content": "Two"})

    def say(self, server: httpx.Client, text: str) -> bool:
        """A turn that nothing disturbs; False if it is refused."""
        self.messages.append({"role": "user", "content": text})
        return self._answered(server.post(self.path, content=self.body))

    def retry(self, server: httpx.Client) -> None:
        """Ask for the second turn again, until it is answered."""
        deadline = time.monotonic() + TIMEOUT_S
        for attempt in itertools.count(self.late):
            if self._answered(server.post(self.path, content=self.body, headers=self.headers(attempt))):
                return
            assert time.monotonic() < deadline, f"{self.id} is not answered"
            time.sleep(0.1)

    @property
    def body(self) -> bytes:
        return json.dumps({"model": "simulator", "messages": self.messages}).encode()

    def headers(self, attempt: int) -> Mapping[str, str]:
        """How the client marks its attempt; it counts from 0."""
        marks = {"counted": {"x-stainless-retry-count": str(attempt)}, "keyed": {"idempotency-key": self.id}}
        return {"content-type": "application/json", **marks.get(self.way.mark, {})}

    def request(self, port: int, attempt: int) -> bytes:
        """The bytes of an attempt."""
        fields = {"host": f"127.0.0.1:{port}", **self.headers(attempt), "content-length": str(len(self.body))}
        head = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        return "\r\n".join(head).encode() + self.body

    def _answered(self, reply: httpx.Response) -> bool:
        if reply.status_code != 200:
            return False
        self.messages.append(reply.json()["choices"][0]["message"])
        turn, content = int(reply.headers["x-turnlog-turn"]), hashlib.sha256(reply.content).hexdigest()
        self.acknowledged.append(Acknowledged(self.id, turn, content))
        return True


class Site:
    """Two servers on one store. `stuck` is the one whose process is frozen, `other` answers."""

    def __init__(self, url: str, folder: Path, engine: SimulatorProcess) -> None:
        environment = {"TURNLOG_LEASE_S": LEASE_S, "TURNLOG_WORKERS": "1", "TURNLOG_CLIENT_REPLY": "verbatim"}
        more: dict[str, Any] = {"upstreams": [engine.base_url], "database_url": url, "environment": environment}
        self.url = url
        self.stuck, self.other = (KeptServer(folder, **more) for _ in range(2))
        self.engine = engine

    def round(self, route: str, end: str, sessions: int) -> list[Result]:
        """All attempts of one route lie unread at once."""
        ways = [Way(history, mark, route, end) for history in HISTORIES for mark in MARKS]
        talks = [Talk(way, number) for way in ways for number in range(sessions)]
        with (
            httpx.Client(base_url=self.stuck.base_url, timeout=TIMEOUT_S) as stuck,
            httpx.Client(base_url=self.other.base_url, timeout=TIMEOUT_S) as other,
        ):
            for number, talk in enumerate(talks):
                talk.begin(other if number % 2 else stuck)
            pid = self.stuck.started[-1]
            os.kill(pid, signal.SIGSTOP)
            kept = self._send_late(talks, route)
            time.sleep(PATIENCE_S)
            for talk in talks:
                talk.retry(other)
            os.kill(pid, signal.SIGCONT if end == "frozen" else signal.SIGKILL)
            for connection in kept:
                _read_answer(connection)
            self._until_idle()
            results = {way: Result(way) for way in ways}
            for talk in talks:
                result = results[talk.way]
                result.late += talk.late
                result.undone += not talk.say(other, "Three")
        self._count(talks, results)
        return list(results.values())

    def _send_late(self, talks: Sequence[Talk], route: str) -> list[socket.socket]:
        """The attempts that come late; the connections that a proxy keeps."""
        kept = []
        for talk in talks:
            for attempt in range(talk.late):
                connection = socket.create_connection(("127.0.0.1", self.stuck.port), TIMEOUT_S)
                connection.sendall(talk.request(self.stuck.port, attempt))
                if route == "proxied":
                    kept.append(connection)
                else:
                    connection.close()
        return kept

    def _until_idle(self) -> None:
        """Until everything that came before has been answered: the queue is served in its order."""
        quiet = 0
        deadline = time.monotonic() + TIMEOUT_S
        while quiet < 5:
            with contextlib.suppress(httpx.TransportError):
                quiet = quiet + 1 if httpx.get(f"{self.stuck.base_url}/health").json()["in_flight"] == 0 else 0
            assert time.monotonic() < deadline, "the server is not idle"
            time.sleep(0.1)

    def _count(self, talks: Sequence[Talk], results: Mapping[Way, Result]) -> None:
        seen = httpx.get(f"{self.engine.base_url}/sim/requests", params={"last": 20 * len(talks)}).json()
        generated = Counter(one["headers"].get("x-smg-routing-key") for one in seen)
        for talk in talks:
            asked_for = 2 + (len(talk.messages) == 6)  # The third was answered.
            results[talk.way].doubled += max(generated[talk.id] - asked_for, 0)
        lost = asyncio.run(self._lost([turn for talk in talks for turn in talk.acknowledged]))
        for talk in talks:
            results[talk.way].lost += lost[talk.id]

    async def _lost(self, acknowledged: Sequence[Acknowledged]) -> Counter[str]:
        database = Database(self.url, points=StorePoints())
        try:
            found = await verify(database, acknowledged)
        finally:
            await database.close()
        for problem in found.problems:
            print(f"{problem.session_id}: {problem.what}", file=sys.stderr)
        return Counter(problem.session_id for problem in found.problems)


def _counts(result: Result) -> tuple[int, int, int, int]:
    return result.late, result.lost, result.undone, result.doubled


def _read_answer(connection: socket.socket) -> None:
    """Whatever it is: the proxy has nobody to pass it to."""
    with connection:
        connection.settimeout(TIMEOUT_S)
        connection.recv(1 << 16)


@contextlib.contextmanager
def site(folder: Path | None = None) -> Iterator[Site]:
    """With a PostgreSQL and an engine of its own."""
    from ops.bench.primary import primary  # needs a package of the tests

    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-late-", dir=folder)))
        url = stack.enter_context(primary(folder)).new_database().url
        engine = stack.enter_context(SimulatorProcess("--keep-requests", "100000"))
        made = Site(url, own, engine)
        made.stuck.migrate()
        for server in (made.stuck, made.other):
            stack.callback(server.stop)
            server.start()
        yield made


def run(made: Site, attempts: int) -> list[Result]:
    """At least so many late attempts on each route."""
    sessions = -(-attempts // (len(HISTORIES) * len(MARKS) * len(ENDS)))
    return [result for route in ROUTES for end in ENDS for result in made.round(route, end, sessions)]


def main() -> int:
    parser = argparse.ArgumentParser(description="First attempts that come late, at two servers on PostgreSQL.")
    parser.add_argument("--attempts", type=int, default=200, help="at least so many on each route")
    parser.add_argument("--folder", type=Path, help="where the database is put")
    given = parser.parse_args()
    with site(given.folder) as made:
        results = run(made, given.attempts)
    for result in results:
        print(result)
    for what, is_named in (("named ways", True), ("all others", False)):
        some = [one for one in results if one.way.is_named is is_named]
        late, lost, undone, doubled = (sum(column) for column in zip(*map(_counts, some), strict=True))
        print(f"{what}: {late} late attempts, {lost} lost, {undone} undone, {doubled} doubled")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
