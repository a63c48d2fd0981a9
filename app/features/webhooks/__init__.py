"""Webhooks: a POST where a session is stuck, a group is complete, or an engine has died.

    the log      `rows.pending` reads what follows a receiver's cursor, in the order of commits
    the fleet    every process notes in the fleet's log that an engine has died as it sees it (`EngineDied`)
    a lease      one process at a time sends; each receiver has a task there, which waits for no other

A cursor moves when what it passes has been delivered, so a notice is delivered at least once, and a receiver that is
away costs its cursor: one row of `store_meta`. Nothing of it touches a turn. Without `TURNLOG_WEBHOOKS` nothing runs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from app.errors import AppError
from app.metrics import Family

if TYPE_CHECKING:
    from app.features.webhooks.sender import Sender
    from app.services import Services

METRICS = (
    Family(
        "turnlog_webhooks_total",
        "counter",
        "Notices posted to webhooks, by what became of it.",
        "outcome",
        ("delivered", "failed"),
    ),
    Family("turnlog_webhooks_waiting", "gauge", "Receivers of webhooks that the next notice waits for."),
)


def add_to(services: Services) -> Sender | None:
    if not services.settings.webhooks:
        return None
    from app.features.webhooks.sender import Sender

    sender = Sender(services)

    async def begin() -> None:
        with contextlib.suppress(AppError):  # a store without room: the cursors begin once there is some
            await sender.begin()

    services.opens.append(begin)
    services.registered_calls.append(sender.start)
    services.ends.append(sender.stop)
    return sender
