"""What a user of Turnlog can see of a checkout without a server: settings, stored events and commands, a line each.

A part of the digest, which runs it as a program: the code that is looked at is that of the working folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))


def main() -> None:
    """Print all lines, sorted within their kind."""
    for kind in (settings, events, commands):
        for line in sorted(kind()):
            print(line)


def settings() -> Iterator[str]:
    """Each setting with its default."""
    from app.settings import Settings

    for name, field in Settings.model_fields.items():
        yield f"setting {name} = {field.default!r}"


def events() -> Iterator[str]:
    """Each event with the version under which it is written, and its fields."""
    from app.domain import events, fleet

    for name, kind in {**events.TYPES, **fleet.TYPES}.items():
        yield f"event {name} {kind.VERSION} {' '.join(kind.__struct_fields__)}"


def commands() -> Iterator[str]:
    """Each command with its options and arguments."""
    import typer.main

    from turnlog.cli.commands import app_of

    yield from _commands("turnlog", typer.main.get_command(app_of()))


def _commands(name: str, command: Any) -> Iterator[str]:
    options = sorted(json.dumps(sorted([*one.opts, *one.secondary_opts])) for one in command.params)
    yield f"command {name} {' '.join(options)}"
    for below, one in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {below}", one)


if __name__ == "__main__":
    main()
