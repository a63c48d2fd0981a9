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


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """Two API processes on one PostgreSQL before two engines, with nothing left over at the engines."""
    shared_fleet.reset()
    return shared_fleet
