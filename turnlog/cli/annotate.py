"""`turnlog annotate`: what a person says of a session, or of one of its turns."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import printed_as_json, say


def annotate(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    name: Annotated[str, typer.Argument(help="The annotation's name; note and tags are also in lists.")],
    value: Annotated[str, typer.Argument(help="JSON; anything else is a text.")],
    turn: Annotated[int | None, typer.Option(help="Annotate this turn instead of the session.", min=1)] = None,
    writer: Annotated[str | None, typer.Option(help="The writer's name, stored with it.")] = None,
) -> None:
    """Write a note, tags or another value on a session, also a closed one, or on a turn."""
    of = f"/sessions/{quote(session, safe='')}" + ("" if turn is None else f"/turns/{turn}")
    body = {"value": _read(value), **({} if writer is None else {"writer": writer})}
    told = remote(ctx).read("PUT", f"{of}/annotations/{quote(name, safe='')}", body=body)
    if not printed_as_json(ctx, told):
        say(f"{name} is written, in event {told['seq']}")


def _read(value: str) -> Any:
    try:
        found = json.loads(value)
        json.dumps(found, allow_nan=False)
        return found
    except (ValueError, RecursionError):
        return value
