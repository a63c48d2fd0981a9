"""The operator's own picker, from TURNLOG_PICKER: which branches of a session become rows."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from app.domain.branches import Picker
from app.errors import StartupError


def load_picker(path: str | None) -> Picker | None:
    """The function at a dotted path, `package.module.function`. Raises StartupError."""
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartupError(
            f"TURNLOG_PICKER={path!r}: accepted is the dotted path of a function that can be imported: {error}"
        ) from error
    if not callable(found):
        raise StartupError(f"TURNLOG_PICKER={path!r}: accepted is the dotted path of a function; this is none")
    return cast(Picker, found)
