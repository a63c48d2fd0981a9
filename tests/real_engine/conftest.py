"""One engine at a time for all tests of its kind; each has a server of its own, and the engine's replies recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.engine import process as vllm
from ops.server import OwnProcess
from real_engine.compared import Lane, laid
from tests.tools.real_engine.models import trained_model
from tests.tools.real_sglang import process as sglang

CALLS = ("--tool-call-parser", "qwen")
ALL = (*CALLS, "--reasoning-parser", "qwen3", "--enable-return-routed-experts", "--sampling-defaults", "openai")


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    """Of the engine: `vllm`, `sglang`, which like it parses calls alone, or `sglang-parsers`."""
    return str(getattr(request, "param", "vllm"))


@pytest.fixture(scope="session")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (vllm if kind == "vllm" else sglang).is_installed():
        pytest.skip(f"there is no engine: sh ops/setup real-{'engine' if kind == 'vllm' else 'sglang'}")
    return trained_model() if kind == "vllm" else sglang.saved_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="session")
def engine(kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnProcess]:
    folder = tmp_path_factory.mktemp("engine")
    arguments = ALL if kind == "sglang-parsers" else CALLS
    process = vllm.EngineProcess(model, folder) if kind == "vllm" else sglang.SglangProcess(model, folder, *arguments)
    with process as made:
        yield made


@pytest.fixture(params=["capture", "tito"])
def lane(request: pytest.FixtureRequest, kind: str, engine: OwnProcess, model: Path, tmp_path: Path) -> Iterator[Lane]:
    """A server before the engine, with the model's tokenizer or without, whose store must be sound in the end."""
    environment = {"TURNLOG_TOKENIZER": str(model)} if request.param == "tito" else {}
    with laid(tmp_path, engine, model, environment, is_scripted=kind != "vllm") as made:
        yield made
