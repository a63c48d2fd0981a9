"""One engine for all tests here; each has a server of its own, and the engine's replies recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.proxy import RecordingProxy
from integration.tito import checked

from ops.engine.process import EngineProcess, is_installed
from real_engine.compared import Lane
from tests.tools.real_engine.models import trained_model


@pytest.fixture(scope="session")
def model() -> Path:
    if not is_installed():
        pytest.skip("there is no engine: sh ops/setup real-engine")
    return trained_model()


@pytest.fixture(scope="session")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(model, tmp_path_factory.mktemp("engine")) as made:
        yield made


@pytest.fixture(params=["capture", "tito"])
def lane(request: pytest.FixtureRequest, engine: EngineProcess, model: Path, tmp_path: Path) -> Iterator[Lane]:
    """A server before the engine, with the model's tokenizer or without, whose store must be sound in the end."""
    environment = {"TURNLOG_TOKENIZER": str(model)} if request.param == "tito" else {}
    with (
        RecordingProxy(engine.base_url) as proxy,
        checked(tmp_path, proxy.base_url, environment=environment) as stand,
    ):
        yield Lane(stand, proxy, model, builds_prompts=bool(environment))
