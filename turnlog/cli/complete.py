"""What a shell offers for an argument: the server's ids. Where no server answers at once, the shell offers none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

TIMEOUT_S = 1.0

MOST = 100


def sessions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of sessions that begin so, newest first."""
    return _ids(ctx, "/sessions", "session_id", {"prefix": incomplete, "limit": MOST})


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of groups that begin so."""
    return _ids(ctx, "/groups", "group_id", {"group_prefix": incomplete, "limit": MOST})


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs that begin so, of the newest 1,000."""
    return [run for run in _ids(ctx, "/runs", "run", {"limit": 1000}) if run.startswith(incomplete)]


BY_NAME: dict[str, Callable[[typer.Context, str], list[str]]] = {
    "session_id": sessions,
    "group_id": groups,
    "run": runs,
}
"""Completions of a route's parameters."""


def _ids(ctx: typer.Context, path: str, field: str, parameters: dict[str, Any]) -> list[str]:
    import httpx

    from turnlog.cli.running import current
    from turnlog.client.address import address, authorization

    given = {name: value for name, value in parameters.items() if value != ""}
    try:
        url, headers = address(ctx.params["url"]), authorization(current(ctx.params["token"]))
        found = httpx.get(url + path, params=given, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        return [row[field] for row in found.raise_for_status().json()[path[1:]]]
    except (httpx.HTTPError, ValueError, LookupError):  # what is wrong, the command itself says
        return []
