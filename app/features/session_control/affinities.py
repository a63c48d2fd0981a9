"""Engines that clients bound by `nvext.session_control`: one row a name, changed only from an expected state.

    (none) ──open──▶ opening ──the engine has opened──▶ bound ──close──▶ closing ──its turn ended──▶ ending ──▶ (none)
    (none) ──bind, or open where the engine holds nothing──▶ bound ──close, expiry──▶ (none)
    bound ──expiry, its session closed──▶ ending         closing ──open, bind by another session──▶ bound

`ending`: one process is telling the engine; a turn that wants the name waits for that. Rows of a dead process are
found by its incarnation and ended by another. `expires_at` is in the past in all states but `bound`, so that all rows
that may have to be ended are due.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    Double,
    String,
    bindparam,
    delete,
    insert,
    select,
    update,
)

from app.domain.control import DEFAULT_TIMEOUT_S, SessionControl
from app.features.session_control.schema import affinities
from app.store.dialect import Row, Tx, now
from app.store.log import BaseOperation
from app.store.schema import incarnations
from app.store.statements import holder_is_dead

State = Literal["opening", "bound", "closing", "ending"]

END_AT_ONCE = 100
"""Rows that one transaction ends."""

_by_name = affinities.c.control_id == bindparam("control", type_=String())
_rows = select(
    affinities.c.control_id,
    affinities.c.engine,
    affinities.c.state,
    affinities.c.worker_session,
    affinities.c.timeout_s,
    affinities.c.incarnation,
    affinities.c.session_id,
    (affinities.c.expires_at <= now()).label("is_due"),
    holder_is_dead.label("is_dead"),
).select_from(affinities.outerjoin(incarnations, incarnations.c.id == affinities.c.incarnation))
_named = _rows.where(_by_name)
_locked = _named.with_for_update(of=affinities)
_due = _rows.where(affinities.c.expires_at <= now()).order_by(affinities.c.control_id)
_of_session = _rows.where(
    affinities.c.session_id == bindparam("sid", type_=String()), affinities.c.state == "bound"
).order_by(affinities.c.control_id)

_VALUES = {
    "engine": bindparam("at_engine", type_=String()),
    "state": bindparam("in_state", type_=String()),
    "worker_session": bindparam("at_worker", type_=Boolean()),
    "timeout_s": bindparam("lasts_s", type_=Double()),
    "expires_at": now() + bindparam("left_s", type_=Double()),
    "incarnation": bindparam("me", type_=BigInteger()),
    "session_id": bindparam("used_by", type_=String()),
}
_insert = insert(affinities).values({"control_id": bindparam("control", type_=String()), **_VALUES})
_update = update(affinities).where(_by_name).values(_VALUES)
_delete = delete(affinities).where(_by_name)
_slide = (
    update(affinities).where(_by_name, affinities.c.state == "bound").values(expires_at=now() + affinities.c.timeout_s)
)


class AffinityRow(NamedTuple):
    """A row. `is_due`: it has expired. `is_dead`: its process is dead."""

    control_id: str
    engine: str
    state: State
    worker_session: bool
    timeout_s: float
    incarnation: int
    session_id: str
    is_due: bool
    is_dead: bool

    def may_be_ended(self, me: int, in_use: Collection[str]) -> bool:
        """May process `me`, whose turns use the names `in_use`, end this row?"""
        if self.control_id in in_use:
            return False
        return self.is_due if self.incarnation == me or self.state == "bound" else self.is_dead


class Used(msgspec.Struct, frozen=True):
    """The state of a name, and what the turn must do.

    `unbound`: nothing. `bound`: go to `engine`. `opening`: first have `engine` open its session, and report it.
    `closing`: go to `engine`, and end the session afterwards. `released`: go to `engine` for the last time. `ending`:
    tell `engine`, then try again. `held`: try again a little later.
    """

    state: Literal["unbound", "bound", "opening", "closing", "released", "ending", "held"]
    engine: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S


class Moved(msgspec.Struct, frozen=True):
    """The name is bound to the new engine, or its session must be opened there first (`opening`).

    `left`: the old engine has a session of this name.
    """

    opening: bool
    left: bool


class Ending(msgspec.Struct, frozen=True):
    """The engine must be told that the session of this name has ended."""

    control_id: str
    engine: str


def due(connection: Connection, lease_s: float) -> Sequence[AffinityRow]:
    """Rows that may have to be ended."""
    return [_affinity(row) for row in connection.execute(_due, {"lease_s": lease_s})]


def used_last_by(connection: Connection, session_id: str) -> bool:
    """Is there a name that this session used last?"""
    return connection.execute(_of_session, {"sid": session_id, "lease_s": 0.0}).first() is not None


def _lock_row(tx: Tx, control_id: str, lease_s: float) -> AffinityRow | None:
    """Read the row and lock it until the transaction ends."""
    row = tx.one(_locked, {"control": control_id, "lease_s": lease_s})
    return None if row is None else _affinity(row)


def _affinity(row: Row) -> AffinityRow:
    """SQLite has no booleans."""
    affinity = AffinityRow(*row)
    return affinity._replace(
        worker_session=bool(affinity.worker_session), is_due=bool(affinity.is_due), is_dead=bool(affinity.is_dead)
    )


def _values(row: AffinityRow) -> dict[str, Any]:
    return {
        "control": row.control_id,
        "at_engine": row.engine,
        "in_state": row.state,
        "at_worker": row.worker_session,
        "lasts_s": row.timeout_s,
        "left_s": row.timeout_s if row.state == "bound" else 0.0,
        "me": row.incarnation,
        "used_by": row.session_id,
    }


def _write(tx: Tx, row: AffinityRow) -> None:
    tx.run(_update, _values(row))


def _end(tx: Tx, row: AffinityRow, me: int) -> Ending | None:
    """None if no engine must be told: the row is deleted then."""
    if not row.worker_session:
        tx.run(_delete, {"control": row.control_id})
        return None
    _write(tx, row._replace(state="ending", incarnation=me))
    return Ending(row.control_id, row.engine)


class _NameOperation(BaseOperation, frozen=True):
    """An operation on names: it belongs to no session and runs alone. A binding lost in a power cut is made again."""

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True


class Use(_NameOperation, frozen=True):
    """A turn of session `used_by` requests the name `control`. A new binding goes to `engine`.

    `holding`: the engines that can hold sessions. A process is dead after `lease_s` seconds without a heartbeat.
    """

    control: SessionControl
    used_by: str
    incarnation: int
    lease_s: float
    engine: str
    holding: frozenset[str]

    def apply(self, tx: Tx) -> Used:
        row = _lock_row(tx, self.control.session_id, self.lease_s)
        if row is not None and self._waits_for(row):
            if not row.is_dead:
                return Used("held")
            return Used("unbound") if self.control.action is None else self._end_first(tx, row)
        match self.control.action:
            case None:
                return self._request_bound(tx, row)
            case "close":
                return self._request_close(tx, row)
            case "open" | "bind":
                return self._request_binding(tx, row)

    def finds_it_held(self, connection: Connection) -> bool:
        """Would this request be told now to try again later?"""
        found = connection.execute(_named, {"control": self.control.session_id, "lease_s": self.lease_s}).first()
        return found is not None and self._waits_for(row := _affinity(found)) and not row.is_dead

    def _waits_for(self, row: AffinityRow) -> bool:
        """Does this request have to wait until the process that holds the row has gone on?"""
        if row.state == "opening" or self.control.action not in ("open", "bind"):
            return row.state == "opening"
        # A session's closing turn has ended before its next one begins; another session's may run for long.
        return row.state == "ending" or (row.state == "closing" and row.session_id == self.used_by)

    def _request_bound(self, tx: Tx, row: AffinityRow | None) -> Used:
        if row is not None and row.state == "bound" and not row.is_due:
            return self._become(tx, row, "bound")
        return Used("unbound")

    def _request_close(self, tx: Tx, row: AffinityRow | None) -> Used:
        if row is None or row.state in ("closing", "ending"):
            return Used("unbound")
        if row.worker_session:
            return self._become(tx, row, "closing")
        tx.run(_delete, {"control": row.control_id})
        return Used("unbound") if row.is_due else Used("released", row.engine)

    def _request_binding(self, tx: Tx, row: AffinityRow | None) -> Used:
        if row is None:
            return self._bind(tx, None)
        if row.state == "bound" and row.is_due:
            return self._end_first(tx, row) if row.worker_session else self._bind(tx, row)
        if self.control.action == "open" and not row.worker_session and row.engine in self.holding:
            return self._become(tx, row._replace(worker_session=True), "opening")
        return self._become(tx, row, "bound")

    def _bind(self, tx: Tx, row: AffinityRow | None) -> Used:
        opens = self.control.action == "open" and self.engine in self.holding
        state: Literal["opening", "bound"] = "opening" if opens else "bound"
        lasts_s = self.control.timeout_s or DEFAULT_TIMEOUT_S
        row_to_write = AffinityRow(
            self.control.session_id, self.engine, state, opens, lasts_s, self.incarnation, self.used_by, False, False
        )
        if row is None:
            tx.run(_insert, _values(row_to_write))
        else:
            _write(tx, row_to_write)
        return Used(state, self.engine, lasts_s)

    def _become(self, tx: Tx, row: AffinityRow, state: Literal["opening", "bound", "closing"]) -> Used:
        lasts_s = self.control.timeout_s or row.timeout_s
        changed = row._replace(state=state, timeout_s=lasts_s, incarnation=self.incarnation, session_id=self.used_by)
        _write(tx, changed)
        return Used(state, row.engine, lasts_s)

    def _end_first(self, tx: Tx, row: AffinityRow) -> Used:
        ending = _end(tx, row, self.incarnation)
        return Used("held") if ending is None else Used("ending", ending.engine)


class _TurnOperation(_NameOperation, frozen=True):
    """An operation by the turn of session `used_by` that uses the name."""

    control_id: str
    used_by: str
    incarnation: int

    def _own(self, tx: Tx, *states: State) -> AffinityRow | None:
        """The row, if this turn has put it into one of these states."""
        row = _lock_row(tx, self.control_id, 0.0)
        return row if row is not None and self._is_own(row, *states) else None

    def _is_own(self, row: AffinityRow, *states: State) -> bool:
        return row.state in states and (row.incarnation, row.session_id) == (self.incarnation, self.used_by)


class Move(_TurnOperation, frozen=True):
    """`engine` cannot be reached: bind the name to another one; None if another process has changed the row."""

    engine: str
    to: str
    holding: frozenset[str]

    def apply(self, tx: Tx) -> Moved | None:
        row = _lock_row(tx, self.control_id, 0.0)
        if row is None or row.engine != self.engine or not (row.state == "bound" or self._is_own(row, "opening")):
            return None
        opens = row.worker_session and self.to in self.holding
        moved = row._replace(
            engine=self.to,
            state="opening" if opens else "bound",
            worker_session=opens,
            incarnation=self.incarnation,
            session_id=self.used_by,
        )
        _write(tx, moved)
        return Moved(opens, row.state == "bound" and row.worker_session)


class Opened(_TurnOperation, frozen=True):
    """The engine has opened its session, or cannot hold any (`worker_session` False); False if the row has changed."""

    worker_session: bool

    def apply(self, tx: Tx) -> bool:
        row = self._own(tx, "opening")
        if row is not None:
            _write(tx, row._replace(state="bound", worker_session=self.worker_session))
        return row is not None


class End(_TurnOperation, frozen=True):
    """The turn is over: end what it was opening or closing."""

    def apply(self, tx: Tx) -> Ending | None:
        row = self._own(tx, "opening", "closing")
        return None if row is None else _end(tx, row, self.incarnation)


class NotOpened(_TurnOperation, frozen=True):
    """The engine has not opened its session: delete the binding."""

    def apply(self, tx: Tx) -> None:
        if self._own(tx, "opening") is not None:
            tx.run(_delete, {"control": self.control_id})


class EngineTold(_NameOperation, frozen=True):
    """The engine has been told that the session has ended."""

    control_id: str
    incarnation: int

    def apply(self, tx: Tx) -> None:
        row = _lock_row(tx, self.control_id, 0.0)
        if row is not None and row.state == "ending" and row.incarnation == self.incarnation:
            tx.run(_delete, {"control": self.control_id})


class EndDue(_NameOperation, frozen=True):
    """End names that nobody uses: expired, or left by a dead process. This process's turns use the names `in_use`."""

    incarnation: int
    lease_s: float
    in_use: frozenset[str]

    def apply(self, tx: Tx) -> list[Ending]:
        candidates = [row for row in map(_affinity, tx.all(_due, {"lease_s": self.lease_s})) if self._may_end(row)]
        locked = (_lock_row(tx, row.control_id, self.lease_s) for row in candidates[:END_AT_ONCE])
        ended = [_end(tx, row, self.incarnation) for row in locked if row is not None and self._may_end(row)]
        return [ending for ending in ended if ending is not None]

    def _may_end(self, row: AffinityRow) -> bool:
        return row.may_be_ended(self.incarnation, self.in_use)


class EndOf(_NameOperation, frozen=True):
    """A session was closed: end the names that it used last."""

    used_by: str
    incarnation: int

    def apply(self, tx: Tx) -> list[Ending]:
        candidates = map(_affinity, tx.all(_of_session, {"sid": self.used_by, "lease_s": 0.0}))
        locked = (_lock_row(tx, row.control_id, 0.0) for row in candidates)
        ended = [
            _end(tx, row, self.incarnation) for row in locked if row is not None and self._is_bound_by_session(row)
        ]
        return [ending for ending in ended if ending is not None]

    def _is_bound_by_session(self, row: AffinityRow) -> bool:
        return row.state == "bound" and row.session_id == self.used_by


class Slide(_NameOperation, frozen=True):
    """Turns that use these names are still running: extend their lifetime."""

    control_ids: Sequence[str]

    def apply(self, tx: Tx) -> None:
        tx.run_all(_slide, [{"control": control_id} for control_id in sorted(self.control_ids)])
