"""Forks: new sessions that begin after a turn of another one.

`POST /sessions/{id}/fork`. The rules make the new session's log from its source's, and one operation writes it and
copies the content inside the database. A fork is a session like any other afterwards: its log begins with the copied
turns (`events.ForkRef`), which the kernel folds. Nothing of it touches a turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from app.features.forks.forks import Forks
    from app.services import Services


def routers() -> list[APIRouter]:
    from app.features.forks.routes import router

    return [router]


@contextlib.asynccontextmanager
async def running(services: Services) -> AsyncIterator[Forks]:
    from app.features.forks.forks import Forks

    yield Forks(services.database, services.writer, services.sessions, services.clock, services.objects)
