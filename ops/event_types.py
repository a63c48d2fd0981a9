"""Generates turnlog/events.py, the client's types of events, from the server's: `python -m ops.event_types`.

A unit test says whether the file is current.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from app.domain.events import TYPES, BranchCause, ColumnRef
from ops.server import ROOT
from workers.reply import VersionSpan

FILE = ROOT / "turnlog" / "events.py"
NESTED = (VersionSpan, ColumnRef)
"""Objects within events that have a type of their own; of others the keys are not said."""

WIDTH = 116

HEAD = '''"""The events of sessions, as the server gives them: made by `python -m ops.event_types`, not edited.

`type` tells which one it is. In the events of all sessions each also has `session_id` and `position`. Fields that have
their default are left out: `app/domain/events.py` has the defaults, and says more of each event.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict
'''

BASE = '''class _Event(TypedDict):
    """`seq` counts a session's events from 1 without a gap; `at` is in seconds since the epoch."""

    seq: int
    at: float
    session_id: NotRequired[str]
    position: NotRequired[str]
'''

UNREADABLE = '''class UnreadableEvent(TypedDict):
    """In the events of all sessions: an event that cannot be read, and why. What is not known is None."""

    error: str
    position: str
    session_id: str | None
    seq: int | None
    type: str | None
    at: float | None
'''


def generate() -> str:
    types = ",\n    ".join(f'"{name}"' for name in TYPES)
    literals = f"BranchCause = {_spelled(BranchCause)}\n\nEventType = Literal[\n    {types},\n]\n"
    classes = [*(_typed_dict(kind, "TypedDict") for kind in NESTED), BASE]
    classes += [_typed_dict(kind, "_Event", f'type: Literal["{name}"]') for name, kind in TYPES.items()]
    union = "Event = (\n    " + "\n    | ".join(TYPES) + "\n)\n"
    return "\n\n".join([f"{HEAD}\n{literals}", *classes, union, UNREADABLE])


def _typed_dict(kind: type[msgspec.Struct], base: str, *more: str) -> str:
    """With the first paragraph of what the server says of it."""
    said = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    doc = [*textwrap.wrap(f'"""{said}"""', WIDTH), ""] if said else []
    lines = [*doc, *more, *_fields(kind)]
    body = textwrap.indent("\n".join(lines), "    ")
    return f"class {kind.__name__}({base}):\n{body}\n"


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        spelled = "BranchCause | None" if field.type == BranchCause | None else _spelled(field.type)
        yield f"{field.name}: {spelled if field.required else f'NotRequired[{spelled}]'}"


def _spelled(kind: Any) -> str:
    """A type as it comes in JSON."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "None"
    if origin in (Union, UnionType):
        return " | ".join(map(_spelled, parts))
    if origin is Literal:
        quoted = ", ".join(f'"{part}"' for part in parts)
        return f"Literal[{quoted}]"
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list[{_spelled(parts[0])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_spelled, parts))}]"
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind not in NESTED:
        values = {_spelled(field.type) for field in msgspec.structs.fields(kind)}
        value = values.pop() if len(values) == 1 else "Any"
        return f"list[{value}]" if kind.__struct_config__.array_like else f"dict[str, {value}]"
    return "Any" if kind is Any else str(kind.__name__)


if __name__ == "__main__":
    FILE.write_text(generate())
