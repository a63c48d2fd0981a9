"""Archives: old rollouts leave the database as Parquet files, and come back from them.

`POST /archives` writes files, `POST /archives/import` reads them; the table `archived` is the index of what left. Where
this touches the rest:

    SessionNotFound     asks whether the session is in a file: 404 `session_archived`   (`Services.explain`)
    creating a session  refuses an id that left, and a parent that did                 (`StorePoints.departed`)
    an erasure          takes the session out of its files, and is 202 until it is     (`Erasure.elsewhere`)
    a run's erasure     that of its sessions in files                                  (`Erasure.roots_elsewhere`)
    the log's end       stays where it was when its last events have left              (`feed.last_forgotten`)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from app.features.archive import schema as schema

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.archive.archive import Archive
    from app.services import Services


def entries() -> list[Route]:
    from app.features.archive.routes import route

    return route.entries


def add_to(app: Services) -> Archive:
    from app.features.archive.archive import Archive

    archive = Archive(
        app.database,
        app.writer,
        app.cache,
        app.exporter,
        app.clock,
        app.registration.incarnation,
        lease_s=math.inf if app.database.is_sqlite else app.settings.lease_s,
        timeout_s=app.settings.payloads_timeout_s,
        file_root=app.settings.file_root,
        forget=app.erasure.forget,
    )
    app.explain.append(archive.where_is)
    app.erasure.elsewhere.append(archive.erase)
    app.erasure.roots_elsewhere.append(archive.roots_of_run)
    app.starts.append(archive.start)
    app.ends.append(archive.stop)
    return archive
