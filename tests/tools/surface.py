"""What a user of Turnlog can see of a checkout: routes, settings, stored events and commands, a line each.

Run it in two checkouts and compare: `python tests/tools/surface.py > before`, the same in the other, `diff`. The code
that is looked at is that of the working folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))


def main() -> None:
    """Print all lines, sorted within their kind."""
    for kind in (routes, settings, events, commands):
        for line in sorted(kind()):
            print(line)


def routes() -> Iterator[str]:
    """Each route with its parameters, whether it takes a body, and its statuses."""
    from app.main import create_app
    from app.settings import Settings

    try:
        openapi = importlib.import_module("app.api.openapi")
    except ModuleNotFoundError:
        openapi = importlib.import_module("app.http.openapi")
    for path, operations in openapi.document(create_app(Settings()))["paths"].items():
        for method, operation in operations.items():
            parameters = sorted(_parameter(one) for one in operation.get("parameters", []))
            body = " body" if "requestBody" in operation else ""
            yield f"route {method.upper()} {path} ({', '.join(parameters)}){body} -> {sorted(operation['responses'])}"


def _parameter(parameter: dict[str, Any]) -> str:
    return f"{parameter.get('in')}:{parameter.get('name')}" + ("!" if parameter.get("required") else "")


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
