"""Checks a running server."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from turnlog.amounts import amount
from turnlog.cli.doctor.findings import Finding, ok, problem, warning
from turnlog.cli.remote import connected
from turnlog.errors import Forbidden, NotFound, TurnlogError

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

PORTS = {"http": 80, "https": 443}
RUNS = 100
"""Of so many the failures are looked at."""


Engines = tuple[str, ...] | None
"""The engines' base URLs as reported by a server; None: a server runs and does not report them."""


def examine(url: str, token: str | None, *, expected: bool) -> Generator[Finding, None, Engines]:
    """Does a server answer, is it ready, does it accept the token? `expected`: its address was given.

    Returns its engines, since its settings may differ from those examined here.
    """
    with closing(connected(url, token, patience_s=0)) as server:
        return (yield from _examined(server, url, expected))


def _examined(server: Transport, url: str, expected: bool) -> Generator[Finding, None, Engines]:
    if not _listens(url):
        what = f"nothing listens at {server.base_url}"
        yield (
            warning("server", what, "start it, or correct --url") if expected else ok("server", f"{what}: not started")
        )
        return ()
    try:
        alive = server.read("GET", "/health")
    except TurnlogError as error:
        yield problem("server", f"{error}", "another program has the port, or the server hangs: see its log")
        return ()
    if alive.get("status") != "ok" or "writer" not in alive:
        yield problem(
            "server", f"{server.base_url} is not a Turnlog server", "free the port, or choose another: --port"
        )
        return ()
    yield ok("server", f"{server.base_url} answers, {amount(alive.get('in_flight', 0), 'turn')} in flight")
    yield from _pool(alive)
    try:
        server.call("GET", "/ready", parameters={"writes": "true"})
    except TurnlogError as error:
        missing = [name for name, good in error.body.get("checks", {}).items() if not good]
        yield problem("server", f"it is not ready: {', '.join(missing) or error}", "see the findings on these below")
    try:
        listed = server.read("GET", "/engines")
    except TurnlogError as error:
        yield problem("server", f"it refuses an admin's request: {error}", "set TURNLOG_TOKEN to its admin token")
        return None
    yield from _failures(server)
    return tuple(one["url"] for one in listed["engines"])


def _failures(server: Transport) -> Iterator[Finding]:
    """Runs of which more rollouts have failed than have a reward."""
    try:
        runs = server.read("GET", "/runs", parameters={"limit": RUNS})["runs"]
    except (NotFound, Forbidden):  # TURNLOG_FEATURES leaves runs out; a run's token sees no list of them
        return
    for one in runs:
        failed, rewarded = sum(one["failed"].values()), (one["reward"] or {"count": 0})["count"]
        if one["status"] == "open" and failed > rewarded:
            kinds = ", ".join(f"{count} {kind}" for kind, count in one["failed"].items())
            what = f"{failed} of {failed + rewarded} rollouts of run {one['run']} have failed: {kinds}"
            yield warning(
                "server", what, f"turnlog sessions --run {one['run']} lists them, turnlog show SESSION says why"
            )


def _pool(alive: dict[str, object]) -> Iterator[Finding]:
    pool = alive.get("pool")
    if isinstance(pool, dict) and pool.get("crashes"):
        yield warning("server", f"{pool['crashes']} worker processes have died", "its log says how each ended")


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or PORTS[parts.scheme]), timeout=3):
            return True
    except OSError:
        return False
