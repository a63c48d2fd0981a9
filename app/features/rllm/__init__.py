"""rLLM's model gateway, as its own client asks it, over Turnlog's sessions. On only where it is named.

    paths      lead to this feature's routes before anything else reads them   (`paths.py`)
    sessions   have the gateway's names, which come again after a deletion, and may hold slashes (`rules.py`)
    traces     are read from the log   (`traces.py`)
    workers    are the engines, and the weight version is the fleet's   (`admin.py`)

It stores nothing, and touches no turn but by the path of its request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Scope

if TYPE_CHECKING:
    from app.api.routes import Route, Table
    from app.services import Services


def entries() -> list[Route]:
    from app.features.rllm import admin, routes

    return [*routes.route.entries, *admin.route.entries]


def door(table: Table) -> Callable[[Scope], Scope]:
    from app.features.rllm.paths import Door

    below = "/sessions/{session_id}/"
    paths = [route.path.removeprefix(below) for route in table.routes if route.path.startswith(below)]
    return Door({path.partition("/")[0] for path in paths})


def add_to(services: Services) -> None:
    """Its routes and its door are all there is of it."""
