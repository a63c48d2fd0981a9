"""One engine and one server for most of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from integration.filled import fill, opened
from integration.guarded import Guarded, guarded_serving
from integration.places import DATABASES, Places
from integration.stand import Stand, serving, standing
from integration.tito import checked, tokenizer_folder
from ops.simulator.process import SimulatorProcess

ON_BOTH = frozenset(
    {
        "test_archive",
        "test_checkpoint_runs",
        "test_checkpoints",
        "test_export",
        "test_filters",
        "test_fork",
        "test_odd_parameters",
        "test_rollouts",
        "test_run_names",
        "test_run_tokens",
        "test_runs",
        "test_search",
        "test_sessions",
        "test_webhooks",
    }
)
"""Modules whose tests of a server run on both databases unless `--store` names one: what the contract tests, the faults
and the simulation on PostgreSQL do not reach."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that starts a server somewhere does so on the databases that it is for.

    Known by what the test and its fixtures name: one that asks for a stand by `getfixturevalue` names `places` as well.
    One that has its own parameters for `places` chooses itself.
    """
    own = metafunc.definition.iter_markers("parametrize")
    if "places" not in metafunc.fixturenames or any("places" in mark.args[0] for mark in own):
        return
    asked = metafunc.config.getoption("store")
    both = asked == "both" or (asked is None and metafunc.module.__name__.rpartition(".")[2] in ON_BOTH)
    metafunc.parametrize("places", DATABASES if both else (asked or "sqlite",), indirect=True, scope="session")


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Where servers keep their sessions in this run of the test."""
    on_postgres = request.param == "postgresql"
    return Places(tmp_path_factory, request.getfixturevalue("postgres") if on_postgres else None)


@pytest.fixture(scope="session")
def sglang() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "11") as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "12", "--dialect", "vllm") as engine:
        yield engine


@pytest.fixture(scope="session")
def shared(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("stand"), sglang.base_url) as made:
        yield made


@pytest.fixture
def stand(shared: Stand) -> Stand:
    """The shared stand, with nothing left over at the engine from another test."""
    assert shared.sim.post("/sim/reset").status_code == 200
    return shared


@pytest.fixture(scope="session")
def shared_vllm(vllm: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with checked(places.new("vllm"), vllm.base_url) as made:
        yield made


@pytest.fixture
def vllm_stand(shared_vllm: Stand) -> Stand:
    """The shared server before an engine that speaks vLLM's dialect."""
    assert shared_vllm.sim.post("/sim/reset").status_code == 200
    return shared_vllm


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What TURNLOG_TOKENIZER names: the simulator's own tokenizer."""
    pytest.importorskip("transformers")
    return str(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def shared_tito(sglang: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Stand]:
    with checked(places.new("tito"), sglang.base_url, environment={"TURNLOG_TOKENIZER": tokenizer}) as made:
        yield made


@pytest.fixture(scope="session")
def shared_vllm_tito(vllm: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Stand]:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_UPSTREAM_DIALECT": "vllm"}
    with checked(places.new("vllm-tito"), vllm.base_url, environment=environment) as made:
        yield made


@pytest.fixture
def tito(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A shared server with a tokenizer, with nothing left over at the engine from another test.

    The engine is SGLang; a test that is for vLLM too has the fixture's parameter.
    """
    is_vllm = getattr(request, "param", "sglang") == "vllm"
    shared: Stand = request.getfixturevalue("shared_vllm_tito" if is_vllm else "shared_tito")
    assert shared.sim.post("/sim/reset").status_code == 200
    return shared


@pytest.fixture(scope="session")
def mortal(places: Places) -> Iterator[Stand]:
    """A server that tests kill and start again; its store must be sound in the end."""
    with SimulatorProcess("--seed", "21") as engine, checked(places.new("mortal"), engine.base_url) as made:
        yield made


@pytest.fixture(scope="session")
def guarded(sglang: SimulatorProcess, places: Places) -> Iterator[Guarded]:
    with guarded_serving(places.new("guarded"), sglang.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def tight(places: Places) -> Iterator[Stand]:
    """A server with small limits and little patience."""
    environment = {
        "TURNLOG_STREAM_KEEPALIVE_S": "0.2",
        "TURNLOG_MAX_REQUEST_BYTES": "20000",
        "TURNLOG_MAX_UPSTREAM_BYTES": "60000",
        "TURNLOG_UPSTREAM_TIMEOUT_S": "1.5",
    }
    with standing(places.new("tight"), environment=environment) as made:
        yield made


@pytest.fixture
def filled(database_url: str, clean_environment: Callable[..., None]) -> str:
    """A store with a session of each kind, which the command finds in the environment."""
    asyncio.run(opened(database_url, fill))
    clean_environment(DATABASE_URL=database_url)
    return database_url


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What was printed since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


@pytest.fixture(params=["sglang", "vllm", "tito"])
def every(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A server before each engine, and one with a tokenizer."""
    found: Stand = request.getfixturevalue({"sglang": "stand", "vllm": "vllm_stand", "tito": "tito"}[request.param])
    return found
