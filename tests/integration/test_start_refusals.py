"""What keeps a server from starting is said in one line that helps, whichever way it is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.databases import Postgres, run_module
from helpers.warm import popen
from sqlalchemy.engine import make_url
from starlette.types import Message

from app.features import archive
from app.main import create_app
from app.services import Services
from app.settings import Settings
from app.store.database import sqlite_lock
from integration.cli import started

PATIENCE_S = 120


class Wrong(NamedTuple):
    """A store that cannot be served, and what the line says: of which, why, and what to do."""

    url: str
    told: tuple[str, ...]


def in_a_file(folder: Path) -> Wrong:
    (folder / "file").touch()
    return Wrong(f"sqlite+aiosqlite:///{folder}/file/turnlog.db", (f"{folder}/file: Not a directory", "may write to"))


def not_writable(folder: Path) -> Wrong:
    """Not even for root."""
    return Wrong("sqlite+aiosqlite:////sys/turnlog.db", ("/sys/turnlog.db", "may write to"))


def no_database(folder: Path) -> Wrong:
    (folder / "turnlog.db").write_bytes(b"something else" * 1000)
    told = (f"{folder}/turnlog.db: file is not a database", "TURNLOG_DATABASE_URL")
    return Wrong(f"sqlite+aiosqlite:///{folder}/turnlog.db", told)


def unreachable(folder: Path) -> Wrong:
    told = ("127.0.0.1:9/turnlog", "is PostgreSQL running there", "TURNLOG_DATABASE_URL")
    return Wrong("postgresql+asyncpg://somebody:sesame@127.0.0.1:9/turnlog?password=sesame", told)


def processes(url: str, folder: Path) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """Each way to start, by its name and the exit code that it has to end with."""
    variables = {"TURNLOG_DATABASE_URL": url}
    yield "serve", 1, started("serve", "--port", "0", folder=folder, environment=variables)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    for code, *command in (3, "uvicorn", "app.main:app", "--port", "0"), (1, "alembic", "upgrade", "head"):
        arguments = [sys.executable, "-m", *map(str, command)]
        made = popen(arguments, env=kept | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        yield str(command[0]), int(code), made


def refusals(url: str, folder: Path) -> dict[str, str]:
    """The one line of each way to start, with nothing secret in it. One after the other, as they share a file."""
    said = {}
    with ExitStack() as stack:
        for name, code, process in processes(url, folder):
            stack.callback(process.kill)
            output = "".join(part or "" for part in process.communicate(timeout=PATIENCE_S))
            lines = [line for line in output.splitlines() if "turnlog: " in line]
            assert (process.returncode, len(lines)) == (code, 1), output
            assert name == "uvicorn" or output == f"{lines[0]}\n"
            assert "Traceback" not in output
            assert "sesame" not in output
            said[name] = lines[0].partition("turnlog: ")[2]
    return said


UNUSABLE = (in_a_file, not_writable, no_database, unreachable)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc and /sys, and names errors as Linux does")
@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
def test_a_database_that_cannot_be_opened(tmp_path: Path, make: Callable[[Path], Wrong]) -> None:
    wrong = make(tmp_path)
    for name, line in refusals(wrong.url, tmp_path).items():
        assert line.startswith("the database cannot be opened: "), name
        assert [part for part in wrong.told if part not in line] == [], (name, line)


def test_a_database_that_postgresql_does_not_have(postgres: Postgres, tmp_path: Path) -> None:
    url = make_url(postgres.url("nowhere")).set(password="sesame").render_as_string(hide_password=False)
    for line in refusals(url, tmp_path).values():
        assert "does not exist; is PostgreSQL running there" in line


LATIN = "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"


@pytest.mark.long
def test_a_database_that_cannot_hold_every_text(postgres: Postgres, tmp_path: Path) -> None:
    postgres.psql(LATIN)
    for name, line in refusals(postgres.url("latin"), tmp_path).items():
        assert line.startswith("the database has the encoding LATIN1, which cannot store every text"), name


@pytest.mark.long
def test_an_empty_database_is_migrated_by_two_at_once(postgres: Postgres) -> None:
    for number in range(3):
        postgres.psql(f"CREATE DATABASE at_once_{number}")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
        variables = {"TURNLOG_DATABASE_URL": postgres.url(f"at_once_{number}")}
        arguments = [sys.executable, "-m", "alembic", "upgrade", "head"]
        both = [
            popen(arguments, env=kept | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], said


def test_a_store_that_somebody_serves(sqlite_url: str, tmp_path: Path) -> None:
    lock = sqlite_lock(sqlite_url)
    assert lock is not None
    with lock:
        said = refusals(sqlite_url, tmp_path)
    file = make_url(sqlite_url).database
    for name in ("serve", "uvicorn"):
        assert said[name].startswith(f"another process (pid {os.getpid()}) serves {file}: ")
        assert "TURNLOG_DATABASE_URL" in said[name]
    assert f"(pid {os.getpid()}): stop it before changing its schema" in said["alembic"]


def test_a_tokenizer_of_the_page_that_is_none(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"model": {}}')
    told = {"absent": "No such file", ".": "tokenizer.json cannot be read", "odd.json": "is not a valid tokenizer"}
    for name, why in told.items():
        variables = {"TURNLOG_DATABASE_URL": sqlite_url, "TURNLOG_PAGE_TOKENIZER": str(tmp_path / name)}
        process = started("serve", "--port", "0", folder=tmp_path, environment=variables)
        output, complaints = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3, output
        [line] = [line for line in complaints.splitlines() if "TURNLOG_PAGE_TOKENIZER=" in line]
        assert why in line
        assert "Traceback" not in complaints


def test_all_wrong_settings_are_told_at_once() -> None:
    wrong = {"TURNLOG_WORKERS": "many", "TURNLOG_LEASE_S": "0", "TURNLOG_UPSTREAM": "http://127.0.0.1:1"}
    expected = [
        "turnlog: TURNLOG_UPSTREAM is not a setting: did you mean TURNLOG_UPSTREAMS?",
        "turnlog: TURNLOG_WORKERS='many': expected a valid integer",
        "turnlog: TURNLOG_LEASE_S='0': expected a number greater than or equal to 1",
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    for arguments in (
        ["turnlog.cli", "serve", "--port", "0"],
        ["uvicorn", "app.main:app", "--port", "0"],
        ["alembic", "upgrade", "head"],
    ):
        done = run_module(*arguments, environment=kept | wrong)
        assert (done.returncode, done.stderr.splitlines()) == (1, expected)


def test_a_feature_that_cannot_start_ends_the_start(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn takes an exception for an application without a lifespan, and would serve it."""

    def failing(services: Services) -> None:
        raise OSError("no room for a task")

    monkeypatch.setattr(archive, "add_to", failing)
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(create_app(Settings(database_url=sqlite_url, workers=1))._live(receive, send))
    assert messages == [{"type": "lifespan.startup.failed", "message": "turnlog: start-up failed"}]


@pytest.mark.long
def test_what_to_do_about_an_old_schema_works_where_there_is_no_checkout(tmp_path: Path) -> None:
    process = started("serve", "--no-migrate", "--port", "0", folder=tmp_path)
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 3
    [line] = [line for line in said.splitlines() if "the database is at revision none" in line]
    assert "run `turnlog migrate`" in line
    done = started("migrate", folder=tmp_path)
    assert done.wait(PATIENCE_S) == 0, done.communicate()
    done.communicate()
