"""What all tests share: the event loop's kind, hypothesis' profile, and real databases."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from helpers import warm
from helpers.databases import Postgres, SqliteTemplate, database_at
from helpers.store import Store, two_stores
from httpx import _config as httpx_config
from httpx._transports import default as httpx_transports
from hypothesis import settings

from app.store.database import Database
from ops.server import OwnProcess

settings.register_profile("turnlog", deadline=None, database=None, max_examples=100)
settings.load_profile("turnlog")

pytest_plugins = (
    "fault.table",
    "helpers.threats",
    "real_engine.table",
)

BOTH = ("sqlite", "postgresql")

REPEATED = ("contract", "fault", "integration")
"""Folders whose tests run on PostgreSQL in the long lane, and on SQLite in the quick one."""

QUICK_ON_BOTH = ("test_leases", "test_migration", "test_simulation", "test_store_operations")
"""Modules of these folders that the quick lane runs on both."""

LANES = {
    "real_engine": "the tests before a real engine, vLLM on the CPU",
    "real_sglang": "the tests before the published SGLang on the CPU, whose scheduler is scripted",
    "untimed": "the tests that take longer than anybody waits for, or load packages from the network",
    "long": "the tests that take longer than a quick run may",
}
"""Markers whose tests run with the option of that name, alone; one that has several is of the first. Without an option
the tests that have none of them run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    for marker, what in LANES.items():
        parser.addoption(f"--{marker.replace('_', '-')}", action="store_true", help=f"run {what}, and no others")
    parser.addoption("--ran", type=Path, metavar="FILE", help="append the ids of the tests that passed")
    parser.addoption("--shuffle", metavar="SEED", help="run modules, and the tests in each, in another order")
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
    file = config.getoption("ran")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ran(file), "ran")


class Ran:
    """Writes down which tests have passed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules that have no test of the lane are not imported, which takes each of the tests' processes 20 s."""
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    whole = re.search(rf"^pytestmark = .*pytest\.mark\.({'|'.join(LANES)})\b", text, re.MULTILINE)
    may_have = {marker for marker in LANES if f"mark.{marker}" in text}
    may_have |= {whole[1]} if whole else {None}
    may_have |= {"long"} if collection_path.parent.name in REPEATED else set()
    return True if not may_have & asked_of(config) else None


def asked_of(config: pytest.Config) -> set[str | None]:
    return {marker for marker in LANES if config.getoption(f"--{marker.replace('_', '-')}")} or {None}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing is garbage yet, and what is there then stays: to look through it costs a third of the collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = asked_of(config)
    others = [item for item in items if lane_of(item) not in asked]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if lane_of(item) in asked]
    if seed := config.getoption("shuffle"):
        # A module's tests stay together: what they share is started once.
        items.sort(key=lambda item: (_drawn(seed, module_of(item)), module_of(item), _drawn(seed, item.nodeid)))


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _drawn(seed: str, name: str) -> float:
    return random.Random(f"{seed} {name}").random()


def lane_of(item: pytest.Item) -> str | None:
    marked = next((marker for marker in LANES if item.get_closest_marker(marker)), None)
    return marked or ("long" if _repeats_on_postgres(item) else None)


def _repeats_on_postgres(item: pytest.Item) -> bool:
    """Does the quick lane have the test on SQLite, so that it may run on PostgreSQL in the long one?"""
    if item.config.getoption("store") is not None or item.path.parent.name not in REPEATED:
        return False
    if item.path.stem in QUICK_ON_BOTH:
        return False
    callspec = getattr(item, "callspec", None)
    return callspec is not None and "postgresql" in callspec.params.values()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def forked_starts() -> None:
    """Servers and engines are forked, which spares each the second that its imports take."""
    OwnProcess.spawn = staticmethod(warm.popen)


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> None:
    """httpx reads them for each client, which costs 20 ms."""
    httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)


@pytest.fixture(scope="session", autouse=True)
def requests_take_their_time() -> None:
    """httpx gives a request of which nothing else is said five seconds, which is too little on a slow machine."""
    for part in ("connect", "read", "write", "pool"):
        setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, part, 60.0)


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


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with database_at(database_url) as made:
        yield made


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    """A running writer over `database`, with shorthands for the log's operations."""
    async with Store.over(database) as made:
        yield made


@pytest.fixture
async def sqlite_store(sqlite_url: str) -> AsyncIterator[Store]:
    async with database_at(sqlite_url) as database, Store.over(database) as made:
        yield made


@pytest.fixture
async def postgres_store(postgres_url: str) -> AsyncIterator[Store]:
    async with database_at(postgres_url) as database, Store.over(database) as made:
        yield made


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two processes' stores on one PostgreSQL."""
    async with two_stores(postgres_url) as made:
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
