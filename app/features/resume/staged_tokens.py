"""What engines have streamed of turns in flight, for the retry after a crash: the only SQL of `staged_tokens`.

    generate                 rows of the turn's fence, each written only while its claim holds
    commit, rejection        deletes them in its transaction; so do a close and an erasure
    server or engine dies    the rows stay; a turn with the same request takes them over under its own fence

Nothing here is synced: a crash of the machine costs the newest rows, and with them only tokens.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec
from sqlalchemy import (
    Connection,
    bindparam,
    exists,
    insert,
    select,
    update,
)

from app.features.resume.schema import drop, staged_tokens
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import TurnOperation
from app.store.schema import open_turns
from workers.reply import LogprobsOf

_rows = staged_tokens.c
_of_turn = sql.of_session(staged_tokens) & (_rows.fence == bindparam("fenced"))
_is_open = exists().where(open_turns.c.session_id == _rows.session_id, open_turns.c.fence == _rows.fence)

_insert = insert(staged_tokens)
_take_over = update(staged_tokens).where(_of_turn, ~_is_open).values(fence=bindparam("by"))
_left = (
    select(_rows.fence, _rows.number, _rows.part, _rows.engine, _rows.weight_version, _rows.logprobs_of, _rows.data)
    .where(sql.of_session(staged_tokens), _rows.request_hash == bindparam("request"), ~_is_open)
    .order_by(_rows.fence.desc(), _rows.number)
)


class StagedRow(msgspec.Struct, frozen=True):
    """Bytes that an engine streamed, as a compressed frame. `part` counts the turn's generations, `number` its rows;
    `version` is the weight version known when the generation was dispatched; `logprobs_of` as in `TurnCommitted`."""

    number: int
    part: int
    engine: str
    version: str | None
    logprobs_of: LogprobsOf | None
    data: bytes


class StagedTurn(NamedTuple):
    """What a turn that has ended without a commit has left."""

    fence: int
    rows: list[StagedRow]


def left_by(connection: Connection, session_id: str, request_hash: str) -> StagedTurn | None:
    """The rows of the newest turn that has ended and had this request."""
    rows = connection.execute(_left, {"sid": session_id, "request": request_hash}).all()
    if not rows:
        return None
    newest = rows[0][0]
    return StagedTurn(newest, [StagedRow(*row[1:]) for row in rows if row[0] == newest])


class StageTokens(TurnOperation, frozen=True):
    """Write a row of an open turn; False without the claim."""

    durable: ClassVar[bool] = False
    request_hash: str
    row: StagedRow

    @property
    def size(self) -> int:
        return 512 + len(self.row.data)

    def apply(self, tx: Tx) -> bool:
        if not self.holds(tx):
            return False
        row = self.row
        fields = {
            "session_id": self.session_id,
            "fence": self.fence,
            "number": row.number,
            "part": row.part,
            "request_hash": self.request_hash,
            "engine": row.engine,
            "weight_version": row.version,
            "logprobs_of": row.logprobs_of,
            "data": row.data,
        }
        tx.insert(_insert, [fields])
        return True


class TakeOverStaged(TurnOperation, frozen=True):
    """Give the rows of a turn that has ended to an open turn; False without the claim, or if they are gone."""

    durable: ClassVar[bool] = False
    staged_fence: int

    def apply(self, tx: Tx) -> bool:
        if not self.holds(tx):
            return False
        return tx.run(_take_over, {"sid": self.session_id, "fenced": self.staged_fence, "by": self.fence}) > 0


class DropStaged(TurnOperation, frozen=True):
    """Delete what an open turn has staged, or taken over; nothing without the claim."""

    durable: ClassVar[bool] = False

    def apply(self, tx: Tx) -> None:
        if self.holds(tx):
            drop(tx, [(self.session_id, self.fence)])
