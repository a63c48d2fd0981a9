"""The store as the service uses it: protocols of the database and its writer.

In service they are `database.Database` and `writer.Writer`; the simulation (`tests/tools/simulation`) puts a database
in memory behind the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection as Connection
from sqlalchemy.sql import Executable

from app.store.damage import Unreadable
from app.store.dialect import Parameters, Row, StorePoints, Tx
from app.store.log import Operation

T = TypeVar("T")
P = ParamSpec("P")

READERS = 8
"""Connections for reads, per process."""

LOCKED_S = 10.0
"""How long a write waits in total, from its submission, while another program locks the database."""

Committed = Callable[[float], None]
"""Called with a COMMIT's duration in seconds, including the disk sync; on any thread."""


class Bucket(Protocol):
    """The object storage of replay payloads. Methods raise PayloadsUnavailable."""

    @property
    def is_folder(self) -> bool: ...

    async def read(self, name: str) -> bytes | None:
        """An object; None if it is not there."""
        ...

    async def url_of(self, name: str, seconds: int) -> str:
        """A URL that anyone may read the object by for so long. A folder has none."""
        ...


class Database(Protocol):
    """Transactions; for their guarantees see `database.Database`."""

    @property
    def is_sqlite(self) -> bool:
        """Is this process the only one that uses the store?"""
        ...

    @property
    def lanes(self) -> int:
        """How many write transactions may be open at a time."""
        ...

    @property
    def bucket(self) -> Bucket | None:
        """The object storage of replay payloads."""
        ...

    @property
    def points(self) -> StorePoints:
        """What features write with the kernel."""
        ...

    @property
    def unreadable(self) -> Unreadable:
        """The sessions known to be unreadable."""
        ...

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
    ) -> T:
        """What `function` gives; it may run twice, and must not change anything but what it returns.

        Where only `session_id` is read, an UnknownEvent or CorruptContent of it is raised as SessionUnreadable.
        """
        ...

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]: ...

    async def write(
        self,
        function: Callable[[Tx], T],
        *,
        durable: bool,
        runs_inline: bool = False,
        size: int = 0,
        until: float | None = None,
    ) -> T: ...

    async def empty_log_file(self) -> None: ...

    async def give_back(self) -> None: ...


class Writer(Protocol):
    """Accepts operations; for the guarantees of an outcome see `writer.Writer`."""

    async def submit(self, operation: Operation[T]) -> T: ...


async def of_session(
    database: Database,
    session_id: str,
    function: Callable[Concatenate[Connection, str, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """What `function` reads of one session. Raises as `Database.read` with that session: SessionUnreadable."""
    return await database.read(
        lambda connection: function(connection, session_id, *args, **kwargs), session_id=session_id
    )
