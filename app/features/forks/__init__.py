"""Forks: new sessions that begin after a turn of another one.

`POST /sessions/{id}/fork`. The rules make the new session's log from its source's, and one operation writes it and
copies the content inside the database. A fork is a session like any other afterwards: its log begins with the copied
turns (`events.ForkRef`), which the kernel folds. Nothing of it touches a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.forks.forks import Forks
    from app.services import Services


def entries() -> list[Route]:
    from app.features.forks.routes import route

    return route.entries


def add_to(services: Services) -> Forks:
    from app.features.forks.forks import Forks

    return Forks(services.database, services.writer, services.sessions, services.clock, services.features)
