"""One engine and one server, which these tests kill and start again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.clusters import Cluster, running
from integration.stand import Stand, serving

from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server of the module's own."""
    with running() as made:
        yield made


@pytest.fixture(scope="session")
def engine() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "21") as made:
        yield made


@pytest.fixture(scope="session")
def shared(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with serving(tmp_path_factory.mktemp("fault"), engine.base_url) as made:
        yield made


@pytest.fixture
def stand(shared: Stand) -> Stand:
    """The shared stand, alive again if another test left its server dead."""
    if not shared.server.answers():
        shared.server.kill()
        shared.server.start()
    assert shared.sim.post("/sim/reset").status_code == 200
    return shared
