"""docs/cli.md names every command and every option there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
from typer.core import TyperGroup as Group

from turnlog.cli.commands import app

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
COMMON = {"--url", "--token", "--json", "--help", "-h"}
ELSEWHERE = {"--install-completion", "--shell", "--stop-timeout"}


def options() -> dict[str, set[str]]:
    """Of each command, its own and those of the commands below it."""
    found = {}
    for name, command in typer.main.get_group(app).commands.items():
        below = command.commands.values() if isinstance(command, Group) else ()
        params = [one for each in (command, *below) for one in each.params]
        every = {flag for one in params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("-")}
        found[name] = every - COMMON
    return found


def row_of(command: str) -> str:
    """The command's rows, or of one that has a section of its own, that."""
    if command == "export":
        return TEXT.partition("\n## Export\n")[2].partition("\n## ")[0]
    rows = [line for line in TEXT.splitlines() if re.match(rf"\| `{command}[ `]", line)]
    assert rows, command
    return "\n".join(rows)


def test_every_command_and_option_is_told() -> None:
    for command, flags in options().items():
        told = set(re.findall(r"`(-[a-z-]+)", row_of(command)))
        assert flags <= told, command


def test_nothing_else_is_told() -> None:
    every = set().union(*options().values(), COMMON, ELSEWHERE)
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT)) <= every
    assert {line.split()[1] for line in re.findall(r"^turnlog .*", TEXT, re.M)} <= set(options())
