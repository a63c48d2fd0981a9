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
    from fastapi import APIRouter, FastAPI

    from app.features.rllm.traces import Traces
    from app.services import Services


def routers() -> list[APIRouter]:
    from app.features.rllm import admin, routes

    return [routes.router, admin.router]


def door(app: FastAPI) -> Callable[[Scope], Scope]:
    """`app` has all of its routes."""
    from app.api.openapi import routes_of
    from app.features.rllm.paths import Door

    paths = [*(route.path for route in routes_of(app.routes)), *(route.path for route in app.state.direct_routes)]
    below = "/sessions/{session_id}/"
    return Door({path.removeprefix(below).partition("/")[0] for path in paths if path.startswith(below)})


def add_to(services: Services) -> Traces:
    from app.features.rllm.traces import Traces

    return Traces(services.database)
