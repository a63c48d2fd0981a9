"""The page's own tokenizer: it makes text of stored tokens, and no prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from app.errors import StartupError

Decode = Callable[[Sequence[int]], str]
"""The text of these ids, special tokens included."""


class _Model(msgspec.Struct):
    vocab: msgspec.Raw


class _File(msgspec.Struct):
    model: _Model


def decoder(path: str) -> Decode:
    """Of a `tokenizer.json`, or of a folder that has one. Raises StartupError."""
    from tokenizers import Tokenizer  # most servers never need it

    name = f"TURNLOG_PAGE_TOKENIZER={path!r}"
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    try:
        content = file.read_bytes()
        msgspec.json.decode(content, type=_File)  # the package raises Exception itself for what is no tokenizer
    except OSError as error:
        raise StartupError(f"{name}: {file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise StartupError(f"{name}: {file} is not a valid tokenizer: {error}") from error
    loaded = Tokenizer.from_buffer(content)

    def decode(ids: Sequence[int]) -> str:
        text: str = loaded.decode(list(ids), skip_special_tokens=False)
        return text

    return decode
