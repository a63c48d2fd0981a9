"""Checkpoints: named cuts over the sessions, groups and acknowledgements of a run or of all, and taking them back.

    routes              `/checkpoints`, and the page's view of one
    drain, restore      turns are held by an event in the fleet's log (`TurnsHeld`), at the gates (`features.gates`)
    what is kept        the kernel asks before it frees or erases content   (`StorePoints.pins`)
    after a restore     `Services.restored`: what else follows from the sessions

The tables `checkpoints`, `checkpoint_sessions` and `checkpoint_groups` are written here alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from app.errors import StartupError
from app.features.checkpoints import schema as schema

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.checkpoints.checkpoints import Checkpoints
    from app.services import Services

log = logging.getLogger("turnlog.checkpoints")


def entries() -> list[Route]:
    from app.features.checkpoints import page_view, routes

    return [*routes.route.entries, *page_view.route.entries]


def add_to(services: Services) -> Checkpoints:
    from app.features.checkpoints.checkpoints import Checkpoints
    from app.features.checkpoints.restores import Restores
    from app.features.gates import in_turns

    gated = services.features.get("gates")
    checkpoints = Checkpoints(
        database=services.database,
        writer=services.writer,
        fleet=services.fleet,
        gates=in_turns(services) if gated is None else gated.gates,
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
    """Tell of turns that only this feature lets go on. Raises StartupError where a restore is not finished."""
    for held in services.fleet.fleet.held.values():
        if held.reason == "restore":
            raise StartupError(
                f"checkpoint {held.checkpoint} is being restored, which requires the feature checkpoints: add "
                "it to TURNLOG_FEATURES"
            )
        log.warning(
            "turns are held for checkpoint %s until a process with checkpoints in TURNLOG_FEATURES is started",
            held.checkpoint,
        )
