"""docs/commands.md is made from the commands; docs/cli.md names no command and no option that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
from typer.core import TyperGroup as Group

from ops import command_reference
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


def test_the_page_of_commands_is_current() -> None:
    assert command_reference.PAGE.is_current(), "run python -m ops.command_reference"


def test_every_command_and_option_is_told() -> None:
    page = command_reference.generate()
    for command, flags in options().items():
        sections = [one for one in page.split("\n### ") if re.match(rf"turnlog {command}\b", one)]
        rows = [line for one in sections for line in one.splitlines() if line.startswith("| `")]
        assert sections, command
        assert flags <= set(re.findall(r"`(-[a-z-]+)`", " ".join(row.split(" | ")[0] for row in rows))), command
        assert not [row for row in rows if row.endswith("|  |")], f"{command}: options without a text"


def test_nothing_else_is_told() -> None:
    every = set().union(*options().values(), COMMON, ELSEWHERE)
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT)) <= every
    assert {line.split()[1] for line in re.findall(r"^turnlog .*", TEXT, re.M)} <= set(options())
