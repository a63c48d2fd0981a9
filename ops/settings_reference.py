"""Fills defaults and accepted values into the tables of docs/settings.md: `python -m ops.settings_reference`.

A unit test says whether the page is current, and has every setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.settings import PREFIX, Settings, can_be_off
from ops.server import ROOT

FILE = ROOT / "docs" / "settings.md"

DEFAULTS = {
    "features": "all but `rllm` and `search`",
    "workers": "CPUs, at most 16",
    "on_abort": "`return`; with a tokenizer `continue`",
    "history": "the first turn's choice",
    "session_secret": "the admin tokens",
}
"""Defaults that a value does not tell."""

_ROW = re.compile(r"^\| `TURNLOG_(\w+)` \|.*?\|.*?\| (.*) \|$", re.MULTILINE)


def filled(page: str) -> str:
    """The page with the defaults and the accepted values of the settings; its order and its texts are its own.

    Raises KeyError for a variable that is no setting.
    """
    return _ROW.sub(lambda row: _row(row[1].lower(), row[2]), page)


def told(page: str) -> list[str]:
    """The settings that the page has a row of, in its order."""
    return [row[1].lower() for row in _ROW.finditer(page)]


def _row(name: str, text: str) -> str:
    field = Settings.model_fields[name]
    default = DEFAULTS.get(name) or _default(name, field)
    return f"| `{PREFIX}{name.upper()}` | {default} | {_accepted(name, field)} | {text} |"


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if value is None or value == ():
        return "`off`" if can_be_off(field) and not name.startswith("moe_") else "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes"):
        return _size(value)
    return f"`{value}`" if isinstance(value, str) else f"{value:,}"


def _accepted(name: str, field: FieldInfo) -> str:
    words = [f"`{one}`" for one in _literals(field.annotation)]
    if field.annotation is bool:
        words = ["`true`", "`false`"]
    if get_origin(field.annotation) is tuple and words:
        words.append("several with commas")
    bounds = {key: getattr(one, key) for one in field.metadata for key in ("gt", "ge", "le") if hasattr(one, key)}
    if bounds:
        words.append(_range(bounds, is_size=name.endswith("_bytes")))
    if can_be_off(field):
        words.append("`off`")
    return ", ".join(words)


def _range(bounds: Mapping[str, int], is_size: bool) -> str:
    """Of a number that is over `gt` or at least `ge`, and at most `le`."""
    high = f"{bounds['le']:,}" if "le" in bounds else None
    if "gt" in bounds:
        return f"over {bounds['gt']}" if high is None else f"over {bounds['gt']}, at most {high}"
    least = _size(bounds["ge"]) if is_size else f"{bounds['ge']:,}"
    return f"from {least}" if high is None else f"{least} to {high}"


def _literals(annotation: Any) -> Iterator[str]:
    """The words that an annotation accepts."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for one in get_args(annotation):
            yield from _literals(one)


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return str(count)


if __name__ == "__main__":
    FILE.write_text(filled(FILE.read_text()))
