"""The store as the service sees it: what it asks of a database and of its writer, and no more.

In service they are `engine.Database` and `writer.Writer`; the simulation (`tests/tools/simulation`) puts a database in
memory behind the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.sql import Executable

from app.store.dialect import Parameters, Row, Tx
from app.store.log import Operation
from app.store.unreadable import Unreadable

T = TypeVar("T")

LOCKED_S = 10.0
"""How long a write waits in all while another program holds the database's lock, from when it was asked for."""

Committed = Callable[[float], None]
"""Takes how many seconds a COMMIT took, its sync to the disk included; on any thread."""


class Database(Protocol):
    """Transactions; what they promise stands in `engine.Database`."""

    @property
    def is_sqlite(self) -> bool:
        """Is this process the only one that has the store?"""
        ...

    @property
    def lanes(self) -> int:
        """How many write transactions may be open at a time."""
        ...

    @property
    def unreadable(self) -> Unreadable:
        """The sessions of which it was told that they cannot be read."""
        ...

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
        or_else: Callable[[Connection], T] | None = None,
    ) -> T: ...

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
    """Where operations are handed in; what an outcome promises stands in `writer.Writer`."""

    async def submit(self, operation: Operation[T]) -> T: ...
