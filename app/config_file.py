"""Reads settings from the TOML file that TURNLOG_CONFIG names; a variable takes precedence over it."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from app.errors import StartupError
from app.setting_names import PREFIX

VARIABLE = PREFIX + "CONFIG"


class ConfigFile(NamedTuple):
    """`values` are texts as a variable would have, by the settings' names; `lines` where they stand."""

    path: str
    values: Mapping[str, str]
    lines: Mapping[str, int]

    def place(self, name: str) -> str:
        return f"{self.path}:{self.lines[name]}: {name}"


def read_config(known: Collection[str]) -> ConfigFile:
    """The values that no variable sets; none without a file.

    Raises StartupError for a file that cannot be read, an unknown key and a date. No value is in its lines.
    """
    path = os.environ.get(VARIABLE, "").strip()
    if not path:
        return ConfigFile("", {}, {})
    try:
        text = Path(path).read_text(encoding="utf-8")
        given = tomllib.loads(text)
    except OSError as error:
        raise StartupError(f"{VARIABLE}={path!r}: {error.strerror}") from None
    except ValueError as error:  # of TOML, with its line, or of UTF-8
        raise StartupError(f"{path}: {'not UTF-8' if isinstance(error, UnicodeError) else error}") from None
    lines = {name: _line_of(name, text) for name in given}
    mistakes = [_unknown(path, lines[name], name, known) for name in given if name not in known]
    if mistakes:
        raise StartupError(*mistakes)
    variables = {name.upper() for name, value in os.environ.items() if value.strip()}
    chosen = {name: value for name, value in given.items() if PREFIX + name.upper() not in variables}
    try:
        values = {name: _as_text(value) for name, value in chosen.items()}
    except TypeError:  # a date, which JSON does not have either
        raise StartupError(f"{path}: expected text, a number, true or false, a list or a table") from None
    return ConfigFile(path, values, lines)


def _as_text(value: object) -> str:
    """Raises TypeError."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return json.dumps(value)


def _line_of(name: str, text: str) -> int:
    """Where a key stands at the top level: `name = …`, `name.field = …` or `[name]`."""
    key = rf"[\"']?{re.escape(name)}[\"']?"
    match = re.search(rf"^[ \t]*(?:{key}[ \t]*[.=]|\[+[ \t]*{key}[ \t]*[.\]])", text, re.MULTILINE)
    return 1 if match is None else text.count("\n", 0, match.start()) + 1


def _unknown(path: str, line: int, name: str, known: Collection[str]) -> str:
    near = get_close_matches(name.lower().removeprefix(PREFIX.lower()), known, n=1)
    return f"{path}:{line}: {name} is not a setting" + (f": did you mean {near[0]}?" if near else "")
