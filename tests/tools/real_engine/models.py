"""The tiny models that the real engine serves in tests, each made once and kept, and their own logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ops.engine.process import kept_model, run_module
from ops.server import ROOT
from tests.tools.tito_check import tokenizers

_TOOLS = ROOT / "tests" / "tools"
_TOKENIZERS = _TOOLS / "tito_check" / "tokenizers.py"
_PACKAGE = "tests.tools.real_engine"


class Rescored(msgspec.Struct, frozen=True):
    """`largest` is the largest difference of a logprob, in nats."""

    rows: int
    tokens: int
    largest: float


def trained_model() -> Path:
    """The folder of a model that calls its tool; the first call takes a minute."""

    def make(folder: Path) -> None:
        run_module(f"{_PACKAGE}.train", str(tokenizers.save(folder, "qwen3").rename(folder / "model")))

    recipe = (_TOOLS / "real_engine" / "train.py", _TOOLS / "real_engine" / "weather.py", _TOKENIZERS)
    return kept_model(recipe, make)


def image_model() -> Path:
    """The folder of a model that sees images."""

    def make(folder: Path) -> None:
        run_module(f"{_PACKAGE}.images", str(folder / "model"))

    return kept_model((_TOOLS / "real_engine" / "images.py", _TOKENIZERS), make)


def rescored(model: Path, rows: Iterable[Mapping[str, Any]]) -> Rescored:
    """Compare the logprobs of exported rows with those that `transformers` computes, in float32."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return msgspec.json.decode(run_module(f"{_PACKAGE}.rescore", str(model), given=lines), type=Rescored)
