"""Checkpoints: named cuts over all sessions, groups and acknowledgements, and taking the store back to one.

    routes              `/checkpoints`, and the page's view of one
    drain, restore      turns are held by an event in the fleet's log (`TurnsHeld`), which every process's gates obey
    what is kept        `store.pins`, which the kernel asks before it frees or erases content, whoever made the pins
    after a restore     `Services.restored`: what else follows from the sessions

The tables `checkpoints`, `checkpoint_sessions` and `checkpoint_groups` are written here alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from app.features.checkpoints.checkpoints import Checkpoints
    from app.services import Services

log = logging.getLogger("turnlog.checkpoints")


def routers() -> list[APIRouter]:
    from app.features.checkpoints import page_view, routes

    return [routes.router, page_view.router]


def add_to(services: Services) -> Checkpoints:
    from app.features.checkpoints.checkpoints import Checkpoints
    from app.features.checkpoints.restores import Restores

    checkpoints = Checkpoints(
        database=services.database,
        writer=services.writer,
        fleet=services.fleet,
        gates=services.gates,
        restores=Restores(
            database=services.database,
            writer=services.writer,
            cache=services.cache,
            followers=services.followers,
            sessions=services.sessions,
            clock=services.clock,
            then=services.restored,
        ),
        incarnation=services.registration.incarnation,
        lease_left=services.lease_left,
        on_delete=services.janitor.look_again,
    )
    services.registered_calls.append(checkpoints.start)
    services.ends.append(checkpoints.stop)
    return checkpoints


async def absent(services: Services) -> None:
    """Tell of turns that only this feature lets go on."""
    if (held := services.fleet.fleet.held) is not None:
        log.warning("turns are held for checkpoint %s until a process has the feature checkpoints", held.checkpoint)
