"""Runs all checks in order and prints a line for each as soon as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated

import typer

from turnlog.amounts import amount
from turnlog.cli.doctor.findings import Finding, Level
from turnlog.cli.running import Json, Token, Url, current
from turnlog.client.address import DEFAULT

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    generate: Annotated[
        bool, typer.Option("--generate/--no-generate", help="Ask each engine for a few tokens, and judge the reply.")
    ] = True,
    url: Url = DEFAULT,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Check settings, database, engines and tokenizer, and say what to do. The exit code is 1 if there is a problem."""
    found = []
    for one in _examined(url, current(token), generate=generate):
        found.append(one)
        if not as_json:
            _print(one)
    counts = {level: sum(one.level is level for one in found) for level in Level}
    if as_json:
        from turnlog.cli.output import machine

        machine({"findings": [one.fields() for one in found], **{level.value: counts[level] for level in Level}})
    else:
        from turnlog.cli.output import line

        warnings, problems = amount(counts[Level.WARNING], "warning"), amount(counts[Level.PROBLEM], "problem")
        line(f"{counts[Level.OK]} ok, {warnings}, {problems}", "bold")
    if counts[Level.PROBLEM]:
        raise typer.Exit(1)


def _examined(url: str, token: str | None, *, generate: bool) -> Iterator[Finding]:
    """Checks that need no settings run even if the settings are invalid."""
    from turnlog.cli.doctor import engines, host, server, settings, store, tokenizer

    yield from host.versions()
    found, chosen = settings.examine()
    yield from found
    yield from host.limits()
    if token is None and chosen is not None and chosen.admin_token:
        token = chosen.admin_token[0]  # of a file
    told = yield from server.examine(url, token, expected=url != DEFAULT)
    if chosen is None:
        return
    yield from settings.advice(chosen)
    fleet = yield from store.examine(chosen)
    prompts = yield from tokenizer.examine(chosen)
    yield from asyncio.run(engines.examine(chosen, fleet, told, prompts, generate=generate))


def _print(one: Finding) -> None:
    from turnlog.cli.output import line

    line(f"{one.level.value:<8} {one.area}: {one.what}", _STYLES[one.level])
    if one.todo:
        line(f"{'':<8} → {one.todo}")
