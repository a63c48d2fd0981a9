"""`turnlog tail`: a session's events, or those of all sessions, followed across restarts of the server."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, failure, say, wants_json
from turnlog.client.address import segment
from turnlog.errors import TurnlogError
from turnlog.parameters import Selection

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport
    from turnlog.client.lines import AllEventsPlace, EventsPlace

MOST = 60
"""Characters of an event's field that are shown."""

_SHOWN = frozenset({"seq", "type", "at", "session_id", "position"})


@takes(Selection)
def tail(
    ctx: typer.Context,
    session: Annotated[
        str | None,
        typer.Argument(help="The session's id; without one: all sessions.", autocompletion=complete.sessions),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until Ctrl-C, also across restarts of the server.")
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(
            help="Start after this event: its number, or for all sessions its position; end: only new events."
        ),
    ] = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="For all sessions: only events of this type. May be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="For all sessions: at most this many events.")] = None,
    **filters: Any,
) -> None:
    """Print a session's events, or all sessions'; with -f also each new event as soon as it is on disk."""
    from turnlog.client.lines import AllEventsPlace, EventsPlace, is_event

    for_machine = wants_json(ctx)
    server = remote(ctx, patience_s=0) if follow else remote(ctx)
    place: AllEventsPlace | EventsPlace
    wish = given(filters)
    if session is None:
        asked = {"after": after, "follow": follow, "type": types or None, "limit": limit}
        path, place = "/events", AllEventsPlace(asked | wish)
    elif types or wish or limit:
        raise UsageError("--type, --limit and filters are only for the events of all sessions")
    else:
        path, place = f"/sessions/{segment(session)}/events", EventsPlace(_number(after), follow)
    is_empty = True
    for event in followed(server, path, place) if follow else server.lines(path, place):
        if for_machine or session is not None or is_event(event):
            is_empty = False
            _print(event, for_machine)
    if is_empty:
        say("no event matches")
    if isinstance(place, AllEventsPlace) and not for_machine and place.position is not None:
        say(f"continue with --after {place.position}")


def _number(after: str | None) -> int:
    """Raises UsageError."""
    if after is None or (after.isascii() and after.isdecimal()):
        return int(after or 0)
    raise UsageError(f"--after: expected the number of a session's event, not {after:.64}")


def followed(server: Transport, path: str, place: AllEventsPlace | EventsPlace) -> Iterator[dict[str, Any]]:
    """Each event once and in order, across restarts of the server.

    Raises TurnlogError if waiting cannot help, or if the server cannot be reached at first.
    """
    from turnlog.client.waits import Waits

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
                say(f"{error}; continuing {place} when it is back")
            is_told = True
        time.sleep(wait_s)


def told(event: Mapping[str, Any]) -> str | None:
    """What an event says to a person who watches a session; None of one that only the server minds."""
    match event:
        case {"type": "SessionCreated"}:
            return "created"
        case {"type": "TurnOpened", "turn": turn}:
            return f"turn {turn} begins"
        case {"type": "TurnCommitted", "turn": turn, "output_tokens": tokens}:
            finish = event.get("finish_reason")
            return f"turn {turn} committed, {amount(tokens, 'token')}" + (f", {finish}" if finish else "")
        case {"type": "TurnRejected", "turn": turn, "reason": reason}:
            more = ", ".join(str(event[name]) for name in ("status", "detail") if event.get(name) is not None)
            return f"turn {turn} failed: {reason}" + (f" ({more})" if more else "")
        case {"type": "TurnAbandoned", "turn": turn, "reason": reason}:
            return f"turn {turn} abandoned: {reason}"
        case {"type": "LimitReached", "limit": limit}:
            return f"the limit of {limit} is reached"
        case {"type": "RolledBack", "to_turn": turn, "discarded": discarded}:
            return f"rolled back to turn {turn}: discarded {', '.join(map(str, discarded))}"
        case {"type": "RewardAssigned", "reward": reward}:
            return f"reward {reward:.4g}" + (f" of turn {event['turn']}" if event.get("turn") else "")
        case {"type": "AnnotationWritten", "name": name}:
            of = f"turn {event['turn']}: " if event.get("turn") else ""
            by = f", says {event['writer']}" if event.get("writer") else ""
            return f"{of}{name} = {_value(event)}{by}"
        case {"type": "SessionClosed"}:
            closed = f"closed: {event['reason']}" if event.get("reason", "deleted") != "deleted" else "closed"
            return f"{closed}, failed: {failure(event['failed'])}" if "failed" in event else closed
        case {"type": "SessionRestored", "checkpoint": name, "to_seq": seq}:
            return f"restored to checkpoint {name}, event {seq}"
        case {"type": "SessionErased"}:
            return "its content is erased"
    return None


def _value(written: Mapping[str, Any]) -> str:
    """The annotation's value: a text as it is, a column by its length."""
    column, value = written.get("column"), written.get("value")
    if column:
        return amount(column["length"], "number")
    if value is None:
        return "erased" if written.get("erased") else "removed"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print(event: dict[str, Any], for_machine: bool) -> None:
    from turnlog.cli.output import compact, line, machine, when

    if for_machine:
        machine(event)
        return
    fields = {name: value for name, value in event.items() if name not in _SHOWN}
    at = "" if event["at"] is None else when(event["at"], milliseconds=True)
    of = f"{event['session_id'] or '?'}  " if "session_id" in event else ""
    line(f"{event['seq'] or '?':>6}  {at}  {of}{event['type'] or '?':<16}  {compact(fields, MOST)}")
