"""`turnlog diff`: two rollouts side by side, aligned by what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from turnlog.alignment import START, Row, Step, add_turn, align, first_difference
from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json
from turnlog.client.address import segment

if TYPE_CHECKING:
    from rich.text import Text

    from turnlog.client._sync.transport import Transport

HELP = "A session's id, or id@branch."


class _Side(NamedTuple):
    """A rollout: what the server says of it, and its steps, which begin with the task."""

    key: str
    said: Mapping[str, Any]
    steps: Sequence[Step]


def diff(
    ctx: typer.Context,
    one: Annotated[str, typer.Argument(help=HELP, autocompletion=complete.sessions)],
    other: Annotated[str, typer.Argument(help=HELP, autocompletion=complete.sessions)],
    every: Annotated[bool, typer.Option("--all", help="Also show the steps that are the same.")] = False,
) -> None:
    """Show where two rollouts differ. The exit code is 1 if they do."""
    server = remote(ctx)
    sides = (_read(server, one), _read(server, other))
    rows = align(sides[0].steps, sides[1].steps)
    difference = first_difference(sides[0].steps, sides[1].steps, rows, one, other)
    heads = [
        {name: side.said.get(name) for name in ("session_id", "branch", "status", "reward", "annotations")}
        for side in sides
    ]
    cells = [
        {"same": _is_same(sides, row), "cells": [_cell(side, at) for side, at in zip(sides, row, strict=True)]}
        for row in rows
    ]
    if not printed_as_json(ctx, {"rollouts": heads, "difference": difference, "rows": cells}):
        _print(sides, rows, difference, every=every)
    if difference is not None:
        raise typer.Exit(1)


def _read(server: Transport, key: str) -> _Side:
    """The newest turn's branch, or the named one, page by page."""
    session_id, _, branch = key.partition("@")
    if branch and not branch.isdecimal():
        raise UsageError(f"{key}: the branch must be a number")
    path, place = f"/sessions/{segment(session_id)}/messages", {"branch": branch or None}
    first = page = server.read("GET", path, parameters=place)
    messages = list(page["messages"])
    while page["next_cursor"] is not None:
        page = server.read("GET", path, parameters={"cursor": page["next_cursor"]})
        messages += page["messages"]
    steps = [START]
    for turn, said in groupby(messages, key=lambda one: one["turn"]):
        own = [one["message"] for one in said]
        add_turn(steps, turn, [] if None in own else own, f"turn {turn} of {key}")
    return _Side(key, first, steps)


def _is_same(sides: tuple[_Side, _Side], row: Row) -> bool:
    i, j = row
    return i is not None and j is not None and sides[0].steps[i].agrees(sides[1].steps[j])


def _cell(side: _Side, at: int | None) -> dict[str, Any] | None:
    """Turn 0 is the task."""
    if at is None:
        return None
    step = side.steps[at]
    actions = [asdict(action) for action in step.actions]
    return {"turn": step.turn, "actions": actions, "results": step.results, "failed": step.failed}


def _print(sides: tuple[_Side, _Side], rows: Sequence[Row], difference: str | None, *, every: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from turnlog.cli.output import GAP, UNBOUNDED, console, line, plain

    for side in sides:
        line(_head(side))
    line("No difference." if difference is None else f"{difference}.", "bold")
    out = console()
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", expand=out.width < UNBOUNDED)
    made.add_column("step", no_wrap=True)
    for side in sides:
        made.add_column(plain(side.key), ratio=1, overflow="fold")
    for same, part in groupby(rows, key=lambda row: not every and _is_same(sides, row)):
        together = list(part)
        steps = [i for i, _ in together if i]
        if same and steps:
            is_one = len(steps) == 1
            text = f"{amount(len(steps), 'step')} {'is' if is_one else 'are'} the same"
            made.add_row(f"  {steps[0]}" if is_one else f"  {steps[0]}–{steps[-1]}", Text(text, "dim"))
        for i, j in () if same else together:
            is_same = _is_same(sides, (i, j))
            mark = " " if is_same else "+" if i is None else "-" if j is None else "≠"
            left, right = (
                Text() if at is None else _shown(side.steps[at], "" if is_same else style)
                for side, at, style in zip(sides, (i, j), ("red", "green"), strict=True)
            )
            made.add_row(f"{mark} {'' if i is None else i or 'task'}", left, right)
    out.print(made)


def _head(side: _Side) -> str:
    """`a: closed, 10 turns, reward 0.5 (tests=1), quality=good`"""
    from turnlog.cli.output import compact, shown

    said, reward = side.said, side.said.get("reward")
    parts = [said["status"], amount(len(side.steps) - 1, "turn")]
    if reward is not None:
        components = f" ({compact(reward['components'], 60)})" if reward["components"] else ""
        parts.append(f"reward {shown(float(reward['reward']))}{components}")
    values = {one["name"]: one["value"] for one in said.get("annotations") or () if "value" in one}
    return f"{side.key}: {', '.join(filter(None, (*parts, compact(values, 60))))}"


def _shown(step: Step, style: str) -> Text:
    from rich.text import Text

    from turnlog.cli.output import plain

    return Text("\n").join(Text(plain(line), line_style) for line, line_style in _lines(step, style))


def _lines(step: Step, style: str) -> Iterator[tuple[str, str]]:
    for action in step.actions:
        yield action.line, style
    for result in step.results:
        yield f"→ {result}", f"{style} dim".strip()
