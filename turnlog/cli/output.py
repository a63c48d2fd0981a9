"""Output for people and programs. Text of agents and engines is shown, never interpreted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

DASH = "–"

UNBOUNDED = 10_000
"""The width if the output is not a terminal: nothing is cut."""

GAP = 2
"""Spaces between two columns."""

SHORTEST = 16
"""The width to which a long column may be cut."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
"""Also what turns the direction of text, and separates lines."""


Record = Mapping[str, Any]


class Column(NamedTuple):
    """`of`: the field that it shows, or a function of the record; by default the field named like its title.

    `whole`: never cut or left out, such as ids, which are copied. `long`: may be cut to SHORTEST.
    """

    title: str
    of: str | Callable[[Any], object] | None = None
    whole: bool = False
    right: bool = False
    long: bool = False

    def text(self, record: Record) -> str:
        return shown(self.of(record) if callable(self.of) else record[self.of or self.title])


def plain(text: str) -> str:
    """Without control characters: an agent's text must not move the cursor or colour the terminal."""
    return text.translate(_CONTROLS)


def console(*, errors: bool = False) -> Console:
    """Rich reads NO_COLOR, TERM and the terminal's width."""
    stream = sys.stderr if errors else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else UNBOUNDED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def table(columns: Sequence[Column], records: Iterable[Record]) -> None:
    """Print a table with one line per row. Columns that do not fit a narrow terminal are left out; a line says so."""
    out = console()
    made, missing = fitted(columns, records, out)
    out.print(made)
    if missing:
        print(f"no room for: {', '.join(missing)}", file=sys.stderr)


def fitted(columns: Sequence[Column], records: Iterable[Record], out: Console) -> tuple[Table, list[str]]:
    """A table for the console, and the titles of the columns that it has no room for."""
    cells = [[column.text(record) for column in columns] for record in records]
    natural = [
        max(cell_len(text) for text in (column.title, *(row[at] for row in cells))) for at, column in enumerate(columns)
    ]
    widths = fitting(columns, natural, out.width)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
    for at, width in widths.items():
        justify: JustifyMethod = "right" if columns[at].right else "left"
        made.add_column(columns[at].title, no_wrap=True, overflow="ellipsis", justify=justify, width=width)
    for row in cells:
        made.add_row(*(Text(row[at]) for at in widths))
    out.width = max(out.width, sum(widths.values()) + GAP * len(widths))
    return made, [column.title for at, column in enumerate(columns) if at not in widths]


def fitting(columns: Sequence[Column], natural: Sequence[int], room: int) -> dict[int, int]:
    """The columns that fit and their widths: long ones are cut first, then the last ones are left out.

    Columns that are `whole` always stay.
    """
    widths = dict(enumerate(natural))

    def excess() -> int:
        return sum(widths.values()) + GAP * (len(widths) - 1) - room

    for at, column in reversed(list(enumerate(columns))):
        if column.long and excess() > 0:
            widths[at] = max(widths[at] - excess(), min(widths[at], SHORTEST))
    for at, column in reversed(list(enumerate(columns))):
        if not column.whole and excess() > 0:
            del widths[at]
    return widths


def line(text: str = "", style: str | None = None) -> None:
    console().print(Text(plain(text), style=style or ""), soft_wrap=True)


def shown(value: object) -> str:
    """The text of a cell: a dash if it is empty, numbers shortened."""
    match value:
        case None | "" | [] | ():
            return DASH
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list() | tuple():
            return ", ".join(shown(one) for one in value)
    return plain(str(value))


def machine(value: Any) -> None:
    """One JSON document on a line, for programs: in ASCII, which every encoding of the output has."""
    sys.stdout.write(json.dumps(value, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def when(at: float | None, *, milliseconds: bool = False) -> str | None:
    """A time in the terminal's time zone."""
    if at is None:
        return None
    return datetime.fromtimestamp(at).isoformat(sep=" ", timespec="milliseconds" if milliseconds else "seconds")


def since(at: float | None) -> str | None:
    """How long ago, roughly."""
    return None if at is None else duration(max(time.time() - at, 0.0))


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def compact(fields: Mapping[str, Any], most: int) -> str:
    """Fields as `name=value`, long values cut to `most` characters."""
    parts = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        parts.append(f"{name}={text if len(text) <= most else text[: most - 1] + '…'}")
    return plain(" ".join(parts))
