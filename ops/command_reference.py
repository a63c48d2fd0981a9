"""Generates docs/commands.md from the command line: `python -m ops.command_reference`.

`--check` only reports whether the page is current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import typer.main

from ops.generated_page import GeneratedPage
from ops.server import ROOT
from turnlog.cli.commands import app

FILE = ROOT / "docs" / "commands.md"

INTRODUCTION = """# Commands

Every command of `turnlog` with its arguments and options, as `turnlog COMMAND --help` prints them. The page is made
from the code by `python -m ops.command_reference`. [Command line](cli.md) says what they have in common: the server and
its token, JSON, exit codes, how an interrupted export resumes.
"""

COMMON = {"url", "token", "as_json", "help"}
"""Names of the options that every command has."""


def generate() -> str:
    commands: Mapping[str, Any] = typer.main.get_group(app).commands
    panels: dict[str, list[str]] = {}
    for name, command in sorted(commands.items()):
        panels.setdefault(str(command.rich_help_panel), []).extend(_command(f"turnlog {name}", command))
    return INTRODUCTION + "".join(f"\n## {panel}\n\n" + "\n".join(panels[panel]) for panel in sorted(panels))


def _command(name: str, command: Any) -> Iterator[str]:
    """A command, or each of those below it."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    for one, found in below.items():
        yield from _command(f"{name} {one}", found)
    if below:
        return
    params = [one for one in command.params if one.name not in COMMON and not one.hidden]
    arguments = [one for one in params if one.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(one) for one in arguments)])
    yield f"### {name}\n\n`{usage}`: {_text(command.help)}\n"
    rows = [f"| {_names(one)} | {_meaning(one)} |" for one in params]
    if rows:
        yield "\n".join(("| | |", "| --- | --- |", *rows, ""))


def _argument(param: Any) -> str:
    name = str(param.name).upper().replace("_", "-")
    return name if param.required else f"[{name}]"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{str(param.name).upper().replace('_', '-')}`"
    return ", ".join(f"`{one}`" for one in (*param.opts, *param.secondary_opts))


def _meaning(param: Any) -> str:
    choices = [f"`{one}`" for one in _choices(param)]
    text = _text(param.help)
    if choices:
        text = f"{text} {', '.join(choices)}." if text else f"{', '.join(choices)}."
    default = param.default.value if isinstance(param.default, Enum) else param.default
    if not param.show_default or isinstance(default, bool) or not isinstance(default, str | int | float):
        return text
    return f"{text} Default: `{default if isinstance(default, str) else f'{default:g}'}`."


def _choices(param: Any) -> list[str]:
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(one.value) for one in annotation]
    return [str(one) for one in getattr(getattr(param, "type", None), "choices", ())]


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


PAGE = GeneratedPage(FILE, generate)

if __name__ == "__main__":
    sys.exit(PAGE.main("ops.command_reference", __doc__))
