"""The commands that keep a store, in a folder that has nothing but it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app.store.database import sqlite_lock
from integration.cli import answer, complaint, run, started
from integration.stand import serving
from ops import backup
from ops.simulator.process import SimulatorProcess

PATIENCE_S = 60


@pytest.fixture
def store(tmp_path: Path, clean_environment: Callable[..., None]) -> Path:
    """A store that the command line finds in the environment; it is not there yet."""
    file = tmp_path / "kept" / "turnlog.db"
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{file}")
    return file


@pytest.fixture(scope="module")
def written(sglang: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of two turns in it, as a server left it."""
    with serving(tmp_path_factory.mktemp("written"), sglang.base_url) as made:
        talk = made.talk(session_id="kept")
        talk.say("One")
        talk.say("Two")
        made.server.stop()
        return made.server.database_path


@pytest.fixture
def talked(store: Path, written: Path) -> Path:
    """That store, as the test's own."""
    store.parent.mkdir()
    shutil.copyfile(written, store)
    return store


def test_migrate_makes_the_store_where_no_checkout_is(store: Path) -> None:
    process = started(
        "migrate",
        "--json",
        folder=store.parent.parent,
        environment={"TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{store}"},
    )
    said, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    reached = json.loads(said)["revision"]
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(reached,)]
    assert answer("verify")["problems"] == []


def test_what_is_not_there_is_said(store: Path) -> None:
    for command in (("verify",), ("backup", store.parent / "copy"), ("replay", "s")):
        assert str(store) in complaint(*command, code=2)
    assert "does not exist" in complaint("restore", store.parent / "copy", code=2)
    assert not store.exists()


def test_a_store_is_verified_copied_and_put_back(talked: Path) -> None:
    report = answer("verify")
    assert (report["sessions"], report["turns"], report["problems"]) == (1, 2, [])
    copy = talked.parent / "copy.db"
    made = answer("backup", copy)
    assert (made["copy"], made["bytes"], made["sessions"]) == (str(copy), copy.stat().st_size, 1)
    assert "already exists" in complaint("backup", copy, code=2)
    put = answer("restore", copy)
    assert put["store"] == str(talked)
    assert Path(put["kept"]).is_file()
    assert run("verify").stdout.endswith("1 session, 6 events, 2 turns, 0 groups: 0 problems\n")


def test_what_no_server_may_run_beside_is_refused(talked: Path) -> None:
    """A server is whoever has the file's lock."""
    copy = talked.parent / "copy.db"
    lock = sqlite_lock(f"sqlite+aiosqlite:///{talked}")
    assert lock is not None
    with lock:
        run("backup", copy)
        assert answer("verify")["problems"] == []
        assert "stop" in complaint("restore", copy, code=2)
        who = f"another process (pid {os.getpid()})"
        said = f"turnlog: a server is running on this database, {who}: stop it before changing its schema"
        assert complaint("migrate") == said


def test_only_one_restore_makes_a_store_that_is_not_there(talked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, copy_store = talked.parent / "copy.db", backup.copy_store
    run("backup", copy)
    talked.unlink()
    refusals: list[str] = []

    def beside(source: Path, target: Path, progress: Callable[[str], None], *, mode: str) -> int:
        monkeypatch.setattr(backup, "copy_store", copy_store)
        refusals.append(complaint("restore", copy, code=2))
        return copy_store(source, target, progress, mode=mode)

    monkeypatch.setattr(backup, "copy_store", beside)
    assert answer("restore", copy)["kept"] is None
    assert "stop it first" in refusals[0]
    assert sorted(talked.parent.glob("turnlog.db*")) == [talked]
    copy.write_bytes(b"something else")
    talked.unlink()
    complaint("restore", copy, code=2)
    assert not talked.exists()


def test_a_damaged_store_is_not_well(talked: Path) -> None:
    with closing(sqlite3.connect(talked)) as connection:
        connection.execute("UPDATE sessions SET turns = 7")
        connection.commit()
    assert [one["session_id"] for one in answer("verify", code=1)["problems"]] == ["kept"]
    assert "kept: sessions.turns" in run("replay", "--heads", code=1).stdout
    [difference] = [json.loads(line) for line in run("replay", "--heads", "--fix", "--json").stdout.splitlines()]
    assert difference["fixed"] is True
    assert answer("verify")["problems"] == []
