"""`turnlog watch`: sessions with a turn in flight, as a table that stays current; in a pipe line by line."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from turnlog.amounts import amount
from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import wants_json
from turnlog.cli.sessions import session_columns
from turnlog.cli.tail import followed, told
from turnlog.errors import Unreachable
from turnlog.parameters import PAGE, Selection

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

EVERY_S = 1.0


@takes(Selection)
def watch(ctx: typer.Context, **filters: Any) -> None:
    """Watch the sessions in flight until Ctrl-C; in a pipe, or with --json, print every event of what they do."""
    server = remote(ctx, patience_s=0)
    if sys.stdout.isatty() and not wants_json(ctx):
        _show(server, given(filters))
    else:
        _print_lines(server, given(filters), for_machine=wants_json(ctx))


def _show(server: Transport, wish: dict[str, Any]) -> None:
    """A table of those that are running or paused, the longest first."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from turnlog.cli.output import console, fitted

    out, columns = console(), session_columns()
    rows, total, trouble = *_in_flight(server, wish), ""
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            head = f"{amount(total, 'session')} in flight{trouble}; Ctrl-C ends this"
            made, _ = fitted(columns, rows[: max(out.height - 3, 1)], out)
            live.update(Group(Text(head, "bold"), made), refresh=True)
            time.sleep(EVERY_S)
            try:
                rows, total, trouble = *_in_flight(server, wish), ""
            except Unreachable:
                trouble = ", as last known: the server does not answer"


def _in_flight(server: Transport, wish: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The rows of one page, and how many there are."""
    wish = {**wish, "limit": PAGE, "count": "true"}
    order = {"stuck_s": 0, "sort": "running_since", "order": "asc"}
    pages = [server.read("GET", "/sessions", parameters=wish | more) for more in (order, {"state": "paused"})]
    rows = {row["session_id"]: row for page in pages for row in page["sessions"]}
    return list(rows.values()), max(len(rows), *(page["total"] for page in pages))


def _print_lines(server: Transport, wish: dict[str, Any], *, for_machine: bool) -> None:
    from turnlog.cli.output import line, machine, when
    from turnlog.client.lines import AllEventsPlace, is_event

    place = AllEventsPlace({"after": "end", "follow": True, **wish})
    for event in followed(server, "/events", place):
        if not is_event(event) or (said := told(event)) is None:
            continue
        if for_machine:
            machine(event)
        else:
            line(f"{when(event['at'])}  {event['session_id']}  {said}")
