"""`turnlog tree`: a session's turns as a tree, one line a turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import printed_as_json
from turnlog.client.address import segment
from turnlog.parameters import TreeParameters

Turn = Mapping[str, Any]


@takes(TreeParameters)
def tree(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.", autocompletion=complete.sessions)],
    **parameters: Any,
) -> None:
    """Print a session's turns as a tree: branches, their causes, and in whose loss each turn is."""
    path = f"/sessions/{segment(session)}/tree"
    found = remote(ctx).read("GET", path, parameters=given(parameters))
    if not printed_as_json(ctx, found):
        _print(found)


def _print(found: Mapping[str, Any]) -> None:
    from turnlog.cli.output import Column, line, table

    turns, branches = found["turns"], found["branches"]
    main = "" if found["main_branch"] is None else f", main branch {found['main_branch']}"
    counts = f"{amount(len(turns), 'turn')}, {amount(len(branches), 'branch', 'branches')}"
    line(f"session {found['session_id']}: {counts}{main}", "bold")
    if not turns:
        return
    columns = [
        Column("turn", "drawn", whole=True),
        Column("branch", whole=True, right=True),
        Column("cause"),
        Column("loss", lambda turn: turn["loss_branches"], whole=True),
        Column("tokens", right=True),
        Column("output", "output_tokens", right=True),
        Column("finish", "finish_reason"),
        Column("weights", "weight_versions", long=True),
        Column("agent", "agent_id", long=True),
        Column("title", long=True),
        Column("note", _note, long=True),
    ]
    titles = {branch["branch"]: branch["title"] for branch in branches}
    rows = [{**turn, "drawn": lines + str(turn["turn"])} for lines, turn in drawn(turns)]
    # A branch's first turn has its title.
    table(columns, [{**row, "title": titles.get(row["branch"]) if row["cause"] else None} for row in rows])


def _note(turn: Turn) -> str:
    carries = "" if turn["carries"] is None else f"carries turn {turn['carries']}"
    return "; ".join(filter(None, (carries, turn["reason"])))


def drawn(turns: Sequence[Turn]) -> Iterator[tuple[str, Turn]]:
    """The turns, each after its parent, and the lines before its number.

    A turn that continues a branch stands below its parent, behind the other branches that leave there.
    """
    children: dict[int, list[Turn]] = {}
    for turn in turns:
        children.setdefault(turn["parent"], []).append(turn)
    waiting = _placed(children.get(0, []), None, "")
    while waiting:
        lines, below, turn = waiting.pop()
        yield lines, turn
        waiting += _placed(children.get(turn["turn"], []), turn["branch"], below)


def _placed(turns: Sequence[Turn], branch: int | None, lines: str) -> list[tuple[str, str, Turn]]:
    """Children in reverse, with the lines before them and before what is below them."""
    goes_on = [turn for turn in turns if branch is not None and turn["branch"] == branch]
    leaves = [turn for turn in turns if turn not in goes_on]
    placed = [(lines + "├─", lines + "│ ", turn) for turn in leaves]
    if placed and not goes_on:
        placed[-1] = (lines + "└─", lines + "  ", leaves[-1])
    placed += [(lines, lines, turn) for turn in goes_on]
    placed.reverse()
    return placed
