"""`turnlog tail`: a session's events, followed across restarts of the server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import say, wants_json
from turnlog.errors import TurnlogError

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

MOST = 60
"""Characters of an event's field that are shown."""


def tail(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay, also over restarts of the server, until Ctrl-C.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="Begin behind this event.")] = 0,
) -> None:
    """A session's events; with -f each new event as soon as it is on disk."""
    from turnlog.client.lines import EventsPlace

    for_machine = wants_json(ctx)
    path = f"/sessions/{quote(session, safe='')}/events"
    if follow:
        events = _followed(remote(ctx, patience_s=0), path, after)
    else:
        events = remote(ctx).lines(path, EventsPlace(after, follow=False))
    for event in events:
        _print(event, for_machine)


def _followed(server: Transport, path: str, after: int) -> Iterator[dict[str, Any]]:
    """Each event once and in order, across restarts of the server.

    Raises TurnlogError if waiting cannot help, or if the server cannot be reached at first.
    """
    from turnlog.client.lines import EventsPlace
    from turnlog.client.waits import Waits

    place = EventsPlace(after, follow=True)
    waits, is_told = Waits(math.inf), False
    while True:
        try:
            for event in server.lines(path, place):
                waits.reset()
                is_told = False
                yield event
            return
        except TurnlogError as error:
            wait_s = waits.after(error) if place.has_begun else None
            if wait_s is None:
                raise
            if not is_told:
                say(f"{error}; going on behind event {place.after} when it is back")
            is_told = True
        time.sleep(wait_s)


def _print(event: dict[str, Any], for_machine: bool) -> None:
    from turnlog.cli.output import compact, line, machine, when

    if for_machine:
        machine(event)
        return
    fields = {name: value for name, value in event.items() if name not in ("seq", "type", "at")}
    line(f"{event['seq']:>6}  {when(event['at'], milliseconds=True)}  {event['type']:<16}  {compact(fields, MOST)}")
