"""Loads a tokenizer with `transformers`, from local files first. A model's own code is never run."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from app.errors import StartupError
from app.extras import install


def tokenizer(path_or_name: str) -> tuple[Any, frozenset[int]]:
    """A fast tokenizer with a chat template, and the ids that end a generation by its `generation_config.json`.

    Raises StartupError.
    """
    # With one text per call there is nothing to parallelise, and the package's threads would not have the caller's
    # niceness.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers = _transformers()
    loaded = _tokenizer(transformers, path_or_name)
    if not loaded.is_fast:
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: not a fast tokenizer (one with a tokenizer.json)")
    if not loaded.chat_template:
        raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: the tokenizer has no chat template")
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    return loaded, _stops(transformers, path_or_name, loaded.eos_token_id)


def _transformers() -> ModuleType:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Otherwise it warns that PyTorch is missing.
    try:
        importlib.import_module("jinja2")  # transformers asks for it only when it renders the first template
        return importlib.import_module("transformers")
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs the package {error.name}: {install('tito')}") from error


def _tokenizer(transformers: ModuleType, path_or_name: str) -> Any:
    load = transformers.AutoTokenizer.from_pretrained
    try:
        return load(path_or_name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if Path(path_or_name).exists():
            raise _not_loaded(path_or_name, error) from error
    try:
        return load(path_or_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _not_loaded(path_or_name, error) from error


def _not_loaded(path_or_name: str, error: Exception) -> StartupError:
    return StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: no tokenizer can be loaded ({type(error).__name__})")


def _stops(transformers: ModuleType, path_or_name: str, eos: int | None) -> frozenset[int]:
    path = transformers.utils.cached_file(
        path_or_name, "generation_config.json", _raise_exceptions_for_missing_entries=False
    )
    stops = msgspec.json.decode(Path(path).read_bytes()).get("eos_token_id") if path else None
    every = [eos, *(stops if isinstance(stops, list) else [stops])]
    return frozenset(token for token in every if isinstance(token, int))
