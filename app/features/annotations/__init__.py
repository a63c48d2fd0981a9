"""Annotations: what is said of a session, a turn or its tokens afterwards, also of a closed session.

`PUT`, `GET` and `DELETE` of `/sessions/{id}/annotations/{name}` and `…/turns/{n}/annotations/{name}`. A JSON value is
in its event, a column of numbers in the table `annotation_columns`. The kernel folds the events
(`domain.session.Annotation`), reads columns for exports, and erases both; forks and archives copy them. Nothing of it
touches a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.annotations.annotations import Annotations
    from app.services import Services


def entries() -> list[Route]:
    from app.features.annotations.routes import route

    return route.entries


def add_to(services: Services) -> Annotations:
    from app.features.annotations.annotations import Annotations

    return Annotations(services.database, services.cache, services.sessions, services.clock)
