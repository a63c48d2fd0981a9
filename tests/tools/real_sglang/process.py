"""SGLang with the scripted scheduler as a process, in the environment that `sh ops/setup real-sglang` fills."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ops.engine.process import SERVED_AS
from ops.server import PORT, ROOT, OwnProcess
from tests.tools.real_sglang.plays import FOLDER, Plays
from tests.tools.tito_check import tokenizers

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
START_S = 300.0

_ARGUMENTS = (
    "--device cpu --skip-server-warmup --incremental-streaming-output --weight-version 0 --log-level-http warning"
)
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
"""What SGLang reads of a model whose weights nobody loads."""


def is_installed() -> bool:
    """Did `sh ops/setup real-sglang` fill the environment?"""
    return PYTHON.exists()


def saved_model(folder: Path, family: str) -> Path:
    """The folder of a model without weights: a tokenizer, a chat template and a configuration."""
    made = tokenizers.save(folder, family)
    vocabulary = len(tokenizers.load(made))
    (made / "config.json").write_text(json.dumps({**_CONFIG, "vocab_size": -(-vocabulary // 64) * 64}))
    return made


class SglangProcess(OwnProcess):
    """As a context manager. `folder` gets its log and what it samples; `plays` says what that is."""

    def __init__(self, model: Path, folder: Path, *arguments: str) -> None:
        self.plays = Plays(folder)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        command = [str(PYTHON), "-m", "tests.tools.real_sglang.serve", "--model-path", str(model)]
        command += ["--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--port", PORT]
        super().__init__(
            [*command, *_ARGUMENTS.split(), *arguments],
            folder / "sglang.log",
            environment={**inherited, **_ENVIRONMENT, FOLDER: str(folder)},
            start_timeout_s=START_S,
            group=True,
        )
