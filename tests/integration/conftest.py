"""One engine and one server for most of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.stand import Stand, serving, standing
from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="session")
def sglang() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "11") as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "12", "--dialect", "vllm") as engine:
        yield engine


@pytest.fixture(scope="session")
def shared(sglang: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with serving(tmp_path_factory.mktemp("stand"), sglang.base_url) as made:
        yield made


@pytest.fixture
def stand(shared: Stand) -> Stand:
    """The shared stand, with nothing left over at the engine from another test."""
    assert shared.sim.post("/sim/reset").status_code == 200
    return shared


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server with small limits and little patience."""
    environment = {
        "TURNLOG_STREAM_KEEPALIVE_S": "0.2",
        "TURNLOG_MAX_REQUEST_BYTES": "20000",
        "TURNLOG_MAX_UPSTREAM_BYTES": "60000",
        "TURNLOG_UPSTREAM_TIMEOUT_S": "1.5",
    }
    with standing(tmp_path_factory.mktemp("tight"), environment=environment) as made:
        yield made
