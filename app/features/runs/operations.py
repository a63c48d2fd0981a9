"""What writes to the table of runs: what a run is given, its end, and what it has used."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from sqlalchemy import bindparam, delete, func, insert, select, update

from app.crash_points import reach
from app.features.runs.schema import runs
from app.store import pins
from app.store.dialect import Tx
from app.store.feed import raise_epoch
from app.store.incarnations import holds_lease
from app.store.log import BaseOperation
from app.store.rollouts import is_of_run
from app.store.schema import erased_runs, sessions

LEASE = "runs"
"""Of the process that counts and ends."""

_of_run = runs.c.run == bindparam("named")
_status = select(runs.c.status).where(_of_run).with_for_update()
_add = insert(runs)
_give = (
    update(runs)
    .where(_of_run)
    .values(
        status="open",
        max_live=bindparam("live"),
        max_tokens=bindparam("tokens"),
        metadata=bindparam("meta"),
        note=bindparam("text"),
    )
)
_close = update(runs).where(_of_run, runs.c.status != "erasing").values(status="closed")
_begin_erasing = (
    update(runs)
    .where(_of_run)
    .values(status="erasing", max_live=None, max_tokens=None, used_tokens=0, metadata=None, note=None)
)
_end_erasing = delete(runs).where(_of_run)
_of_erased = erased_runs.c.run == bindparam("named")
_was_erased = select(erased_runs.c.upto).where(_of_erased)
_forget_erased = delete(erased_runs).where(_of_erased)
_last_created = select(func.max(sessions.c.created_at)).where(sessions.c.run == bindparam("named"))
_add_erased = insert(erased_runs)
_is_unerased = (
    select(sessions.c.session_id).where(sessions.c.run == bindparam("named"), sessions.c.status != "erased").limit(1)
)
_own_session = select(sessions.c.session_id).where(sessions.c.run == bindparam("named"), is_of_run).limit(1)
_measure = update(runs).where(_of_run, runs.c.max_tokens.is_not(None)).values(used_tokens=bindparam("used"))


class GiveRun(BaseOperation, frozen=True):
    """Give a run its limits, metadata and note, in place of those before. Returns the status of a run that has ended,
    and writes nothing then; else None."""

    run: str
    live: int | None
    tokens: int | None
    metadata: bytes | None
    note: bytes | None

    def apply(self, tx: Tx) -> Literal["closed", "erasing"] | None:
        row = tx.one(_status, {"named": self.run})
        if row is not None and row[0] in ("closed", "erasing"):
            status: Literal["closed", "erasing"] = row[0]
            return status
        if row is None:
            tx.insert(_add, [{"run": self.run, "status": "open"}])
        given: dict[str, Any] = {"live": self.live, "tokens": self.tokens, "meta": self.metadata, "text": self.note}
        tx.run(_give, {"named": self.run, **given})
        return None


class EndRun(BaseOperation, frozen=True):
    """Close a run, or begin to erase it: no session is created in it any more. Returns its status; None: there is no
    such run. `is_elsewhere`: a session of it is in an archive."""

    run: str
    erase: bool
    is_elsewhere: bool = False

    def apply(self, tx: Tx) -> Literal["closed", "erasing", "erased"] | None:
        row = tx.one(_status, {"named": self.run})
        if row is None and not (self.is_elsewhere or tx.one(_own_session, {"named": self.run})):
            return None if tx.one(_was_erased, {"named": self.run}) is None else "erased"
        if row is None:
            tx.insert(_add, [{"run": self.run, "status": "open"}])
        tx.run(_begin_erasing if self.erase else _close, {"named": self.run})
        for follow in tx.points.run_ended:
            follow(tx, self.run)
        reach("in_run_ended")
        return "erasing" if self.erase or (row is not None and row[0] == "erasing") else "closed"


class RunErased(BaseOperation, frozen=True):
    """The run's sessions are erased: its name is free. False: one is not, such as one that was created meanwhile. True
    also where another process has said so: sessions that are there now are those of the next run of this name. None:
    it is being taken back to a checkpoint; what is left of that may not meet the next run of this name."""

    run: str

    def apply(self, tx: Tx) -> bool | None:
        row = tx.one(_status, {"named": self.run})
        if row is None or row[0] != "erasing":
            return True
        if tx.one(_is_unerased, {"named": self.run}) is not None:
            return False
        pins.change(tx)
        if pins.is_restoring(tx, self.run):
            return None
        tx.run(_end_erasing, {"named": self.run})
        last = tx.one(_last_created, {"named": self.run})
        if last is not None and last[0] is not None:
            tx.run(_forget_erased, {"named": self.run})
            tx.insert(_add_erased, [{"run": self.run, "upto": last[0]}])
        raise_epoch(tx, self.run)
        for follow in tx.points.run_erased:
            follow(tx, self.run)
        reach("in_run_erased")
        return True


class MeasureRun(BaseOperation, frozen=True):
    """What the run has used by the log. `fence` None: a client waits for it, whichever process counts else."""

    durable: ClassVar[bool] = False
    run: str
    used: int
    fence: int | None = None

    def apply(self, tx: Tx) -> None:
        if self.fence is None or holds_lease(tx, LEASE, self.fence):
            tx.run(_measure, {"named": self.run, "used": self.used})
