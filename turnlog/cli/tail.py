"""`turnlog tail`: a session's event log, followed over restarts of the server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlog.cli.run import Failure, Json, Token, Url, remote, say, wants_json

if TYPE_CHECKING:
    import httpx

    from turnlog.cli.remote import Remote

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Between tries to reach a server that has gone."""

MOST = 60
"""Characters of an event's field that people are shown."""

LAST = "SessionErased"
"""After it a log does not grow any more."""


def tail(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay, also over restarts of the server, until Ctrl-C.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="Begin behind this event.")] = 0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """A session's event log; with -f each event as soon as it is on disk."""
    from turnlog.cli.remote import session_path

    server = remote(ctx, url, token)
    for_machine = wants_json(ctx, as_json)
    if follow:
        for event in followed(server, session, after):
            _print(event, for_machine)
        return
    with server.stream(session_path(session, "/events"), {"after": after}) as response:
        for event in _events(response):
            _print(event, for_machine)


def followed(server: Remote, session: str, after: int) -> Iterator[dict[str, Any]]:
    """Each event once and in order, however often the server goes away meanwhile.

    Raises Refused for what waiting does not mend; what cannot be reached at the very first is not waited for.
    """
    from turnlog.cli.remote import Refused, Unreachable, session_path

    pause, reached = FIRST_PAUSE_S, False
    while True:
        why = "the server ended the connection"
        try:
            parameters = {"after": after, "follow": "true"}
            with server.stream(session_path(session, "/events"), parameters, silent=True) as response:
                reached, pause = True, FIRST_PAUSE_S
                for event in _events(response):
                    after = event["seq"]
                    yield event
                    if event["type"] == LAST:
                        return
        except Unreachable as error:
            if not reached:
                raise
            why = str(error)
        except Refused as error:
            if not reached or error.status not in (502, 503, 504):
                raise
            why = str(error)
        if pause == FIRST_PAUSE_S:
            say(f"{why}; going on behind event {after} when it is back")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Of whole lines only: what was cut off in the middle comes again."""
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (_event(line) for line in whole)


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("seq"), int):
        raise Failure("the server sent a line that is no event: is it Turnlog?")
    return event


def _print(event: dict[str, Any], for_machine: bool) -> None:
    from turnlog.cli.output import compact, line, machine, when

    if for_machine:
        machine(event)
        return
    fields = {name: value for name, value in event.items() if name not in ("seq", "type", "at")}
    line(f"{event['seq']:>6}  {when(event['at'], milliseconds=True)}  {event['type']:<16}  {compact(fields, MOST)}")
