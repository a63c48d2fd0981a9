"""`turnlog sessions`, `show`, `open` and `groups`: what the server has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlog.cli import complete
from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, say, say_if_none
from turnlog.client.address import address, segment
from turnlog.parameters import PAGE, Selection, SessionFilters

if TYPE_CHECKING:
    from turnlog.cli.output import Column
    from turnlog.client._sync.transport import Transport


TASK = 80
"""Characters of a task in the list."""


@takes(SessionFilters, "status")  # a state is also a status
def sessions(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of sessions.")] = 50,
    every: Annotated[bool, typer.Option("--all", help="All of them, page after page.")] = False,
    cursor: Annotated[str | None, typer.Option(help="Go on where an earlier list ended.")] = None,
    **filters: Any,
) -> None:
    """List sessions, newest first."""
    wish = {**given(filters), "tasks": "true"}
    found = _pages(remote(ctx), wish, None if every else limit, cursor)
    if printed_as_json(ctx, found):
        return
    _print_sessions(found["sessions"], found["tasks"])
    say_if_none(found["sessions"], "session")
    if found["next_cursor"] is not None:
        of = "" if filters["metadata"] else f" of {found['total']}"
        say(f"{len(found['sessions'])}{of}; more with --all, or --cursor {found['next_cursor']}")


def _pages(server: Transport, wish: dict[str, Any], limit: int | None, cursor: str | None) -> dict[str, Any]:
    """All pages of the server's list."""
    rows: list[dict[str, Any]] = []
    counted: dict[str, Any] = {}
    tasks: dict[str, str] = {}
    while True:
        wanted = PAGE if limit is None else min(PAGE, limit - len(rows))
        parameters = {**wish, "count": "true" if not rows else None, "limit": wanted, "cursor": cursor}
        page = {**counted, **server.read("GET", "/sessions", parameters=parameters)}
        counted = {name: value for name, value in page.items() if name.startswith("total")}
        rows += page["sessions"]
        tasks |= page["tasks"]
        cursor = page["next_cursor"]
        if cursor is None or (limit is not None and len(rows) >= limit):
            return {**page, "sessions": rows, "tasks": tasks}


def _print_sessions(rows: list[dict[str, Any]], tasks: dict[str, str]) -> None:
    from turnlog.actions import common_heads, without_head
    from turnlog.cli.output import Column, table

    heads = common_heads(tasks.values())
    task = Column("task", lambda row: without_head(tasks.get(row["session_id"], ""), heads)[:TASK], long=True)
    session, state, *others = session_columns()
    table([session, state, task, *others], rows)


def session_columns() -> list[Column]:
    from turnlog.cli.output import Column, since, when

    return [
        Column("session", "session_id", whole=True),
        Column("state"),
        Column("turns", right=True),
        Column("reward", right=True),
        Column("failed", lambda row: row["failed"] and row["failed"]["kind"]),
        Column("engine errors", "engine_errors", right=True),
        Column("tool errors", "tool_errors", right=True),
        Column("changed", lambda row: since(row["updated_at"]), right=True),
        Column("in flight", lambda row: since(row["running_since"]), right=True),
        Column("group", "group_id", long=True),
        Column("attempt", right=True),
        Column("stale", "staleness", right=True),
        Column("engine", long=True),
        Column("created", lambda row: when(row["created_at"])),
    ]


def show(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.", autocompletion=complete.sessions)],
    at: Annotated[int | None, typer.Option(min=1, help="The session as it was after this event.")] = None,
) -> None:
    """Show a session: its turns with their stages, failures and rollbacks."""
    path = f"/sessions/{segment(session)}/state"
    state = remote(ctx).read("GET", path, parameters={"seq": at})
    if printed_as_json(ctx, state):
        return
    from turnlog.cli.session_view import print_session

    print_session(state)


def open_page(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.", autocompletion=complete.sessions)],
) -> None:
    """Open the page of a session in a browser, and print its address."""
    url = f"{address(ctx.obj.url)}/ui#/session/{segment(session)}"
    if not printed_as_json(ctx, {"url": url}):
        import webbrowser

        print(url, flush=True)
        webbrowser.open(url)


@takes(Selection)
def groups(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="GROUP", help="A group's id; without it, the groups are listed.", autocompletion=complete.groups
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="Maximum number of groups.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on where an earlier list ended.")] = None,
    **filters: Any,
) -> None:
    """List groups, or show one group's attempts and rewards."""
    server = remote(ctx)
    wish = given(filters)
    if name is not None and (cursor is not None or wish.keys() - {"run"}):
        raise UsageError("--cursor and filters other than --run are for the list of groups")
    if name is None:
        found = server.read("GET", "/groups", parameters={**wish, "limit": limit, "cursor": cursor})
    else:
        found = server.read("GET", f"/groups/{segment(name)}", parameters=wish)
    if printed_as_json(ctx, found):
        return
    if name is not None:
        _print_group(found)
    else:
        _print_groups(found)


def _print_groups(found: dict[str, Any]) -> None:
    from turnlog.cli.output import Column, table

    columns = [
        Column("group", "group_id", whole=True),
        *([] if {one["run"] for one in found["groups"]} <= {"default"} else [Column("run", whole=True)]),
        Column("attempts", _arrived, right=True),
        *(Column(name, right=True) for name in ("sessions", "closed", "failed", "rewarded", "mean")),
        Column("sample std", "std", right=True),
        *(Column(name, right=True) for name in ("min", "max")),
        Column("state"),
        Column("missing attempts", "missing_attempts", long=True),
        Column("note", lambda one: "all rewards are equal" if one["zero_variance"] else None),
    ]
    table(columns, found["groups"])
    say_if_none(found["groups"], "group")
    if found["next_cursor"] is not None:
        say(f"more with --cursor {found['next_cursor']}")


def _arrived(group: dict[str, Any]) -> str:
    """How many of its attempts have arrived."""
    return str(group["arrived"]) if group["group_size"] is None else f"{group['arrived']} of {group['group_size']}"


def _print_group(found: dict[str, Any]) -> None:
    from turnlog.cli.output import Column, line, shown, table

    of_run = "" if found["run"] == "default" else f" of run {found['run']}"
    state = "complete" if found["complete"] else "not complete"
    arrived = "" if found["group_size"] is None else f", {_arrived(found)} attempts have arrived"
    line(f"group {found['group_id']}{of_run}: {state}{arrived}", "bold")
    spread = found["statistics"]
    if spread is not None:
        names = {"count": "count", "mean": "mean", "std": "sample std", "min": "min", "max": "max"}
        line("rewards: " + ", ".join(f"{told} {shown(spread[name])}" for name, told in names.items()))
        if spread["zero_variance"] and spread["count"] > 1:
            line("all rewards are equal: the group's advantages are 0")
    columns = [
        Column("session", "session_id", whole=True),
        Column("attempt", right=True),
        Column("status"),
        Column("failed", lambda one: one["failed"] and one["failed"]["kind"]),
        Column("engine errors", "engine_errors", right=True),
        Column("tool errors", "tool_errors", right=True),
        Column("reward", right=True),
        Column("note", lambda one: "replaced" if one["replaced"] else None),
    ]
    table(columns, found["attempts"])
