"""The end of every test of a fault: the whole store is as its log says, and holds every turn that was acknowledged."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection

import httpx
from integration.stand import Stand, Talk

from app.features.objects.bucket import open_bucket
from app.settings import load_settings
from app.store import repair
from app.store.database import Database
from app.store.dialect import StorePoints
from fault.table import Tally
from ops.verify import Acknowledged, Report, verify

ATTEMPTS = 5
"""Beside a running server on PostgreSQL a session that is being written may look wrong; what is wrong stays so."""


def acknowledgement(session_id: str, reply: httpx.Response) -> Acknowledged:
    """What a client knows by a 200 that is no stream."""
    return Acknowledged(session_id, int(reply.headers["x-turnlog-turn"]), hashlib.sha256(reply.content).hexdigest())


def acknowledgements(talk: Talk, *replies: httpx.Response) -> list[Acknowledged]:
    return [acknowledgement(talk.id, reply) for reply in replies]


def verified(where: str | Stand, acknowledged: Collection[Acknowledged] = (), tally: Tally | None = None) -> Report:
    """Run `ops.verify` over a store, at rest or beside its running server, by its URL or its stand.

    What was acknowledged and is not there counts as lost in the tally.
    In a test that runs in an event loop: `await asyncio.to_thread(verified, …)`.
    """
    url = where if isinstance(where, str) else where.server.environment["TURNLOG_DATABASE_URL"]
    for attempt in range(ATTEMPTS):
        report = asyncio.run(_verify(url, acknowledged))
        if not report.problems:
            break
        time.sleep(0.1 * attempt)
    if tally is not None:
        tally.acknowledged += len(acknowledged)
        tally.lost += len(report.missing)
    assert report.problems == [], report.problems[:20]
    assert report.sessions > 0, "an empty store proves nothing"
    return report


async def _verify(url: str, acknowledged: Collection[Acknowledged]) -> Report:
    database = Database(url, bucket=open_bucket(load_settings("payloads", "payloads_timeout_s")), points=StorePoints())
    try:
        await repair.require_revision(database)
        return await verify(database, acknowledged=acknowledged)
    finally:
        await database.close()
