"""A simulated process's own: what it is made of, how it starts, saves snapshots and is known to the others."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import cast

from sqlalchemy import insert

from app.domain.session import encode_session
from app.features import annotations as annotated
from app.features import (
    archive,
    budgets,
    checkpoints,
    forks,
    gates,
    groups,
    live,
    objects,
    resume,
    session_control,
)
from app.features.objects.rows import note_objects
from app.metrics import Metrics, RecentTurnStats
from app.process import ConnectionLimit
from app.services import Services
from app.sessions.lifecycle import Clock
from app.sessions.recovery import Registration
from app.settings import Settings
from app.store import incarnations, ports, schema
from app.store.database import Database
from app.store.dialect import Tx, now
from app.store.log_sessions import SaveSnapshot
from app.store.sessions import SNAPSHOT_FORMAT
from app.tokens import Tokens
from app.upstream.client import EngineClient
from workers import codec
from workers.pool import Pool

FEATURES = (gates, budgets, checkpoints, groups, live, resume, session_control, annotated, archive, forks, objects)

METRICS = Metrics(RecentTurnStats(time.monotonic))


class Registered(Registration):
    """Of a process that the test has registered."""

    def __init__(self, database: Database, number: int) -> None:
        super().__init__(database)
        self._number = number


def made(
    settings: Settings,
    database: ports.Database,
    client: EngineClient,
    pool: Pool,
    clock: Clock,
    number: int,
    lease_left: Callable[[int], Awaitable[float | None]],
    poll_s: float,
) -> Services:
    """The services of the process that is registered as incarnation `number`."""
    store = cast(Database, database)  # routes that need more of it are not asked here
    services = Services(
        settings,
        release="simulated",
        database=store,
        client=client,
        pool=pool,
        registration=Registered(store, number),
        metrics=METRICS,
        tokens=Tokens(()),
        connection_limit=ConnectionLimit(time.monotonic),
        clock=clock,
        lease_left=lease_left,
        poll_s=poll_s,
    )
    for feature in FEATURES:
        services.features[feature.__name__.rpartition(".")[2]] = feature.add_to(services)
    return services


async def start(made: Services) -> None:
    """Without what only measures and probes. Raises AppError where the store cannot be read."""
    await made.open()
    made.start()
    made.registered()


async def snapshot(made: Services, session_id: str) -> None:
    """Save a fold of the session, as a process does with one of a thousand events; now and then as another release
    would, which this one cannot read. Raises AppError."""
    live = await made.cache.get(session_id)
    if live is not None:
        session = live.session
        frame = codec.compress(encode_session(session))
        kind = SNAPSHOT_FORMAT
        if session.version % 4 == 0:
            kind, frame = "older", b"another structure"
        await made.writer.submit(SaveSnapshot(session_id, session.version, kind, frame))


_register_elsewhere = (
    insert(schema.incarnations)
    .values(host="", pid=1, started_at=now(), heartbeat_at=now(), release="")
    .returning(schema.incarnations.c.id)
)


def register(tx: Tx, name: str, *, alone: bool, url: str | None = None) -> int:
    """A new incarnation; where there are several processes, each is on a host of its own, called `name`. `url` is that
    of object storage."""
    note_objects(tx, url, owner="simulated")
    if alone:
        return incarnations.register(tx, alone=True)
    row = tx.one(_register_elsewhere, {"host": name})
    assert row is not None
    return int(row[0])
