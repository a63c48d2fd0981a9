"""docs/cli.md names no command and no option that there is not; every option has a help text."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
from typer.core import TyperArgument, TyperOption
from typer.core import TyperGroup as Group

from turnlog.cli.commands import app_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
COMMON = {"--url", "--token", "--json", "--help", "-h"}
ELSEWHERE = {"--install-completion", "--shell", "--stop-timeout"}


def options() -> dict[str, list[TyperArgument | TyperOption]]:
    """Of each command, its own and those of the commands below it."""
    found = {}
    for name, command in typer.main.get_group(app_of()).commands.items():
        below = command.commands.values() if isinstance(command, Group) else ()
        found[name] = [parameter for each in (command, *below) for parameter in each.params]
    return found


def test_every_option_has_a_help_text() -> None:
    assert not [
        (name, one.name) for name, params in options().items() for one in params if not getattr(one, "help", "")
    ]


def test_nothing_else_is_told() -> None:
    flags = {flag for params in options().values() for one in params for flag in (*one.opts, *one.secondary_opts)}
    every = {*flags, *COMMON, *ELSEWHERE}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT)) <= every
    assert {line.split()[1] for line in re.findall(r"^turnlog .*", TEXT, re.M)} <= set(options())
    needs = TEXT.partition("| commands | need |")[2].partition("\n\n")[0]
    named = {name for line in needs.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", line.split("|")[1])}
    assert named == set(options())
