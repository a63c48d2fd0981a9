"""vLLM on the CPU as a process of its own, with a tiny model that is trained once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ops.server import PORT, ROOT, OwnProcess
from tests.tools.tito_check import tokenizers

FOLDER = ROOT / ".venv-engine"
SERVED_AS = "tiny"
START_S = 300.0

_PYTHON = FOLDER / "bin" / "python"
_RECIPE = ("real_engine/train.py", "real_engine/weather.py", "tito_check/tokenizers.py")
"""Where one of these changes, the model is trained anew."""

_IMAGES_RECIPE = ("real_engine/images.py", "tito_check/tokenizers.py")

_ARGUMENTS = "--dtype float32 --enforce-eager --max-num-seqs 16 --enable-auto-tool-choice --tool-call-parser hermes"
_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


class Rescored(msgspec.Struct, frozen=True):
    """`largest` is the largest difference of a logprob, in nats."""

    rows: int
    tokens: int
    largest: float


def is_installed() -> bool:
    """Did `sh ops/setup real-engine` fill its environment?"""
    return (FOLDER / "bin" / "vllm").exists()


def trained_model() -> Path:
    """The model's folder; the first call takes a minute, those after it find what that one made."""

    def make(folder: Path) -> None:
        _run("train", str(tokenizers.save(folder, "qwen3").rename(folder / "model")))

    return _kept(_RECIPE, make)


def image_model() -> Path:
    """The folder of a model that sees images, kept too."""
    return _kept(_IMAGES_RECIPE, lambda folder: _run("images", str(folder / "model")))


def _kept(recipe: tuple[str, ...], make: Callable[[Path], object]) -> Path:
    """What `make` makes as `model` in its folder, made anew where a file of the recipe has changed."""
    content = b"".join((ROOT / "tests" / "tools" / name).read_bytes() for name in recipe)
    kept = FOLDER / "models" / hashlib.sha256(content).hexdigest()[:16]
    if not kept.exists():
        making = kept.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        make(making)
        (making / "model").rename(kept)
        making.rmdir()
    return kept


def rescored(model: Path, rows: Iterable[Mapping[str, Any]]) -> Rescored:
    """Compare the logprobs of exported rows with those that `transformers` computes, in float32."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return msgspec.json.decode(_run("rescore", str(model), given=lines), type=Rescored)


def _run(module: str, *arguments: str, given: str = "") -> str:
    """What a module of this package prints that runs in the engine's environment."""
    command = [str(_PYTHON), "-m", f"tests.tools.real_engine.{module}", *arguments]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


class EngineProcess(OwnProcess):
    """A running `vllm serve`, as a context manager. `folder` gets its log.

    With `logprobs_mode` it is in dev mode, where it says its mode.
    """

    def __init__(self, model: Path, folder: Path, logprobs_mode: str | None = None) -> None:
        asked = ["--logprobs-mode", logprobs_mode] if logprobs_mode else []
        dev_mode = {"VLLM_SERVER_DEV_MODE": "1"} if logprobs_mode else {}
        command = [str(FOLDER / "bin" / "vllm"), "serve", str(model), "--served-model-name", SERVED_AS]
        super().__init__(
            [*command, "--host", "127.0.0.1", "--port", PORT, *_ARGUMENTS.split(), *asked],
            folder / "engine.log",
            environment={**os.environ, **_ENVIRONMENT, **dev_mode},
            start_timeout_s=START_S,
            group=True,
        )
