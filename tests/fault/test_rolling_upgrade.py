"""Processes of the last release and of this checkout on one PostgreSQL, under traffic.

At one revision they serve side by side, and are replaced one by one, both ways. Where the revision differs, the second
does not start and says in which order to go on, which works. The last release is the newest tag `v*` of the clone. If
there is none, or its revision is not as the test needs it, one of the two is this checkout under another number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copy2, copytree

import httpx
import pytest
from helpers.databases import Postgres, run_module
from helpers.looking import change, value
from helpers.warm import ROOT
from integration.stand import until

from app.extras import release
from app.store.opening import revision_head
from fault.agents import Agent, Agents, Insistent
from fault.table import Tally
from fault.verified import verified
from ops.server import VERBATIM, ServerDidNotStart, ServerProcess
from ops.simulator.process import SimulatorProcess

pytestmark = [pytest.mark.long, pytest.mark.fault(10, "releases replace each other on one PostgreSQL")]

CLIENTS = 4
LEASE_S = 4.0
START_S = 120.0
WISH = {"latency_s": 0.03, "completion_tokens": 8, "tool_calls": False}
PARTS = ("app", "workers", "turnlog", "ops", "migrations")
NEXT = """from alembic import op

revision = "next"
down_revision = "{head}"


def upgrade() -> None:
    op.execute("ALTER TABLE snapshots ADD COLUMN more INTEGER")
"""

SILENT = """SELECT bool_and(ended_at IS NOT NULL OR heartbeat_at < extract(epoch FROM clock_timestamp()) - :lease_s)
    FROM incarnations"""


def numbered(folder: Path, version: str) -> Path:
    """This checkout under another number."""
    for part in PARTS:
        copytree(ROOT / part, folder / part)
    copy2(ROOT / "alembic.ini", folder)
    return with_number(folder, version)


def with_number(folder: Path, version: str) -> Path:
    """What is installed is of one number, so that of another tree stands beside its code."""
    described = folder / f"turnlog-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: turnlog\nVersion: {version}\n")
    return folder


def last_release(folder: Path) -> Path | None:
    """The tree of the newest tag, if the clone has one."""
    git = ["git", "-C", str(ROOT)]
    listing = [*git, "tag", "--list", "v*", "--sort=-version:refname"]
    tags = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    if not tags:
        return None
    folder.mkdir()
    archived = subprocess.run([*git, "archive", tags[0]], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archived, check=True)
    return with_number(folder, f"{tags[0].removeprefix('v')}+released")  # this checkout may still have its number


def has_this_revision(tree: Path) -> bool:
    here, there = ({path.name for path in (root / "migrations" / "versions").glob("*.py")} for root in (ROOT, tree))
    return here == there


def step(agent: Agent) -> None:
    """A turn, now and then in a new session, after the old one has got its reward."""
    if not agent.messages or agent.rng.random() < 0.15:
        if agent.messages:
            agent.reward(1.0)
            agent.end()
        agent.begin(history=agent.rng.choice(["linear", "tree"]))
    agent.say(f"Turn {agent.requests}", sim=WISH)


class Places:
    """Two addresses, at each of which one process serves the database at a time."""

    def __init__(self, folder: Path, url: str, engine: SimulatorProcess) -> None:
        self.url = url
        self._folder = folder
        self._engine = engine
        self._holders = [self.server(ROOT) for _ in range(2)]
        self.servers = list(self._holders)

    @property
    def urls(self) -> list[str]:
        return [server.base_url for server in self.servers]

    def server(self, tree: Path, port: int = 0) -> ServerProcess:
        """Not started yet."""
        return ServerProcess(
            self._folder,
            upstreams=[self._engine.base_url],
            database_url=self.url,
            environment={**VERBATIM, "TURNLOG_WORKERS": "1", "TURNLOG_LEASE_S": str(LEASE_S)},
            root=tree,
            port=port,
            start_timeout_s=START_S,
        )

    def next(self, place: int, tree: Path) -> ServerProcess:
        """One that comes after that of the place, which has to be stopped first. It is not started yet."""
        self.servers[place] = self.server(tree, self.servers[place].port)
        return self.servers[place]

    def start(self) -> None:
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.until_it_answers()

    def releases(self) -> list[str]:
        return [self.release_at(place) for place in (0, 1)]

    def release_at(self, place: int) -> str:
        told: str = httpx.get(f"{self.urls[place]}/health", timeout=60).json()["release"]
        return told

    def stop(self) -> None:
        for server in self.servers:
            server.kill()


@pytest.fixture
def places(tmp_path: Path, postgres_url: str, engine: SimulatorProcess) -> Iterator[Places]:
    made = Places(tmp_path, postgres_url, engine)
    yield made
    made.stop()


def served(agents: Agents[Insistent]) -> None:
    """Until each agent has been answered what it asked for from now on."""
    since = time.monotonic()
    until(lambda: agents.all_served(since), START_S)


def test_processes_of_one_revision_are_replaced_one_by_one(places: Places, tmp_path: Path, tally: Tally) -> None:
    """First to this checkout, then back; of each two, one is stopped and one killed."""
    old = last_release(tmp_path / "tag")
    if old is None or not has_this_revision(old):
        old = numbered(tmp_path / "old", "0.0.1")
    for place in (0, 1):
        places.next(place, old)
    places.start()
    number = places.release_at(0)
    assert number != release()
    with Agents(places.urls, CLIENTS, step, kind=Insistent) as agents:
        served(agents)
        for tree in (ROOT, old):
            for place, end in enumerate((ServerProcess.stop, ServerProcess.kill)):
                end(places.servers[place])
                down = time.monotonic()
                started = places.next(place, tree).start()
                tally.tried += 1
                served(agents)
                tally.recovered(agents.recovery_s(down))
                if (tree, place) == (ROOT, 0):
                    assert places.releases() == [release(), number]
                    told = run_module("turnlog.cli", "doctor", "--no-generate", environment=started.environment).stdout
                    serving = {f"1 of release {one}" for one in places.releases()}
                    assert f"2 processes serve it on 1 host: {', '.join(sorted(serving))}" in " ".join(told.split())
        assert places.releases() == [number, number]
        agents.stop()
        tally.doubled += agents.doubled(places.urls[0])
    verified(places.url, agents.acknowledged, tally)


def refused(attempt: Callable[[], object]) -> str:
    """The line of a start or a migration that is refused."""
    with pytest.raises(ServerDidNotStart) as error:
        attempt()
    [line] = [line for line in str(error.value).splitlines() if "turnlog: " in line]
    return line.partition("turnlog: ")[2]


def test_another_revision_comes_when_the_last_process_of_this_one_has_ended(
    postgres: Postgres, engine: SimulatorProcess, tmp_path: Path, tally: Tally
) -> None:
    """The order of the line is followed: one process is stopped, one is frozen and goes on after the migration."""
    old, new, template = last_release(tmp_path / "tag"), ROOT, "template1"
    if old is None or has_this_revision(old):
        old, new, template = old or numbered(tmp_path / "old", "0.0.1"), numbered(tmp_path / "new", "9.9.9"), "migrated"
        (new / "migrations" / "versions" / "next.py").write_text(NEXT.format(head=revision_head()))
    with ExitStack() as stack:
        places = Places(tmp_path, stack.enter_context(postgres.database(template)), engine)
        stack.callback(places.stop)
        if template != "migrated":
            places.server(old).migrate()
        first, second = (places.next(place, old) for place in (0, 1))
        places.start()
        number = places.release_at(0)
        agents = stack.enter_context(Agents(places.urls, CLIENTS, step, kind=Insistent))
        served(agents)
        for attempt in (places.server(new).start, places.server(new).migrate):
            line = refused(attempt)
            tally.tried += 1
            assert line.startswith("2 processes serve this database (")
            assert all(f"{number} on " in line and f", pid {server.pid}, since " in line for server in (first, second))
            assert ": stop them, run `turnlog migrate`, then start this version; " in line
        served(agents)

        os.kill(second.pid, signal.SIGSTOP)
        first.stop()
        down = time.monotonic()
        until(lambda: value(places.url, SILENT, lease_s=LEASE_S), START_S)
        places.server(new).migrate()
        places.next(0, new).start()
        os.kill(second.pid, signal.SIGCONT)
        until(lambda: second.poll() is not None, START_S)
        assert "while this server was running: it writes nothing more, and exits" in second.log_path.read_text()
        newer = places.release_at(0)
        line = refused(places.server(old).start)
        assert (
            f": release {newer} made it, and this is {number}: install {newer} or newer, or restore the backup" in line
        )
        served(agents)
        tally.recovered(agents.recovery_s(down))
        agents.stop()
        tally.doubled += agents.doubled(places.urls[0])
        places.stop()
        # What the next revision has added concerns no code: this checkout reads the store again.
        change(places.url, f"UPDATE alembic_version SET version_num = '{revision_head()}'")
        verified(places.url, agents.acknowledged, tally)
