"""The tokenizer that an engine makes of a folder, and the models that engines render with code of their own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tables import rows

from app.errors import StartupError
from app.tito import loading
from app.tito.loading import rendered_elsewhere
from tests.tools.tito_check.tokenizers import save_with

tokenizers = importlib.import_module("tokenizers")

TEXT = "year 12345 100%"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def folder_of(path: Path, config: dict[str, Any], **more: Any) -> Path:
    """A folder whose `tokenizer.json` splits at bytes alone, and which says what model it is of."""
    folder = save_with(path / "t", TEMPLATE)
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator([TEXT] * 9, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**written, **more}))
    return folder


def ids(folder: Path, dialect: Any) -> list[int]:
    tokenizer, _ = loading.tokenizer(str(folder), dialect)
    found: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    return found


@pytest.mark.parametrize("kind", ["qwen2", "cohere"])
def test_a_tokenizer_that_transformers_rebuilds_is_the_one_that_the_engine_has(tmp_path: Path, kind: str) -> None:
    folder = folder_of(
        tmp_path, {"model_type": kind}, tokenizer_class="Qwen2Tokenizer" if kind == "qwen2" else "CohereTokenizer"
    )
    of_file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert ids(folder, "sglang") == of_file
    rebuilt = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    assert ids(folder, "vllm") == rebuilt.encode(TEXT, add_special_tokens=False) != of_file
    with pytest.raises(StartupError, match=r"set TURNLOG_UPSTREAM_DIALECT to that of the engines$"):
        ids(folder, None)


def test_a_tokenizer_that_every_engine_loads_alike_needs_no_dialect(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"model_type": "no_such_model"})
    assert ids(folder, None) == ids(folder, "sglang") == ids(folder, "vllm")


@pytest.mark.parametrize(("config", "source", "name"), rows("tito_own_code"))
def test_models_that_engines_render_with_their_own_code(config: dict[str, Any], source: str, name: str | None) -> None:
    assert rendered_elsewhere(config, source) == name


def test_such_a_model_is_refused_by_name_at_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"})
    with pytest.raises(StartupError, match="engines render Kimi K3 with their own code") as error:
        loading.tokenizer(str(folder), "sglang")
    assert "\n" not in str(error.value)
