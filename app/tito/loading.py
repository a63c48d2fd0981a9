"""Loads a tokenizer with `transformers`, from local files first. A model's own code is never run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from app.errors import StartupError
from app.extras import install_command
from app.tito.normalise import EngineDialect


def tokenizer(path_or_name: str, dialect: EngineDialect | None = None) -> tuple[Any, frozenset[int]]:
    """A fast tokenizer with a chat template, and the ids that end a generation by its `generation_config.json`.

    It is the one that an engine of this dialect makes of the folder. Raises StartupError, also where the dialect is not
    known and the two make different ones.
    """
    # With one text per call there is nothing to parallelise, and the package's threads would not have the caller's
    # niceness.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Otherwise it warns that PyTorch is missing.
    try:
        importlib.import_module("jinja2")  # transformers asks for it only when it renders the first template
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs the package {error.name}: {install_command('tito')}") from error
    loaded = _tokenizer(transformers, path_or_name)
    if not loaded.is_fast:
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: not a fast tokenizer (one with a tokenizer.json)")
    if dialect != "vllm":
        loaded = _as_sglang(transformers, path_or_name, loaded, dialect)
    if not loaded.chat_template:
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: the tokenizer has no chat template")
    source = loaded.chat_template
    source = "\n".join(source.values()) if isinstance(source, dict) else source
    model = rendered_elsewhere(_json(transformers, path_or_name, "config.json"), source)
    if model is not None:
        raise StartupError(
            f"TURNLOG_TOKENIZER={path_or_name!r}: engines render {model} with their own code, not with its chat "
            "template: unset TURNLOG_TOKENIZER to capture the engine's ids"
        )
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    stops = _json(transformers, path_or_name, "generation_config.json").get("eos_token_id")
    every = [loaded.eos_token_id, *(stops if isinstance(stops, list) else [stops])]
    return loaded, frozenset(token for token in every if isinstance(token, int))


def _as_sglang(transformers: ModuleType, path_or_name: str, loaded: Any, dialect: EngineDialect | None) -> Any:
    """The tokenizer as SGLang 0.5.23 makes it (`hf_transformers/tokenizer.py`).

    A class of `transformers` 5 may build another `pre_tokenizer` than `tokenizer.json` has. SGLang takes that of the
    file where the two are of other types. It also prefers the class that `tokenizer_config.json` names to none, and the
    first of several templates. vLLM does neither.
    """
    ours = _of_declared_class(transformers, path_or_name, loaded)
    path = _file(transformers, path_or_name, "tokenizer.json")
    backend = ours.backend_tokenizer
    if path is not None:
        raw = importlib.import_module("tokenizers").Tokenizer.from_file(path)
        if raw.pre_tokenizer and backend.pre_tokenizer and type(raw.pre_tokenizer) is not type(backend.pre_tokenizer):
            if dialect is None and ours is loaded:
                raise _depends(path_or_name)
            backend.pre_tokenizer, backend.decoder = raw.pre_tokenizer, raw.decoder
    if dialect is None and ours is not loaded and _splits(backend) != _splits(loaded.backend_tokenizer):
        raise _depends(path_or_name)
    if isinstance(ours.chat_template, dict):
        if dialect is None and len(set(ours.chat_template.values())) > 1:
            raise _depends(path_or_name)
        ours.chat_template = next(iter(ours.chat_template.values()))
    return ours


def _of_declared_class(transformers: ModuleType, path_or_name: str, loaded: Any) -> Any:
    if type(loaded).__name__ != "TokenizersBackend":
        return loaded
    name = _json(transformers, path_or_name, "tokenizer_config.json").get("tokenizer_class")
    if not isinstance(name, str) or name in ("PreTrainedTokenizer", "PreTrainedTokenizerBase"):
        return loaded
    declared = getattr(transformers, name, None)
    if declared is None or declared is type(loaded):
        return loaded
    try:
        own = declared.from_pretrained(path_or_name)
    except (OSError, ValueError, TypeError, ImportError):
        return loaded
    return own if own.is_fast else loaded


def _splits(backend: Any) -> tuple[Any, ...]:
    """What of a tokenizer decides which ids a text becomes, beside its vocabulary."""
    parts = (backend.normalizer, backend.pre_tokenizer)
    return tuple(None if part is None else part.__getstate__() for part in parts)


def _depends(path_or_name: str) -> StartupError:
    return StartupError(
        f"TURNLOG_TOKENIZER={path_or_name!r}: SGLang and vLLM load different tokenizers from this folder: set "
        "TURNLOG_UPSTREAM_DIALECT to that of the engines"
    )


def _tokenizer(transformers: ModuleType, path_or_name: str) -> Any:
    load = transformers.AutoTokenizer.from_pretrained
    unreadable = (OSError, ValueError, KeyError, ImportError)
    try:
        try:
            return load(path_or_name, local_files_only=True, trust_remote_code=False)
        except unreadable:
            if Path(path_or_name).exists():
                raise
            return load(path_or_name, trust_remote_code=False)
    except unreadable as error:
        why = type(error).__name__
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: no tokenizer can be loaded ({why})") from error


def _json(transformers: ModuleType, path_or_name: str, name: str) -> dict[str, Any]:
    """An object of the model's folder; an empty one if there is no such file."""
    path = _file(transformers, path_or_name, name)
    if path is None:
        return {}
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: {name} is not a JSON object") from error


def _file(transformers: ModuleType, path_or_name: str, name: str) -> str | None:
    path: str | None = transformers.utils.cached_file(path_or_name, name, _raise_exceptions_for_missing_entries=False)
    return path


# Models whose prompts an engine makes with code of its own, whatever chat template their folder has. Their template
# would give other ids than the engine's in silence, so they are refused by name at start. SGLang 0.5.23 tells them by
# `config.json` (`chat_encoding.py`, `python_chat_template.py`, `conversation.py` and `serving_chat.py`); vLLM 0.32 has
# renderers for the first five, too. A folder without `config.json` is told by its template.

_BY_ARCHITECTURE: Mapping[str, str] = {
    "DeepseekV4": "DeepSeek V4",
    "KimiK3": "Kimi K3",
    "Inkling": "Inkling",
    "Glm5Next": "GLM-5.3 Flash",
}
"""Parts of the names in `architectures`."""

_BY_TYPE: Mapping[str, str] = {
    "deepseek_v4": "DeepSeek V4",
    "deepseek_v41": "DeepSeek V4.1",
    "kimi_k3": "Kimi K3",
    "minimax_m3_vl": "MiniMax M3",
    "internvl_chat": "InternVL 2.5",
    "deepseek_vl_v2": "DeepSeek VL2",
    "multi_modality": "Janus Pro",
    "phi4mm": "Phi 4 Multimodal",
    "minicpmv": "MiniCPM-V",
    "minicpmo": "MiniCPM-o",
    "moss_vl": "MOSS-VL",
    "deepseek-ocr": "DeepSeek OCR",
    "unlimited-ocr": "Unlimited OCR",
    "paddleocr_vl": "PaddleOCR-VL",
}
"""`model_type`."""

_BY_WORDS: Mapping[tuple[str, ...], str] = {
    ("drop_thinking",): "DeepSeek V4",
    ("thinking_effort", "image_prompts"): "Kimi K3",
    ("[gMASK]<sop>", "Reasoning Effort:", "<arg_key>"): "GLM-5.3",
}
"""What only the template of such a model has."""

_TOGGLE = "enable_thinking"
"""GLM's other templates have it."""


def rendered_elsewhere(config: Mapping[str, Any], source: str) -> str | None:
    """The model's name; None for one whose chat template engines use. `source` is the template's text."""
    kind, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(kind, str) and kind in _BY_TYPE:
        return _BY_TYPE[kind]
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for part, name in _BY_ARCHITECTURE.items():
        if part in first:
            return name
    for words, name in _BY_WORDS.items():
        if all(word in source for word in words) and not (name == "GLM-5.3" and _TOGGLE in source):
            return name
    return None
