"""The client that commands use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from turnlog.cli.running import UsageError

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

PATIENCE_S = 15.0
"""How long a command retries, in seconds; a server that never answers is not retried."""

TIMEOUT_S = 60.0


def remote(ctx: typer.Context, *, patience_s: float = PATIENCE_S, has_answered: bool = False) -> Transport:
    """The client, closed with the command. `has_answered`: it retries also what gets no answer at first.

    Raises UsageError.
    """
    made = connected(ctx.obj.url, ctx.obj.token, patience_s, has_answered=has_answered)
    ctx.call_on_close(made.close)
    return made


def connected(url: str, token: str | None, patience_s: float, *, has_answered: bool = False) -> Transport:
    """Sends no request. Raises UsageError for an invalid URL, and for a token that no header can hold."""
    from turnlog.client._sync.transport import Transport

    try:
        return Transport(url, token, patience_s, TIMEOUT_S, waits_for_start=has_answered)
    except ValueError as error:
        raise UsageError(f"--url or --token (TURNLOG_URL, TURNLOG_TOKEN): {error}") from None
