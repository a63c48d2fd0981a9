"""`turnlog search`: messages over all sessions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import Failure, printed_as_json, say, say_if_none
from turnlog.parameters import SEARCH_PAGE, SearchFilters


@takes(SearchFilters)
def search(
    ctx: typer.Context,
    q: Annotated[
        str | None, typer.Argument(help="Words; '\"a phrase\"', -without, a OR b.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=SEARCH_PAGE, help="Maximum number of messages.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Continue where an earlier search ended.")] = None,
    **filters: Any,
) -> None:
    """Search the messages, tool calls and tool results of all sessions, newest first."""
    from turnlog.errors import NotFound

    server = remote(ctx)
    try:
        found = server.read("GET", "/search", parameters={"q": q, **given(filters), "limit": limit, "cursor": cursor})
    except NotFound:
        raise Failure("search is off: start the server with TURNLOG_FEATURES=all") from None
    if printed_as_json(ctx, found):
        return
    _print_hits(found["hits"])
    say_if_none(found["hits"], "message")
    if not found["is_current"]:
        say("the index does not contain the newest turns yet")
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
