"""The table of runs' tokens, and how a token is made and ended."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Identity, Index, Integer, MetaData, Table, bindparam, delete, insert

from app.store.dialect import StorePoints, Tx
from app.store.schema import NAMING, SESSION_ID

metadata = MetaData(naming_convention=NAMING)

run_tokens = Table(
    "run_tokens",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("run", SESSION_ID, nullable=False),
    Column("is_valid", Boolean, nullable=False),
    Index("ix_run_tokens_run_number", "run", "number"),
)
"""The token of a run is derived from the run and `number`; no number is given twice. Of a run's rows the highest
counts: its token is valid, or, without `is_valid`, none is. Such a row stays, so that a later run of the name never
takes a token of before."""

_insert = insert(run_tokens).values(run=bindparam("of"), is_valid=bindparam("valid")).returning(run_tokens.c.number)
_delete_before = delete(run_tokens).where(
    run_tokens.c.run == bindparam("of"), run_tokens.c.number < bindparam("last", type_=BigInteger)
)


def next_token(tx: Tx, run: str, *, is_valid: bool) -> int:
    """End the run's token, and with `is_valid` begin another, whose number this is."""
    row = tx.one(_insert, {"of": run, "valid": is_valid})
    assert row is not None
    number: int = row[0]
    tx.run(_delete_before, {"of": run, "last": number})
    return number


def end_token(tx: Tx, run: str) -> None:
    """The run is closed or erased: its token ends."""
    next_token(tx, run, is_valid=False)


def join(points: StorePoints) -> None:
    points.run_ended.append(end_token)
