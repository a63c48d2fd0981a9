"""Groups of rollouts and the training feed: complete groups are leased to consumers and acknowledged.

    routes              `/groups`, `/groups/{id}`, `/export/groups`, `/export/groups/ack`
    notes               the kernel's writes note the group of a session that has changed (`rollouts.note`)
    the janitor         settles the notes in each of its rounds (`Janitor.rounds`)
    after a restore     settles what it has noted (`Services.restored`)

The table `groups` is written here, and by a restore (`features.checkpoints`). Nothing of it touches a turn. Without
this feature the notes wait in `group_changes`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.groups.feed import Groups
    from app.services import Services


def entries() -> list[Route]:
    from app.features.groups.routes import route

    return route.entries


def add_to(services: Services) -> Groups:
    from app.features.groups.feed import Feed, Groups
    from app.features.groups.groups import GroupList, settle_groups

    database, writer = services.database, services.writer
    settle = partial(settle_groups, database, writer)
    services.janitor.rounds.append(settle)
    services.restored.append(settle)
    return Groups(GroupList(database), Feed(database, writer, services.exporter))
