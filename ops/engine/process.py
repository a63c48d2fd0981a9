"""vLLM on the CPU as a process, and programs that need PyTorch, both in the engine's environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ops.server import PORT, ROOT, OwnProcess

FOLDER = ROOT / ".venv-engine"
PYTHON = FOLDER / "bin" / "python"
SERVED_AS = "tiny"
START_S = 300.0

# The worker shares the engine core's process, as on a GPU: vLLM on the CPU else starts one more, which takes as long
# again to import PyTorch.
_ARGUMENTS = (
    "--dtype float32 --enforce-eager --max-num-seqs 16 --enable-auto-tool-choice --tool-call-parser hermes "
    "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
)
_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def is_installed() -> bool:
    """Did `sh ops/setup real-engine` fill the engine's environment?"""
    return (FOLDER / "bin" / "vllm").exists()


def environment() -> dict[str, str]:
    """The environment variables of a process that runs in the engine's environment."""
    return {**os.environ, **_ENVIRONMENT}


def run_module(module: str, *arguments: str, given: str = "") -> str:
    """What a module of this checkout prints that runs in the engine's environment.

    Raises subprocess.CalledProcessError if it ends with another status than 0.
    """
    return subprocess.run(
        [str(PYTHON), "-m", module, *arguments],
        cwd=ROOT,
        env=environment(),
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def kept_model(recipe: Sequence[Path], make: Callable[[Path], object]) -> Path:
    """The folder of a model that `make` puts as `model` into the folder that it is given.

    The model is kept in the engine's environment, and made anew where a file of the recipe has
    changed.
    """
    content = b"".join(path.read_bytes() for path in recipe)
    kept = FOLDER / "models" / hashlib.sha256(content).hexdigest()[:16]
    if not kept.exists():
        making = kept.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        make(making)
        (making / "model").rename(kept)
        making.rmdir()
    return kept


class EngineProcess(OwnProcess):
    """A running `vllm serve` in dev mode, as a context manager. `folder` gets its log."""

    def __init__(self, model: Path, folder: Path, *arguments: str) -> None:
        command = [str(FOLDER / "bin" / "vllm"), "serve", str(model)]
        command += ["--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--port", PORT]
        super().__init__(
            [*command, *_ARGUMENTS.split(), *arguments],
            folder / "engine.log",
            environment=environment(),
            start_timeout_s=START_S,
            group=True,
        )
