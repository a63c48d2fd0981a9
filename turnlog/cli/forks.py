"""`turnlog fork`: new sessions that begin after a turn of another one."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any
from urllib.parse import quote

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import UsageError, printed_as_json


def fork(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    turn: Annotated[int, typer.Option(min=1, help="Begin after this committed turn.")],
    count: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 1,
    group: Annotated[str | None, typer.Option(help="Their group; default: that of the session.")] = None,
    metadata: Annotated[str | None, typer.Option(help="A JSON object; default: that of the session.")] = None,
    parent_loss: Annotated[bool, typer.Option("--parent-loss", help="Include the copied turns in their loss.")] = False,
    key: Annotated[str | None, typer.Option(help="A repeated key returns the first request's sessions.")] = None,
) -> None:
    """Create sessions that begin after a turn of SESSION."""
    given = {
        "turn": turn,
        "count": count,
        "group_id": group,
        "metadata": _object(metadata),
        "parent_loss": parent_loss,
    }
    body = {name: value for name, value in given.items() if value is not None}
    path = f"/sessions/{quote(session, safe='')}/fork"
    made = remote(ctx).read("POST", path, body=body, key=key or uuid.uuid4().hex, slow=True)
    if not printed_as_json(ctx, made):
        from turnlog.cli.output import Column, table

        table(
            [Column("session", "session_id", whole=True), Column("base url", "base_url", whole=True)], made["sessions"]
        )


def _object(text: str | None) -> dict[str, Any] | None:
    """Raises UsageError."""
    try:
        found = None if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"--metadata: {error}") from None
    if found is not None and not isinstance(found, dict):
        raise UsageError("--metadata is not a JSON object")
    return found
