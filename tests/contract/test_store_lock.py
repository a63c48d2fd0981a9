"""Who an SQLite file belongs to, by whichever name it is opened."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.store import Store
from sqlalchemy.engine import make_url

from app.errors import StartupError, StoreLost
from app.store import opening
from app.store.database import Database, sqlite_lock
from app.store.dialect import StorePoints
from app.store.log import Appended
from app.store.opening import Held, SqliteLock, lock_owner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only <file>.lock is locked")


def file_of(url: str) -> Path:
    return Path(make_url(url).database or "")


def url_of(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


def as_it_is(file: Path) -> Path:
    return file


def by_a_symbolic_link(file: Path) -> Path:
    (file.parent / "link").symlink_to(file.parent)
    return file.parent / "link" / file.name


def by_a_second_name(file: Path) -> Path:
    made = file.with_name("second.db")
    made.hardlink_to(file)
    return made


WAYS = (as_it_is, by_a_symbolic_link, by_a_second_name)


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_second_opener_is_refused(sqlite_url: str, way: Callable[[Path], Path]) -> None:
    first = Database(sqlite_url, points=StorePoints())
    await first.open()
    second = Database(url_of(way(file_of(sqlite_url))), points=StorePoints())
    with pytest.raises(StartupError, match=rf"another process \(pid {os.getpid()}\) serves") as refused:
        await second.open()
    assert "\n" not in str(refused.value)
    await second.close()
    async with Store.over(first) as store:
        assert isinstance(await store.create("s"), Appended), "the first is not disturbed"
    await first.close()
    third = Database(sqlite_url, points=StorePoints())
    await third.open()
    await third.close()


@pytest.mark.anyio
async def test_the_refused_one_leaves_sqlites_own_locks_alone(sqlite_url: str) -> None:
    """Closing a descriptor would end them for the process; another process would then delete the log file."""
    first = Database(sqlite_url, points=StorePoints())
    await first.open()
    async with Store.over(first) as store:
        await store.create("s")
        second = Database(sqlite_url, points=StorePoints())
        with pytest.raises(StartupError):
            await second.open()
        await second.close()
        look = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM events').fetchall()"
        subprocess.run([sys.executable, "-c", look, str(file_of(sqlite_url))], check=True)
        assert Path(f"{file_of(sqlite_url)}-wal").exists()
    await first.close()


def test_a_child_does_not_inherit_it(sqlite_url: str) -> None:
    look = (
        "import pathlib; print([path.readlink() for path in pathlib.Path('/proc/self/fd').iterdir() if path.exists()])"
    )
    owned = sqlite_lock(sqlite_url)
    assert owned is not None
    with owned:
        child = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, close_fds=False, check=True
        )
    assert "/dev/null" in child.stdout or "pipe" in child.stdout
    assert file_of(sqlite_url).name not in child.stdout


def test_a_file_that_is_not_there_is_made_only_where_that_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    with SqliteLock(file) as made:
        assert not file.exists()
        assert made.lost() is None
    with SqliteLock(file, create=True) as made:
        assert file.stat().st_mode & 0o777 == 0o600
        assert made.lost() is None


def deleted(file: Path) -> None:
    file.unlink()


def replaced(file: Path) -> None:
    shutil.copyfile(file, file.with_name("copy.db"))
    file.with_name("copy.db").replace(file)


def moved_with_its_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))


@pytest.mark.anyio
@pytest.mark.parametrize("what", [deleted, replaced, moved_with_its_folder], ids=lambda what: what.__name__)
async def test_a_lost_file_is_not_written(sqlite_url: str, tmp_path: Path, what: Callable[[Path], None]) -> None:
    file = tmp_path / "kept" / "turnlog.db"
    file.parent.mkdir()
    shutil.copyfile(file_of(sqlite_url), file)
    told: list[str] = []
    database = Database(url_of(file), lost=told.append, points=StorePoints())
    await database.open()
    async with Store.over(database) as store:
        await store.create("before")
        what(file)
        for name in ("after", "later"):
            with pytest.raises(StoreLost, match=str(file)):
                await store.create(name)
        assert await store.head("before") is not None
        assert await store.head("after") is None
    await database.close()
    assert len(told) == 1
    assert str(file) in told[0]


@pytest.mark.anyio
async def test_a_link_that_leads_elsewhere_is_noticed(sqlite_url: str, tmp_path: Path) -> None:
    """New connections would read the other file."""
    other = tmp_path / "other.db"
    shutil.copyfile(file_of(sqlite_url), other)
    link = tmp_path / "link.db"
    link.symlink_to(file_of(sqlite_url))
    database = Database(url_of(link), points=StorePoints())
    await database.open()
    async with Store.over(database) as store:
        await store.create("before")
        link.unlink()
        link.symlink_to(other)
        with pytest.raises(StoreLost):
            await store.create("after")
    await database.close()
    with sqlite3.connect(other) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
    connection.close()


@pytest.mark.anyio
async def test_where_only_the_file_beside_can_be_locked_it_is_watched(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a lock on the database itself would keep SQLite's own from being taken."""
    monkeypatch.setattr(opening, "file_system", lambda folder: "nfs")
    database = Database(sqlite_url, points=StorePoints())
    await database.open()
    assert lock_owner(file_of(sqlite_url)) is None
    async with Store.over(database) as store:
        await store.create("before")
        with pytest.raises(Held):
            SqliteLock(file_of(sqlite_url)).acquire()
        Path(f"{file_of(sqlite_url)}.lock").unlink()
        with SqliteLock(file_of(sqlite_url)), pytest.raises(StoreLost, match=r"\.lock was replaced"):
            await store.create("after")
    await database.close()
