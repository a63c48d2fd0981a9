"""The store of a simulation on a real PostgreSQL: emptied for each schedule, and with the simulation's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from app.composition import metadata
from app.store.dialect import Compiler
from tests.tools.simulation.backends import SESSION, Backend, Backends
from tests.tools.simulation.store import Store

T = TypeVar("T")

CLOCK = """
SELECT pg_reload_conf();
CREATE SCHEMA simulated;
-- A sequence is read as it is now, whatever a transaction's snapshot shows; an unlogged one takes no transaction's id.
CREATE UNLOGGED SEQUENCE simulated.clock MINVALUE 0;
CREATE UNLOGGED SEQUENCE simulated.started MINVALUE 0;
CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT to_timestamp(last_value / 1e6) FROM simulated.clock';
CREATE FUNCTION simulated.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT to_timestamp(last_value / 1e6) FROM simulated.started';
"""

TIMED = ("clock_timestamp", "INTO turns")
"""What statements contain that see the time, in themselves or in a column's default."""


class PostgresStore(Store):
    """An empty database of a server that the tests have started. The tables are as `app.store.schema` says."""

    def __init__(self, url: str) -> None:
        super().__init__()
        parsed = make_url(url)
        self.url = url
        self.backends = Backends(parsed.set(drivername="postgresql").render_as_string(False))
        self._now: Callable[[], float] = lambda: 0.0
        self._set_to = 0
        self._execute("ALTER SYSTEM SET fsync = off")
        self._execute(CLOCK)
        self._engine = create_async_engine(
            parsed,
            isolation_level="AUTOCOMMIT",
            poolclass=StaticPool,
            connect_args={"server_settings": SESSION},
        )
        run = self.backends.run
        self.compiler = Compiler(self._engine.dialect)
        self._connection = run(self._engine.connect().start())
        run(self._connection.run_sync(metadata().create_all))
        names = ", ".join(table.name for table in metadata().sorted_tables)
        self._empty = f"TRUNCATE {names} RESTART IDENTITY; INSERT INTO store_meta (key, value) VALUES ('epoch', '1')"

    def _execute(self, statements: str) -> None:
        self.backends.run(self.backends.looker.raw.execute(statements))

    def restart(self, now: Callable[[], float]) -> None:
        self.objects.clear()
        self.commits.clear()
        self._now = now
        self._execute(self._empty)
        self._execute("SELECT setval('simulated.started', 0)")

    def close(self) -> None:
        self.backends.run(self._connection.close())
        self.backends.run(self._engine.dispose())
        self.backends.close()

    def read(self, function: Callable[[Connection], T]) -> T:
        self.set_clock()
        return self.backends.run(self._connection.run_sync(function))

    def keep_compiled(self, engine: Engine) -> None:
        """The engine takes the statements that others have compiled."""
        engine.dialect = self._engine.dialect
        engine._compiled_cache = self._engine.sync_engine._compiled_cache

    def set_clock(self) -> None:
        """Tell the server what time it is."""
        micros = int(self._now() * 1e6)
        if micros != self._set_to:
            self._set_to = micros
            self.backends.run(self.backends.looker.raw.fetchval("SELECT setval('simulated.clock', $1)", micros))

    def note_commit(self, backend: Backend) -> None:
        """The transaction of this session is about to be committed."""
        tx = self.backends.run(backend.raw.fetchval("SELECT pg_current_xact_id_if_assigned()::text::bigint"))
        if tx is not None:
            self.commits.append(tx)

    def start(self) -> None:
        """The server was restarted now."""
        self._execute(f"SELECT setval('simulated.started', {int(self._now() * 1e6)})")
