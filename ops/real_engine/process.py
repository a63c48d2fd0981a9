"""vLLM on the CPU as a process of its own, with a tiny model that is trained once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ops.server import ROOT, STOP_S, is_healthy, reserve_port
from ops.tito_check import tokenizers

FOLDER = ROOT / ".venv-engine"
SERVED_AS = "tiny"

_PYTHON = FOLDER / "bin" / "python"
_RECIPE = ("real_engine/train.py", "real_engine/weather.py", "tito_check/tokenizers.py")
"""Where one of these changes, the model is trained anew."""

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
    "VLLM_TARGET_DEVICE": "cpu",
}


class EngineDidNotStart(Exception):
    """The process ended before it answered, or took too long; the message is what it printed."""


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
    recipe = b"".join((ROOT / "ops" / name).read_bytes() for name in _RECIPE)
    kept = FOLDER / "models" / hashlib.sha256(recipe).hexdigest()[:16]
    if not kept.exists():
        making = kept.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        made = tokenizers.save(making, "qwen3")
        _run("train", str(made))
        made.rename(kept)
        making.rmdir()
    return kept


def rescored(model: Path, rows: Iterable[Mapping[str, Any]]) -> Rescored:
    """Compare the logprobs of exported rows with those that `transformers` computes, in float32."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return msgspec.json.decode(_run("rescore", str(model), given=lines), type=Rescored)


def _run(module: str, *arguments: str, given: str = "") -> str:
    """What a module of this package prints that runs in the engine's environment."""
    command = [str(_PYTHON), "-m", f"ops.real_engine.{module}", *arguments]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


class EngineProcess:
    """A running `vllm serve`, as a context manager. `folder` gets its log."""

    def __init__(self, model: Path, folder: Path, *, start_timeout_s: float = 300.0) -> None:
        self._model = model
        self._port = reserve_port(self)
        self._log = folder / "engine.log"
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> EngineProcess:
        """Start and wait until it answers. Raises EngineDidNotStart."""
        command = [str(FOLDER / "bin" / "vllm"), "serve", str(self._model), "--served-model-name", SERVED_AS]
        command += ["--host", "127.0.0.1", "--port", str(self._port), *_ARGUMENTS.split()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **_ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self._start_timeout_s
        while not is_healthy(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise EngineDidNotStart(self._log.read_text(errors="replace"))
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        """End it with the processes that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
