"""The web page: its static files, the read-only routes under `/ui/api`, and the readers of its views.

It reads the log, the heads and what the process has in memory. Nothing of it touches a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.page.routes import Page
    from app.services import Services


def entries() -> list[Route]:
    from app.features.page import files, live, routes

    return [*routes.route.entries, *live.route.entries, *files.entries()]


def add_to(services: Services) -> Page:
    from app.features.page.routes import page_with

    return page_with(services)
