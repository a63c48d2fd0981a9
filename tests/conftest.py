"""What all tests share: the event loop's kind, hypothesis' profile, and real databases."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from helpers.databases import Postgres, SqliteTemplate
from helpers.store import Store
from hypothesis import settings

from app.store.engine import Database

settings.register_profile("turnlog", deadline=None, database=None, max_examples=100)
settings.load_profile("turnlog")

pytest_plugins = ("fault.table", "helpers.threats", "helpers.kept", "real_engine.table")

BOTH = ("sqlite", "postgresql")

OPTIONAL = {"long": "takes minutes", "real_engine": "starts a real engine"}
"""Markers whose tests run only with an option of that name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests that take minutes")
    parser.addoption("--real-engine", action="store_true", help="also run tests before a real engine, vLLM on the CPU")
    parser.addoption(
        "--store",
        choices=(*BOTH, "both"),
        help="the database of the service tests' servers; by default SQLite, and both for the modules that name it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Who starts the tests in the background may have them ignore these, and what they start inherits that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, why in OPTIONAL.items():
        option = f"--{marker.replace('_', '-')}"
        if not config.getoption(option):
            skipped = pytest.mark.skip(reason=f"{why}: run with {option}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skipped)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Not in pytest's own folder: PostgreSQL runs as another user, and a second pytest would lock it out there."""
    with tempfile.TemporaryDirectory(prefix="turnlog-postgres-", ignore_cleanup_errors=True) as folder:
        server = Postgres(Path(folder))
        yield server
        server.stop()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> SqliteTemplate:
    return SqliteTemplate(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture
def sqlite_url(sqlite_template: SqliteTemplate, tmp_path: Path) -> str:
    """A migrated SQLite database of the test's own."""
    return sqlite_template.copy(tmp_path / "turnlog.db")


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """A migrated PostgreSQL database of the test's own."""
    with postgres.database() as url:
        yield url


@pytest.fixture(params=BOTH)
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of the test's own; the test runs once on each kind."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture(params=BOTH)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database that no migration has touched, once of each kind."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    with server.database(template="template1") as url:
        yield url


async def _opened(url: str) -> AsyncIterator[Database]:
    made = Database(url)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async for made in _opened(database_url):
        yield made


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    """A running writer over `database`, with shorthands for the log's operations."""
    async with Store.over(database) as made:
        yield made


@pytest.fixture
async def sqlite_store(sqlite_url: str) -> AsyncIterator[Store]:
    async for database in _opened(sqlite_url):
        async with Store.over(database) as made:
            yield made


@pytest.fixture
async def postgres_store(postgres_url: str) -> AsyncIterator[Store]:
    async for database in _opened(postgres_url):
        async with Store.over(database) as made:
            yield made


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """No TURNLOG_* variable but those given."""
    for name in [name for name in os.environ if name.startswith("TURNLOG_")]:
        monkeypatch.delenv(name)

    def choose(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"TURNLOG_{name}", value)

    return choose
