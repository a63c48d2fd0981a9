"""Two processes and two engines for most of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.databases import Postgres

from fleet.stands import Fleet, fleet_of


@pytest.fixture(scope="session")
def shared_fleet(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with postgres.database() as url, fleet_of(tmp_path_factory.mktemp("fleet"), url) as made:
        yield made


@pytest.fixture(scope="session")
def holding_fleet(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    environment = {
        "TURNLOG_ENGINE_SESSIONS": "all",
        "TURNLOG_LEASE_S": "3",
        "TURNLOG_ON_DISCONNECT": "abort_after:0.3",
    }
    folder = tmp_path_factory.mktemp("holding")
    with postgres.database() as url, fleet_of(folder, url, environment=environment) as made:
        yield made
        for engine in made.engines:  # also those that came back
            engine.process.stop()


@pytest.fixture
def holding(holding_fleet: Fleet) -> Fleet:
    """Two processes that may have both engines hold sessions, and engines that a test may end."""
    holding_fleet.reset()
    return holding_fleet


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """Two API processes on one PostgreSQL before two engines, with nothing left over at the engines."""
    shared_fleet.reset()
    return shared_fleet
