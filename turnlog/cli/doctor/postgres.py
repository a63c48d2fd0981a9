"""Checks a PostgreSQL store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from app.store import repair
from app.store.database import LANES, SPARE_WRITERS, create_engine
from app.store.dialect import Compiler, StorePoints
from app.store.incarnations import Serving, living
from app.store.opening import release_of, revision_head, revision_of
from app.store.ports import READERS
from app.store.postgres import DRIVER_ERRORS
from app.store.postgres_tx import PostgresTx
from turnlog.amounts import amount
from turnlog.cli.doctor.findings import Finding, ok, problem, warning
from turnlog.cli.output import size

if TYPE_CHECKING:
    from app.settings import Settings

OLDEST = 130000
"""PostgreSQL 13 introduced `pg_current_xact_id`, which orders exports."""

EACH = READERS + LANES + SPARE_WRITERS
"""The most connections of a process."""

PATIENCE_S = 10.0

OFF_S = 5.0
"""A clock that differs this much from the database's: nothing breaks, but the times in logs do not match."""


class PostgresFacts(NamedTuple):
    """What PostgreSQL reports; `sync` are the standbys that a commit waits for, out of `standbys`."""

    version: int
    in_recovery: bool
    encoding: str
    fsync: str
    synchronous_commit: str
    standbys: int
    sync: int
    max_connections: int
    in_use: int
    bytes: int
    clock: float


_SERVER = text(
    """
    SELECT current_setting('server_version_num')::int, pg_is_in_recovery(),
      current_setting('server_encoding'), current_setting('fsync'),
      current_setting('synchronous_commit'), (SELECT count(*) FROM pg_stat_replication),
      (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')),
      current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
      (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
      pg_database_size(current_database()), extract(epoch FROM clock_timestamp())::double precision
    """
)


async def look(settings: Settings) -> tuple[list[Finding], tuple[str, str | None] | None]:
    """The findings, and the revision with the release as `store.Revision`; None if the database cannot be read."""
    engine = create_engine(settings.database_url)
    unordered: str | None = None
    try:
        async with asyncio.timeout(PATIENCE_S), engine.connect() as connection:
            asked_at = time.time()
            server = PostgresFacts(*(await connection.execute(_SERVER)).one())
            answered_at = time.time()
            revision = await connection.run_sync(revision_of)
            by = await connection.run_sync(release_of)
            serving = [] if by is None else await connection.run_sync(living, settings.lease_s)
            if revision == revision_head() and not server.in_recovery:
                unordered = await connection.run_sync(_unordered)
    except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
        cause = getattr(error, "orig", None) or error
        what = f"it cannot be reached: {type(cause).__name__}" + (
            ": no answer" if isinstance(error, TimeoutError) else ""
        )
        return [problem("database", what, "is PostgreSQL running, and TURNLOG_DATABASE_URL right?")], None
    finally:
        await engine.dispose()
    found = [*_judged(server, len(serving)), *_clock(server.clock, asked_at, answered_at)]
    if unordered is not None:
        found.append(problem("database", unordered, "give the address of one PostgreSQL server (docs/operations.md)"))
    found.append(ok("database", _served(serving)))
    return found, (revision or "", by)


def _served(serving: Sequence[Serving]) -> str:
    if not serving:
        return "no process serves it"
    hosts = amount(len({one.host for one in serving}), "host")
    counts = Counter(one.release for one in serving)
    releases = ", ".join(f"{count} of release {name}" for name, count in sorted(counts.items()))
    return f"{amount(len(serving), 'process serves', 'processes serve')} it on {hosts}: {releases}"


def _unordered(connection: Connection) -> str | None:
    """Why events do not come back in the order of commits; what is written for the proof is taken back."""
    connection.rollback()  # the probe has a transaction of its own
    tx = PostgresTx(connection, Compiler(connection.dialect), StorePoints())  # it writes no session
    tx.begin(durable=False)
    try:
        repair.write_probe(tx, 0)
    except repair.StoreUnordered as error:
        return str(error)
    finally:
        tx.rollback()
    return None


def _judged(server: PostgresFacts, serving: int) -> Iterator[Finding]:
    major = server.version // 10000
    if server.version < OLDEST:
        yield problem("database", f"PostgreSQL {major}", "Turnlog needs 13 or newer")
    else:
        yield ok("database", f"PostgreSQL {major}, {size(server.bytes)}")
    if server.in_recovery:
        yield problem("database", "it is a standby, which cannot be written to", "give the primary's address")
    if server.encoding != "UTF8":
        todo = "make a database with ENCODING 'UTF8' TEMPLATE template0"
        yield problem("database", f"its encoding is {server.encoding}, which cannot hold every text", todo)
    if server.fsync != "on":
        yield problem("database", "fsync is off: a crash of its machine loses acknowledged turns", "set fsync = on")
    if server.standbys and not server.sync:
        yield warning(
            "database",
            f"none of its {server.standbys} standbys is synchronous: a failover loses the last acknowledged turns",
            "set synchronous_standby_names (docs/scale.md#a-standby)",
        )
    else:
        yield ok("database", f"a commit waits for its disk{f' and {server.sync} standbys' if server.sync else ''}")
    fits = server.max_connections // EACH
    if server.max_connections - server.in_use < EACH and not serving:
        yield problem(
            "database",
            f"{server.in_use} of {server.max_connections} connections are taken, a process takes up to {EACH}",
            "raise max_connections, or put a pooler between",
        )
    elif fits < max(serving, 1) + 1:
        yield warning(
            "database",
            f"{server.max_connections} connections are enough for {fits} processes ({EACH} each)",
            "raise max_connections before you start more",
        )
    else:
        yield ok("database", f"{server.max_connections} connections: enough for {fits} processes ({EACH} each)")


def _clock(theirs: float, asked_at: float, answered_at: float) -> Iterator[Finding]:
    """Leases use only the database's clock; the times of events are the process's own."""
    off = max(asked_at - theirs, theirs - answered_at, 0.0)
    if off > OFF_S:
        yield warning("clock", f"this machine's is {off:.1f} s off the database's", "run an NTP client on both")
    else:
        yield ok("clock", "this machine's agrees with the database's")
