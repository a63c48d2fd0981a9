"""Makes, ends and knows tokens of runs."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from sqlalchemy import bindparam, select

from app.features.run_tokens.schema import next_token, run_tokens
from app.store.database import Database
from app.store.dialect import Tx
from app.store.log import BaseOperation
from app.store.writer import Writer
from app.tokens import Tokens

KNOWN_S = 0.5
"""How long a process knows a number before it asks the store again: so long another process may still take a token
that has ended."""

REMEMBERED = 4096
"""Runs whose number a process remembers."""

_newest = (
    select(run_tokens.c.number, run_tokens.c.is_valid)
    .where(run_tokens.c.run == bindparam("of"))
    .order_by(run_tokens.c.number.desc())
    .limit(1)
)


class NextToken(BaseOperation, frozen=True):
    """The number of the run's new token, or with `is_valid` False of none."""

    run: str
    is_valid: bool

    def apply(self, tx: Tx) -> int:
        return next_token(tx, self.run, is_valid=self.is_valid)


class _Known(NamedTuple):
    """`until` is by the loop's time."""

    number: int | None
    until: float


class TokenNumbers:
    def __init__(self, database: Database, writer: Writer, tokens: Tokens) -> None:
        self._database = database
        self._writer = writer
        self._tokens = tokens
        self._known: dict[str, _Known] = {}

    async def make(self, run: str) -> str:
        """The run's new token; the one before it ends. Raises StoreUnavailable, StoreFull, Overloaded."""
        number = await self._writer.submit(NextToken(run, True))
        self._known.pop(run, None)
        return self._tokens.for_run(run, number)

    async def end(self, run: str) -> None:
        """The run has no token any more. Raises as `make`."""
        await self._writer.submit(NextToken(run, False))
        self._known.pop(run, None)

    async def number_of(self, run: str) -> int | None:
        """The number of the run's token; None: it has none. At most KNOWN_S old. Raises StoreUnavailable."""
        asked_at = asyncio.get_running_loop().time()
        known = self._known.get(run)
        if known is None or known.until < asked_at:
            rows = await self._database.read_autocommit(_newest, {"of": run})
            known = _Known(next((number for number, is_valid in rows if is_valid), None), asked_at + KNOWN_S)
            self._known.pop(run, None)
            self._known[run] = known
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return known.number
