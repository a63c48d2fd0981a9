"""Replay payloads in object storage: a claim check.

Each chunk is an object of its own, which is created before the commit that refers to it and never changed. So nothing
that is acknowledged refers to an object that is not there. A chunk under `SMALL_BYTES` stays in its row.

    upload ──▶ commit ──▶ … ──▶ tombstone, and a line in `dead_objects`, in one commit ──▶ deletion, after `keep_s`

An object that no row ever referred to, after a crash between its upload and the commit, is found by a sweep.

    a turn              uploads its large chunks before its commit   (`TurnPoints.chunks`)
    an erasure          is 202 until the objects are gone            (`Erasure.finishing`)
    a fork              has copies of its own                        (`features.forks`)
    every reader        fetches what is in objects                   (`Database.bucket`, `store.content`)

The kernel's transactions tell what may be deleted (`StorePoints.voided`, `freed`, `erased`), and it is queued in
`dead_objects`. Without `TURNLOG_PAYLOADS` nothing else of it runs.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from app.errors import StartupError
from app.features.objects import schema as schema
from app.metrics import Family

if TYPE_CHECKING:
    from app.features.objects.bucket import Bucket
    from app.features.objects.objects import Objects
    from app.services import Services
    from app.settings import Settings
    from app.store.database import Database
    from app.store.dialect import Tx

log = logging.getLogger("turnlog")

ACTIONS = ("put", "read", "deleted", "failed")

METRICS = (
    Family("turnlog_objects_total", "counter", "Requests to object storage.", "action", ACTIONS),
    Family("turnlog_object_bytes_total", "counter", "Bytes to and from object storage.", "action", ACTIONS[:2]),
)


async def prepare(settings: Settings, database: Database) -> Callable[[Tx], object]:
    """Open the object storage; what is returned notes it in the store. Raises StartupError where the storage is not
    there, or is not the one that the store refers to."""
    from app.features.objects.rows import has_objects, note_objects, url_of_objects

    database.bucket = bucket = await _bucket(settings)
    url = await database.read(url_of_objects)
    is_there = bucket is not None and bucket.url == url
    if url is not None and not is_there and await database.read(has_objects):  # which reads all chunks
        if bucket is None:
            raise StartupError(f"replay payloads of this store are in object storage: set TURNLOG_PAYLOADS={url}")
        log.warning("replay payloads of this store were written to %s, and are read from %s now", url, bucket.url)
    url = None if bucket is None else bucket.url
    return partial(note_objects, url=url, owner=secrets.token_hex(8))


def add_to(services: Services) -> Objects | None:
    from app.features.objects.objects import Objects

    if services.database.bucket is None:
        return None
    bucket = cast("Bucket", services.database.bucket)  # that of `prepare`
    objects = Objects(
        services.database,
        services.writer,
        bucket,
        services.registration.incarnation,
        services.recovery.lease_to_judge_by,
        keep_s=services.settings.payloads_keep_s,
    )

    def refresh() -> None:
        metrics, counters = services.metrics, bucket.counters
        metrics.set_all("turnlog_objects_total", {name: getattr(counters, name) for name in ACTIONS})
        sizes = {"put": counters.put_bytes, "read": counters.read_bytes}
        metrics.set_all("turnlog_object_bytes_total", sizes)

    services.points.chunks.append(objects.stored)
    services.erasure.finishing.append(objects.is_erased)
    services.refreshes.append(refresh)
    services.registered_calls.append(objects.start)
    services.ends.append(objects.stop)
    services.last_ends.append(objects.finish_uploads)
    return objects


async def absent(services: Services) -> None:
    """Raises StartupError where the store refers to objects."""
    from app.features.objects.rows import has_objects, url_of_objects

    url = await services.database.read(url_of_objects)
    if url is not None and await services.database.read(has_objects):
        raise StartupError(
            f"replay payloads of this store are in object storage: set TURNLOG_PAYLOADS={url}, and add objects "
            "to TURNLOG_FEATURES"
        )


async def _bucket(settings: Settings) -> Bucket | None:
    """The object storage of replay payloads. Raises StartupError if there is no such bucket."""
    if settings.payloads == "database":
        return None
    from app.features.objects.bucket import Bucket  # a twentieth of a second, which most starts do not need

    bucket = Bucket(settings.payloads, settings.payloads_timeout_s)
    if silent := await bucket.probe():
        log.warning("%s; turns with replay payloads wait for it", silent)
    if bucket.keeps_versions:
        log.warning("%s keeps old versions: %s", bucket.url, bucket.consequence_of_versions)
    return bucket
