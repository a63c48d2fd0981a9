"""Retention applied once, and unused space given back: by commands, with the service's own code."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers import clusters
from helpers.databases import run_module
from sqlalchemy.engine import make_url

from integration.routing import BOTH, problems
from integration.stand import Stand, serving, user
from ops.compact import give_back
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

EXPERTS = {"layers": 48, "top_k": 8, "experts": 2**31 - 1}
"""Rows of expert ids that do not compress: about 1.5 KiB a token."""


@pytest.fixture
def own(sglang: SimulatorProcess, database_url: str, tmp_path: Path) -> Iterator[Stand]:
    """A server of the test's own, whose janitor does nothing by itself."""
    environment = {**BOTH, "TURNLOG_CLOSED_REPLAY_TTL_S": "off", "TURNLOG_DATABASE_URL": database_url}
    with serving(tmp_path, sglang.base_url, environment=environment) as made:
        yield made


def retained(stand: Stand, **settings: str) -> str:
    environment = {**stand.server.environment, **{f"TURNLOG_{name}": value for name, value in settings.items()}}
    done = run_module("ops.retain", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_what_is_due_is_closed_freed_and_erased(own: Stand) -> None:
    idle, closed, dead = own.talk(), own.talk(), own.talk()
    for talk in (idle, closed, dead):
        talk.say("Hello")
    own.http.delete(closed.path)
    call = own.meanwhile(dead.chat, [*dead.messages, user("Slow")], sim={"latency_s": 30})
    own.until_generating(dead, 2)
    if own.server.environment["TURNLOG_DATABASE_URL"].startswith("sqlite"):
        done = run_module("ops.retain", environment=own.server.environment)
        assert done.returncode == 2
        assert f"another process (pid {own.server.pid}) serves" in done.stderr
    own.server.kill()
    assert call.exception() is not None
    said = retained(own, IDLE_CLOSE_S="0.001", CLOSED_REPLAY_TTL_S="0")
    assert said == "2 idle sessions closed, 3 freed of replay payloads, 0 erased"
    said = retained(own, CLOSED_REPLAY_TTL_S="off", CLOSED_TTL_S="0.001")
    assert said == "0 idle sessions closed, 0 freed of replay payloads, 3 erased"
    own.server.start()
    assert idle.types()[-3:] == ["SessionClosed", "BlobsTombstoned", "SessionErased"]
    assert dead.types()[3:6] == ["TurnCommitted", "TurnOpened", "TurnAbandoned"]
    assert own.rows() == []
    assert problems(own) == []
    own.talk(session_id="new").say("On")


def free_pages(stand: Stand) -> int:
    with closing(sqlite3.connect(stand.server.database_path)) as connection:
        count: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return count


def test_a_compaction_beside_a_busy_server_gives_free_pages_back(sglang: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path, sglang.base_url, environment=BOTH) as stand:
        large, small = stand.talk(), stand.talk()
        for number in range(4):
            large.say(f"Question {number}", sim={"experts": EXPERTS, "completion_tokens": 1500})
        assert stand.http.delete(large.path, params={"erase": "true"}).status_code == 204
        before = free_pages(stand)
        assert before > 500
        stop = threading.Event()

        def write() -> int:
            turns = 0
            while not stop.is_set():
                turns += small.say("More").status_code == 200
            return turns

        writing = stand.meanwhile(write)
        done = run_module("ops.compact", environment=stand.server.environment)
        refused = run_module("ops.compact", "--full", environment=stand.server.environment)
        stop.set()
        assert writing.result() > 0
        assert done.returncode == 0, done.stderr
        assert "MiB before" in done.stdout
        assert free_pages(stand) < before // 4
        assert refused.returncode == 2
        assert "a server runs on" in refused.stderr
        assert problems(stand) == []
        stand.server.stop()
        size = stand.server.database_path.stat().st_size
        assert run_module("ops.compact", "--full", environment=stand.server.environment).returncode == 0
        assert free_pages(stand) == 0
        assert stand.server.database_path.stat().st_size <= size
        stand.server.start()
        assert len(small.state()["records"]) == len(small.messages) // 2
        small.say("On")
        assert problems(stand) == []


def test_a_compaction_takes_as_many_steps_as_it_says(sqlite_url: str) -> None:
    path = Path(make_url(sqlite_url).database or "")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE ballast AS SELECT randomblob(20000000) AS data")
        connection.execute("DROP TABLE ballast")
    before = path.stat().st_size
    steps: list[str] = []
    give_back(path, steps.append)
    assert before - path.stat().st_size > 19_000_000
    assert 4 <= len(steps) <= 6


def test_on_postgresql_a_compaction_says_what_the_role_may_not() -> None:
    """A checkpoint and a new log file are the superuser's; the tables are its own."""
    with clusters.running() as cluster:
        environment = {**os.environ, "TURNLOG_DATABASE_URL": cluster.url}
        done = run_module("ops.compact", "--full", environment=environment)
        assert (done.returncode, done.stderr) == (1, "")
        first, second, summary = done.stdout.splitlines()
        assert first == "not done: CHECKPOINT: the role may not"
        assert second == "not done: SELECT pg_switch_wal(): the role may not"
        assert summary.endswith("tables vacuumed, content rewritten")
        cluster.sql(f"ALTER DATABASE {clusters.DATABASE} OWNER TO postgres")
        cluster.sql("ALTER TABLE turns_p0 OWNER TO postgres", clusters.DATABASE)
        done = run_module("ops.compact", "--full", environment=environment)
        assert "not done: turns_p0 was not rewritten, it belongs to another role" in done.stdout
