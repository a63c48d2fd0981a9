"""A store that cannot be written when its server starts: it is read, and turns are taken again once it can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.clusters import ROLE, Cluster
from helpers.databases import run_module
from integration.stand import Stand, Talk, error_of, serving, until, user

from app.store.database import NO_ROOM
from fault.table import Tally
from fault.verified import acknowledgement, verified
from fault.volumes import Volume, volume
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

MIB = 1 << 20
FULL = "a full disk at the start"
READ_ONLY = "a database that takes no writes at the start"
CLOSED_S = 1.0
"""Payloads of closed sessions are the janitor's from then on: it meets the full disk as well."""


@dataclass
class Held:
    """What the server had when it was well: an open session, and a closed one with a reward."""

    stand: Stand
    open: Talk
    closed: Talk
    acknowledged: list[Any]

    def rows(self) -> list[Any]:
        """Of these two, without cursors, which know of what was written beside them until the disk was full."""
        talks = (self.open, self.closed)
        return [{**row, "cursor": None} for talk in talks for row in talk.rows()]


def held(stand: Stand) -> Held:
    talks = [stand.talk(), stand.talk()]
    replies = [(talk, talk.say("Hello")) for talk in talks]
    first, second = talks
    assert stand.http.put(f"{second.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(second.path).status_code == 204
    return Held(stand, first, second, [acknowledgement(talk.id, reply) for talk, reply in replies])


@pytest.fixture
def small() -> Iterator[Volume]:
    with volume(64 * MIB) as made:
        yield made


@pytest.fixture
def own(engine: SimulatorProcess, small: Volume, tmp_path: Path) -> Iterator[Stand]:
    environment = {
        "TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{small.folder / 'turnlog.db'}",
        "TURNLOG_CLOSED_REPLAY_TTL_S": str(CLOSED_S),
    }
    with serving(tmp_path, engine.base_url, environment=environment) as made:
        yield made


def log_of(stand: Stand) -> str:
    return stand.server.log_path.read_text(errors="replace")


def died_of_it(stand: Stand, small: Volume) -> None:
    """The disk fills up under the server until not even its heartbeat has room, and it is killed."""
    small.fill()
    while stand.http.post("/sessions", json={"metadata": {"text": "x" * 5000}}).status_code == 200:
        pass
    until(lambda: "a heartbeat was missed" in log_of(stand), 60)
    stand.server.kill()


def lost_its_shared_memory(stand: Stand, small: Volume) -> None:
    """Beside that, what SQLite's connections share is gone, as after a boot, and what it took is taken."""
    died_of_it(stand, small)
    Path(f"{stand.server.environment['TURNLOG_DATABASE_URL'].partition(':///')[2]}-shm").unlink()
    small.fill()


def refused(stand: Stand, talk: Talk, kept: Held, code: tuple[int, str], retry_after: str) -> None:
    """Whatever would write, and nothing of it reaches an engine."""
    before = talk.generations()
    answers = [
        talk.chat([*talk.messages, user("More")]),
        stand.http.post("/sessions", json={}),
        stand.http.put(f"{kept.closed.path}/reward", json={"reward": 0.5}),
        stand.http.delete(talk.path),
        stand.http.delete(kept.closed.path, params={"erase": "true"}),
    ]
    assert {error_of(answer) for answer in answers} == {code}
    assert {answer.headers["retry-after"] for answer in answers} == {retry_after}
    assert "x-should-retry" not in answers[0].headers, "the SDKs' own rule is to come again"
    assert talk.generations() == before


def read(stand: Stand, kept: Held, rows: list[Any], why: str) -> None:
    """Everything that was there before, and what is the matter."""
    assert stand.http.get("/health").status_code == 200
    until(lambda: stand.http.get("/ready").is_success)
    answer, writing = stand.http.get("/ready"), stand.http.get("/ready", params={"writes": 1})
    found = answer.json()
    assert [(one.status_code, one.json()["status"]) for one in (answer, writing)] == [
        (200, "ready"),
        (503, "not_ready"),
    ]
    assert (found["checks"]["database"], found["checks"]["writable"]) == (True, False)
    assert found["read_only"] == why
    assert kept.rows() == rows
    assert len(kept.open.state()["records"]) == 1
    assert kept.closed.types()[-1] in ("SessionClosed", "BlobsTombstoned")
    for path in ("/sessions", "/metrics", "/ui/api/sessions", "/engines"):
        assert stand.http.get(path).status_code == 200
    assert stand.http.get("/ui/api/overview").json()["read_only"] == why


def well_again(stand: Stand, kept: Held, tally: Tally, lines: int = 1) -> None:
    """Without a restart."""
    until(lambda: stand.http.get("/ready", params={"writes": 1}).status_code == 200)
    assert stand.http.get("/ready").json()["read_only"] is None
    until(lambda: stand.http.get("/ui/api/overview").json()["read_only"] is None)
    kept.acknowledged.append(acknowledgement(kept.open.id, kept.open.say("More")))
    assert stand.http.delete(kept.open.path).status_code == 204
    assert stand.http.delete(kept.closed.path, params={"erase": "true"}).status_code == 204
    said = log_of(stand)
    assert len(re.findall("read-only: ", said)) == lines
    assert len(re.findall("writable again", said)) == lines
    assert "Traceback" not in said, said[:3000]
    kept.acknowledged = [one for one in kept.acknowledged if one.session_id != kept.closed.id]
    verified(stand, kept.acknowledged, tally)


@pytest.mark.fault(4, FULL)
@pytest.mark.parametrize(
    "how",
    [died_of_it, lost_its_shared_memory],
    ids=lambda how: how.__name__,
)
def test_a_server_starts_on_a_full_disk_and_takes_turns_when_there_is_room(
    own: Stand, small: Volume, tally: Tally, how: Callable[[Stand, Volume], None]
) -> None:
    kept = held(own)
    rows = kept.rows()
    how(own, small)
    tally.tried += 1
    own.server.migrate()
    own.server.start()
    pid = own.server.pid
    read(own, kept, rows, "the database is full")
    refused(own, kept.open, kept, (507, "store_full"), "30")
    assert small.free == 0
    message = own.http.post("/sessions", json={}).json()["error"]["message"]
    assert (message == NO_ROOM) == (how is not died_of_it), "both ways to be read-only are tried"
    small.clear()
    well_again(own, kept, tally)
    assert own.server.pid == pid


@pytest.mark.fault(4, FULL)
def test_a_schema_that_must_change_is_told_that_there_is_no_room(own: Stand, small: Volume, tally: Tally) -> None:
    held(own)
    lost_its_shared_memory(own, small)
    tally.tried += 1
    at_head = run_module("alembic", "upgrade", "head", environment=own.server.environment)
    assert (at_head.returncode, at_head.stderr.count("the disk is full")) == (0, 1), at_head.stderr
    down = run_module("alembic", "downgrade", "-1", environment=own.server.environment)
    assert (down.returncode, down.stderr.count("turnlog: the disk is full: free disk space")) == (1, 1), down.stderr
    small.clear()
    own.server.start()
    verified(own)


@pytest.mark.fault(4, READ_ONLY)
def test_a_server_starts_on_a_database_that_takes_no_writes(
    engine: SimulatorProcess, cluster: Cluster, tmp_path: Path, tally: Tally
) -> None:
    """As managed services set it when their disk is full."""
    with serving(tmp_path, engine.base_url, environment={"TURNLOG_DATABASE_URL": cluster.url}) as stand:
        kept = held(stand)
        rows = kept.rows()
        stand.server.kill()
        cluster.sql(f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
        tally.tried += 1
        stand.server.start()
        why = stand.http.get("/ready").json()["read_only"]
        assert why
        assert kept.rows() == rows
        answer = kept.open.chat([*kept.open.messages, user("More")])
        assert error_of(answer) == (503, "store_unavailable")
        cluster.sql(f"ALTER ROLE {ROLE} RESET default_transaction_read_only")
        well_again(stand, kept, tally)
