"""`turnlog create`, `fork`, `reward`, `annotate` and `close`: what writes to sessions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, get_args

import typer

from turnlog.cli import complete
from turnlog.cli.parameters import given, read_object, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, say
from turnlog.client.address import segment
from turnlog.errors import SessionClosed
from turnlog.parameters import FailureKind, NewSession

OBJECTS = ("metadata", "params", "limits")
"""Fields of a new session that are objects."""

Id = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.", autocompletion=complete.sessions)]


@takes(NewSession, "session_id")
def create(
    ctx: typer.Context,
    session: Annotated[str | None, typer.Argument(help="Its id; default: random.")] = None,
    **fields: Any,
) -> None:
    """Create a session, and print its base URL; the same id and fields again give the same session."""
    fields |= {name: read_object(f"--{name}", fields[name]) for name in OBJECTS}
    chosen = {name: value for name, value in fields.items() if value is not None and value is not False}
    body = {"session_id": session or uuid.uuid4().hex, **chosen}
    created = remote(ctx).read("POST", "/sessions", body=body)
    if not printed_as_json(ctx, created):
        from turnlog.cli.output import line

        line(f"session {created['session_id']}", "bold")
        line(f"OPENAI_BASE_URL={created['url']}/v1")
        line(f"ANTHROPIC_BASE_URL={created['url']}")
        if "token" in created:
            line(f"token {created['token']}")


def fork(
    ctx: typer.Context,
    session: Id,
    turn: Annotated[int, typer.Option(min=1, help="Fork after this committed turn.")],
    count: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 1,
    group: Annotated[
        str | None, typer.Option(help="Their group; default: that of the session.", autocompletion=complete.groups)
    ] = None,
    metadata: Annotated[str | None, typer.Option(help="A JSON object; default: that of the session.")] = None,
    parent_loss: Annotated[bool, typer.Option("--parent-loss", help="Include the copied turns in their loss.")] = False,
    key: Annotated[str | None, typer.Option(help="The same key again gives the same sessions.")] = None,
) -> None:
    """Create sessions that begin after a turn of SESSION."""
    fields = {
        "turn": turn,
        "count": count,
        "group_id": group,
        "metadata": read_object("--metadata", metadata),
        "parent_loss": parent_loss,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    created = remote(ctx).read("POST", f"{_path(session)}/fork", body=body, key=key or uuid.uuid4().hex, slow=True)
    if not printed_as_json(ctx, created):
        from turnlog.cli.output import Column, table

        columns = [Column("session", "session_id", whole=True), Column("base url", "base_url", whole=True)]
        table(columns, created["sessions"])


def reward(
    ctx: typer.Context,
    session: Id,
    reward: Annotated[float, typer.Argument(help="A number; it replaces an earlier reward.")],
    component: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="A component of the reward. May be repeated.")
    ] = None,
    turn: Annotated[int | None, typer.Option(help="Of this turn, not of the session.", min=1)] = None,
) -> None:
    """Set the reward of a session, also a closed one, or of a turn."""
    body: dict[str, Any] = {"reward": reward, **given({"components": _numbers(component or []), "turn": turn})}
    written = remote(ctx).read("PUT", f"{_path(session)}/reward", body=body)
    if not printed_as_json(ctx, written):
        say(f"reward written in event {written['seq']}")


def annotate(
    ctx: typer.Context,
    session: Id,
    name: Annotated[str, typer.Argument(help="The annotation's name; note and tags are also in lists.")],
    value: Annotated[str, typer.Argument(help="JSON; anything else is taken as text.")],
    turn: Annotated[int | None, typer.Option(help="Of this turn, not of the session.", min=1)] = None,
    writer: Annotated[str | None, typer.Option(help="Who wrote it.")] = None,
) -> None:
    """Write a note, tags or another value on a session, also a closed one, or on a turn."""
    of = _path(session) + ("" if turn is None else f"/turns/{turn}")
    body = {"value": _json_or_text(value), **given({"writer": writer})}
    written = remote(ctx).read("PUT", f"{of}/annotations/{segment(name)}", body=body)
    if not printed_as_json(ctx, written):
        say(f"{name} written in event {written['seq']}")


FailureName = StrEnum("FailureName", {kind: kind for kind in get_args(FailureKind)})  # type: ignore[misc]


def close(
    ctx: typer.Context,
    session: Id,
    failed: Annotated[
        FailureName | None, typer.Option(help="Mark the rollout as failed for this reason, instead of a reward.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="With --failed: details of the reason.")] = None,
) -> None:
    """Close a session: a turn in flight is aborted. Its rows, events and rewards stay."""
    if message is not None and failed is None:
        raise UsageError("--message requires --failed")
    closed, before = {"session_id": session, "status": "closed"}, ""
    try:
        if failed is None:
            remote(ctx).call("DELETE", _path(session))
        else:
            why = {"kind": failed.value, **given({"message": message})}
            remote(ctx).call("POST", f"{_path(session)}/close", body={"failed": why})
    except SessionClosed:
        before = " already"
    if not printed_as_json(ctx, closed):
        say(f"session {session} is closed{before}")


def _path(session: str) -> str:
    return f"/sessions/{segment(session)}"


def _numbers(components: Sequence[str]) -> dict[str, float] | None:
    """Raises UsageError."""
    numbers = {}
    for component in components:
        name, _, number = component.rpartition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise UsageError(f"--component {component}: expected NAME=NUMBER") from None
        if not name:
            raise UsageError(f"--component {component}: expected NAME=NUMBER")
    return numbers or None


def _json_or_text(value: str) -> Any:
    try:
        read = json.loads(value)
        json.dumps(read, allow_nan=False)
        return read
    except (ValueError, RecursionError):
        return value
