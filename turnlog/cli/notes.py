"""`turnlog note`: a person's note and tags on a session."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import UsageError, printed_as_json, say


def note(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    text: Annotated[str | None, typer.Argument(help="The note; an empty one removes it.", show_default=False)] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="A tag; repeat it for several. They replace the others.")
    ] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags.")] = False,
) -> None:
    """Write a note or tags on a session, also a closed one."""
    if tag and no_tags:
        raise UsageError("--tag and --no-tags exclude each other")
    given: dict[str, object] = {} if text is None else {"note": text}
    given |= {"tags": tag or []} if tag or no_tags else {}
    if not given:
        raise UsageError("a note, --tag or --no-tags is needed")
    server, path = remote(ctx), f"/sessions/{quote(session, safe='')}/annotations"
    told = [server.read("PUT", f"{path}/{name}", body={"value": value}) for name, value in given.items()][-1]
    if not printed_as_json(ctx, told):
        say(f"session {session} is noted, in event {told['seq']}")
