"""A simulated process's own: how it starts, stops, saves snapshots and is known to the others."""

from __future__ import annotations

from sqlalchemy import insert

from app.assembly import Assembly
from app.domain.session import encode_session
from app.store import incarnations, reads, schema
from app.store.dialect import Tx, now
from app.store.log_sessions import SaveSnapshot
from workers import codec


async def start(made: Assembly) -> None:
    """Of a process that is registered. Raises AppError where the store cannot be read."""
    await made.open()
    made.start()
    made.registered()


async def stop(made: Assembly) -> None:
    """An orderly end. Raises AppError where the store cannot be told."""
    await made.drain()
    await made.stop()


async def snapshot(made: Assembly, session_id: str) -> None:
    """Save a fold of the session, as a process does with one of a thousand events. Raises AppError."""
    live = await made.cache.get(session_id)
    if live is not None:
        session = live.session
        frame = codec.compress(encode_session(session))
        await made.writer.submit(SaveSnapshot(session_id, session.version, reads.SNAPSHOT_FORMAT, frame))


_register_elsewhere = (
    insert(schema.incarnations)
    .values(host="", pid=1, started_at=now(), heartbeat_at=now())
    .returning(schema.incarnations.c.id)
)


def register(tx: Tx, name: str, *, alone: bool) -> int:
    """A new incarnation; where there are several processes, each is on a host of its own, called `name`."""
    if alone:
        return incarnations.register(tx, alone=True)
    row = tx.one(_register_elsewhere, {"host": name})
    assert row is not None
    return int(row[0])
