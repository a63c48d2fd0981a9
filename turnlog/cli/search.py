"""`turnlog search`: messages over all sessions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import Failure, printed_as_json, say, say_if_none

PAGE = 100
"""The largest page that the server gives."""


def search(
    ctx: typer.Context,
    q: Annotated[
        str | None, typer.Argument(help="Words; '\"a phrase\"', -without, a OR b.", show_default=False)
    ] = None,
    role: Annotated[str | None, typer.Option(help="Only messages of this role.")] = None,
    tool: Annotated[str | None, typer.Option(help="Only calls of this tool, and its results.")] = None,
    finish_reason: Annotated[str | None, typer.Option(help="Only replies with this finish reason.")] = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="Only sessions with this `key=value`; repeatable.")] = None,
    status: Annotated[str | None, typer.Option(help="Only sessions with this status.")] = None,
    group: Annotated[str | None, typer.Option(help="Only sessions of this group.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only sessions with this attempt number.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only sessions of the engine with this URL.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only sessions with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only sessions with at most this reward.")] = None,
    unrewarded: Annotated[bool, typer.Option("--unrewarded", help="Only sessions without a reward.")] = False,
    min_staleness: Annotated[int | None, typer.Option(help="Only sessions this many weight versions behind.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only sessions with this tag.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="The largest number of hits.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on where an earlier search ended.")] = None,
) -> None:
    """Find messages, tool calls and tool results over all sessions, newest first."""
    wish = {
        "q": q,
        "role": role,
        "tool": tool,
        "finish_reason": finish_reason,
        "session_id": session,
        "metadata": metadata,
        "status": status,
        "group_id": group,
        "attempt": attempt,
        "engine": engine,
        "min_reward": min_reward,
        "max_reward": max_reward,
        "unrewarded": "true" if unrewarded else None,
        "min_staleness": min_staleness,
        "tag": tag,
    }
    from turnlog.errors import NotFound

    server = remote(ctx)
    try:
        found = server.read("GET", "/search", parameters={**wish, "limit": limit, "cursor": cursor})
    except NotFound:
        raise Failure("the server's search is off: start it with TURNLOG_FEATURES=all") from None
    if printed_as_json(ctx, found):
        return
    _print_hits(found["hits"])
    say_if_none(found["hits"], "message")
    if not found["is_current"]:
        say("the index does not have the newest turns yet")
    if found["next_cursor"] is not None:
        say(f"more with --cursor {found['next_cursor']}")


def _print_hits(hits: list[dict[str, Any]]) -> None:
    from turnlog.cli.output import Column, table, when

    columns = [
        Column("session", "session_id", whole=True),
        Column("turn", right=True),
        Column("message", right=True),
        Column("role"),
        Column("tools", long=True),
        Column("at", lambda hit: when(hit["at"])),
        Column("text", lambda hit: " ".join(hit["snippet"].split()), long=True),
    ]
    table(columns, hits)
