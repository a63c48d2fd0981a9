"""Backups in a bucket or folder: only what changed is uploaded, and nothing that is named is ever missing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.buckets import TestBucket
from helpers.warm import popen

from integration.copying import Writers, checked, command, exported, failure
from integration.stand import Stand, error_of, serving, until
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

pytestmark = pytest.mark.long

FAST = ("--percent", "100")

BALLAST_BYTES = 40_000_000


class Place(NamedTuple):
    """Where backups are, and the environment that its credentials come from."""

    url: str
    environment: Mapping[str, str]


@pytest.fixture(scope="module")
def s3() -> Iterator[Place]:
    """A bucket on a local S3 server."""
    bucket = TestBucket()
    yield Place(f"s3://{bucket.name}", {name: bucket.environment[name] for name in bucket.environment if "AWS" in name})
    bucket.close()


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place((tmp_path / "backups").as_uri(), {})
    bucket: Place = request.getfixturevalue("s3")
    return bucket._replace(url=f"{bucket.url}/{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place whose objects the test changes."""
    (found := tmp_path / "kept").mkdir()
    return found


@pytest.fixture
def own(sglang: SimulatorProcess, tmp_path: Path) -> Iterator[Stand]:
    """A server over a file of the test's own."""
    with serving(tmp_path / "own", sglang.base_url) as made:
        yield made


def answer(stand: Stand, place: Place, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = command(stand, *arguments, "--json", environment=place.environment)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def backed_up(stand: Stand, place: Place, *options: str) -> dict[str, Any]:
    return answer(stand, place, "ops.backup", place.url, *FAST, *options)


def blocks(folder: Path) -> set[Path]:
    return {one for one in folder.glob("blocks/*/*") if one.is_file()}


def add_ballast(stand: Stand) -> None:
    """So that a store has many blocks, and a run can be killed in its middle. It stops the server."""
    stand.server.stop()
    with closing(sqlite3.connect(stand.server.database_path)) as connection, connection:
        connection.execute("CREATE TABLE ballast (data)")
        connection.execute("INSERT INTO ballast VALUES (randomblob(?))", (BALLAST_BYTES,))


def started(stand: Stand, *arguments: str) -> subprocess.Popen[bytes]:
    return popen([sys.executable, "-m", *arguments], env=stand.server.environment, stderr=subprocess.PIPE)


def test_a_second_backup_uploads_what_changed_and_the_restored_store_exports_the_same(own: Stand, place: Place) -> None:
    own.talk(session_id="early").say("Hello")
    add_ballast(own)
    own.server.start()
    first = backed_up(own, place)
    assert first["uploaded_bytes"] > BALLAST_BYTES
    writers = Writers(own, 6)
    while len(writers.held) < 30:
        own.http.get("/health")
    before = list(writers.held)
    second = backed_up(own, place)
    held = writers.stop()
    assert len(held) > len(before)
    assert second["uploaded_bytes"] < first["uploaded_bytes"] / 10
    third = backed_up(own, place)
    cursor, rows = own.http.get("/export").headers["x-turnlog-next-cursor"], exported(own)
    assert "a server runs on" in failure(own, "ops.restore", place.url, environment=place.environment)
    own.talk(session_id="late").say("After the last backup")
    own.server.kill()

    put = answer(own, place, "ops.restore", place.url)
    assert "late" in {one["session_id"] for one in _rows_of(own, Path(put["kept"]))}
    assert asyncio.run(checked(own.url, held)).problems == []
    assert asyncio.run(checked(own.url, held)).missing == []
    own.server.start()
    assert exported(own) == rows
    assert error_of(own.http.get("/export", params={"cursor": cursor})) == (400, "invalid_request")
    own.talk(session_id="late").say("Once more")
    own.server.stop()

    listed = answer(own, place, "ops.backups", place.url)["backups"]
    assert [one["backup"] for one in listed] == [one["backup"] for one in (first, second, third)]
    answer(own, place, "ops.restore", place.url, "--at", second["backup"])
    report = asyncio.run(checked(own.url, before))
    assert (report.problems, report.missing) == ([], [])


def _rows_of(own: Stand, path: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        return [{"session_id": one} for (one,) in connection.execute("SELECT session_id FROM sessions")]


def test_what_is_kept_can_be_restored_and_what_nothing_names_is_deleted(own: Stand, place: Place) -> None:
    own.talk(session_id="first").say("x" * 200_000)
    first = backed_up(own, place)
    for number in range(20):
        own.talk(session_id=f"more-{number}").say("y" * 20_000)
    second = backed_up(own, place)
    third = backed_up(own, place, "--keep", "2")
    assert third["uploaded_blocks"] <= 1
    assert third["deleted"] == [first["backup"]]
    assert third["deleted_blocks"] > 0
    again = answer(own, place, "ops.backups", place.url, "--keep", "2")
    assert [one["backup"] for one in again["backups"]] == [second["backup"], third["backup"]]
    assert (again["deleted"], again["deleted_blocks"]) == ([], 0)
    own.server.stop()
    gone = ("ops.restore", place.url, "--at", first["backup"])
    assert "has no backup" in failure(own, *gone, environment=place.environment)
    for made in (second, third):
        answer(own, place, "ops.restore", place.url, "--at", made["backup"])
        assert asyncio.run(verify_url(own.url)).sessions == 21
        assert asyncio.run(verify_url(own.url)).problems == []


def test_a_backup_that_is_killed_leaves_no_manifest_and_the_next_uploads_the_rest(own: Stand, folder: Path) -> None:
    own.talk(session_id="kept").say("Hello")
    place = Place(folder.as_uri(), {})
    first = backed_up(own, place)
    add_ballast(own)
    run = started(own, "ops.backup", place.url, "--percent", "20")
    until(lambda: len(blocks(folder)) > first["blocks"] + 20)
    run.send_signal(signal.SIGSTOP)
    assert "another run is writing" in failure(own, "ops.backup", place.url)
    run.kill()
    run.communicate()
    there = len(blocks(folder))
    assert [one["backup"] for one in answer(own, place, "ops.backups", place.url)["backups"]] == [first["backup"]]

    second = backed_up(own, place, "--keep", "1")
    assert 0 < second["uploaded_blocks"] < second["blocks"] - 20
    assert len(blocks(folder)) == there + second["uploaded_blocks"]
    # As long as the killed run may be one that is only slow, what it needs is not deleted.
    assert second["deleted"] == []
    [left] = (folder / "running").glob("backup-*")
    assert second["deletion_waits_for"] == f"running/{left.name}"
    two_days_ago = left.stat().st_mtime - 2 * 86400
    for one in (folder / "running").iterdir():
        os.utime(one, (two_days_ago, two_days_ago))
    assert answer(own, place, "ops.backups", place.url, "--keep", "1")["deleted"] == [first["backup"]]
    assert list((folder / "running").iterdir()) == []
    assert len(blocks(folder)) == len({one.name for one in blocks(folder)}) <= second["blocks"]
    answer(own, place, "ops.restore", place.url)
    assert asyncio.run(verify_url(own.url)).problems == []


def test_a_restore_that_is_killed_leaves_the_store_as_it_was(own: Stand, folder: Path) -> None:
    own.talk(session_id="early").say("Hello")
    add_ballast(own)
    place = Place(folder.as_uri(), {})
    backed_up(own, place)
    own.server.start()
    own.talk(session_id="late").say("Hello")
    own.server.stop()
    staged = own.server.database_path.with_name("turnlog.db.restoring")
    run = started(own, "ops.restore", place.url)
    until(lambda: staged.exists() and staged.stat().st_size > 0)
    run.kill()
    run.communicate()
    assert 0 < staged.stat().st_size < BALLAST_BYTES
    assert {one["session_id"] for one in _rows_of(own, own.server.database_path)} == {"early", "late"}
    answer(own, place, "ops.restore", place.url)
    assert not staged.exists()
    own.server.start()
    assert [one["session_id"] for one in own.http.get("/sessions").json()["sessions"]] == ["early"]


@pytest.mark.parametrize("damage", ["missing", "another", "garbage", "manifest"])
def test_a_backup_that_is_not_whole_is_not_restored(own: Stand, folder: Path, damage: str) -> None:
    own.talk(session_id="kept").say("Hello")
    add_ballast(own)
    place = Place(folder.as_uri(), {})
    made = backed_up(own, place)
    one, other = sorted(blocks(folder))[:2]
    if damage == "missing":
        one.unlink()
    elif damage == "another":
        one.write_bytes(other.read_bytes())
    elif damage == "garbage":
        one.write_bytes(os.urandom(1000))
    else:
        [manifest] = (folder / "backups").iterdir()
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"\0")
    store = own.server.database_path.read_bytes()
    line = failure(own, "ops.restore", place.url)
    if damage == "manifest":
        assert f"the list of blocks of backup {made['backup']}" in line
        # Which blocks it needs is not known.
        there = blocks(folder)
        assert "the list of blocks" in failure(own, "ops.backups", place.url, "--keep", "1")
        assert blocks(folder) == there
    else:
        assert f"{one.name} is {'missing' if damage == 'missing' else 'damaged'}" in line
    assert own.server.database_path.read_bytes() == store
    assert not own.server.database_path.with_name("turnlog.db.restoring").exists()


@pytest.mark.parametrize(
    ("place", "environment", "said"),
    [
        ("s4://bucket/prefix", {}, "a place is s3://"),
        ("s3://", {}, "a place is s3://"),
        ("file://folder/backups", {}, "a place is s3://"),
        ("s3://backups/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": ""}, "AWS_ACCESS_KEY_ID"),
        ("az://container/x", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("file:///proc/none", {}, "file:///proc/none"),
    ],
)
def test_a_place_that_cannot_be_used_is_said_in_a_line(
    own: Stand, place: str, environment: Mapping[str, str], said: str
) -> None:
    assert said in failure(own, "ops.backup", place, environment=environment)
    assert [one for one in os.listdir(own.server.database_path.parent) if "partial" in one] == []


def test_a_bucket_that_is_not_there_is_said_in_a_line(own: Stand, s3: Place, tmp_path: Path) -> None:
    assert "404" in failure(own, "ops.backup", "s3://nowhere/x", environment=s3.environment)
    assert "has no backups" in failure(own, "ops.restore", f"{s3.url}/never", environment=s3.environment)
    assert "has no backups" in failure(own, "ops.restore", str(tmp_path))
    assert "are for a bucket" in failure(own, "ops.backup", str(tmp_path / "copy.db"), "--keep", "2")
