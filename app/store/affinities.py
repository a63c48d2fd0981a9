"""Engines that clients bound by `nvext.session_control`: a row for each name, changed by whoever finds it as expected.

    (none) ──open──▶ opening ──the engine has opened──▶ bound ──close──▶ closing ──its turn ended──▶ ending ──▶ (none)
    (none) ──bind, or open where the engine holds nothing──▶ bound ──close, expiry──▶ (none)
    bound ──expiry, its session closed──▶ ending         closing ──open, bind by another session──▶ bound

`ending`: one process is telling the engine, and who wants the name anew waits for that. What a dead process left behind
is found by its incarnation, and ended by another. `expires_at` is in the past in all states but `bound`: what may have
to be ended is what is due.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Boolean, Connection, Double, String, bindparam, delete, insert, select, update

from app.domain.control import DEFAULT_TIMEOUT_S, SessionControl
from app.store.dialect import Row, Tx, now
from app.store.log import BaseOperation
from app.store.schema import affinities, incarnations
from app.store.statements import holder_is_dead

State = Literal["opening", "bound", "closing", "ending"]

END_AT_ONCE = 100
"""So many rows does one transaction end."""

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
_locked = _rows.where(_by_name).with_for_update(of=affinities)
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


class Affinity(NamedTuple):
    """A row. `is_due`: its time is up; `is_dead`: that process is."""

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
        """By process `me`, whose own turns use these names: is nobody at work on it?"""
        if self.incarnation == me or self.state == "bound":
            return self.is_due and self.control_id not in in_use
        return self.is_dead


class Used(msgspec.Struct, frozen=True):
    """What a turn finds under a name, and may do.

    `unbound`: nothing. `bound`: go to `engine`. `opening`: have `engine` open its session first, and say so. `closing`:
    go to `engine`, and end it afterwards. `released`: go there for the last time. `ending`: tell `engine`, then ask
    again. `held`: ask again a little later.
    """

    state: Literal["unbound", "bound", "opening", "closing", "released", "ending", "held"]
    engine: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S


class Moved(msgspec.Struct, frozen=True):
    """The name is bound to the new engine, or its session has to be opened there first (`opening`).

    `left`: the old engine has a session of the name.
    """

    opening: bool
    left: bool


class Ending(msgspec.Struct, frozen=True):
    """The engine is to be told that the session of this name has ended."""

    control_id: str
    engine: str


def due(connection: Connection, lease_s: float) -> Sequence[Affinity]:
    """Rows that may have to be ended."""
    return [_affinity(row) for row in connection.execute(_due, {"lease_s": lease_s})]


def used_last_by(connection: Connection, session_id: str) -> bool:
    """Is there a name that this session was the last to use?"""
    return connection.execute(_of_session, {"sid": session_id, "lease_s": 0.0}).first() is not None


def _found(tx: Tx, control_id: str, lease_s: float) -> Affinity | None:
    """The row, which stays as it is until the transaction ends."""
    row = tx.one(_locked, {"control": control_id, "lease_s": lease_s})
    return None if row is None else _affinity(row)


def _affinity(row: Row) -> Affinity:
    """SQLite knows no booleans."""
    found = Affinity(*row)
    return found._replace(
        worker_session=bool(found.worker_session), is_due=bool(found.is_due), is_dead=bool(found.is_dead)
    )


def _values(row: Affinity) -> dict[str, Any]:
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


def _write(tx: Tx, row: Affinity) -> None:
    tx.run(_update, _values(row))


def _end(tx: Tx, row: Affinity, me: int) -> Ending | None:
    """None where no engine need be told: the row is gone then."""
    if not row.worker_session:
        tx.run(_delete, {"control": row.control_id})
        return None
    _write(tx, row._replace(state="ending", incarnation=me))
    return Ending(row.control_id, row.engine)


class _OfNames(BaseOperation, frozen=True):
    """Of no session in particular: it comes alone. A binding that a power cut takes back is made anew."""

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True

    @property
    def session_id(self) -> str:
        return ""


class Use(_OfNames, frozen=True):
    """A turn of session `used_by` asks for `control`. A new binding goes to `engine`.

    Of the engines, those in `holding` hold sessions of their own. `lease_s` of silence end another process.
    """

    control: SessionControl
    used_by: str
    incarnation: int
    lease_s: float
    engine: str
    holding: frozenset[str]

    def apply(self, tx: Tx) -> Used:
        row = _found(tx, self.control.session_id, self.lease_s)
        match self.control.action:
            case None:
                return self._used(tx, row)
            case "close":
                return self._closed(tx, row)
            case "open" | "bind":
                return self._wanted(tx, row)

    def _used(self, tx: Tx, row: Affinity | None) -> Used:
        if row is not None and row.state == "bound" and not row.is_due:
            return self._become(tx, row, "bound")
        if row is not None and row.state == "opening" and not row.is_dead:
            return Used("held")
        return Used("unbound")

    def _closed(self, tx: Tx, row: Affinity | None) -> Used:
        if row is None or row.state in ("closing", "ending"):
            return Used("unbound")
        if row.state == "opening":
            return self._ended(tx, row) if row.is_dead else Used("held")
        if row.worker_session:
            return self._become(tx, row, "closing")
        tx.run(_delete, {"control": row.control_id})
        return Used("unbound") if row.is_due else Used("released", row.engine)

    def _wanted(self, tx: Tx, row: Affinity | None) -> Used:
        if row is None:
            return self._fresh(tx, None)
        # A session's closing turn has ended when its next one comes; another session's may run for long.
        if row.state in ("opening", "ending") or (row.state == "closing" and row.session_id == self.used_by):
            return self._ended(tx, row) if row.is_dead else Used("held")
        if row.state == "bound" and row.is_due:
            return self._ended(tx, row) if row.worker_session else self._fresh(tx, row)
        if self.control.action == "open" and not row.worker_session and row.engine in self.holding:
            return self._become(tx, row._replace(worker_session=True), "opening")
        return self._become(tx, row, "bound")

    def _fresh(self, tx: Tx, row: Affinity | None) -> Used:
        opens = self.control.action == "open" and self.engine in self.holding
        state: Literal["opening", "bound"] = "opening" if opens else "bound"
        lasts_s = self.control.timeout_s or DEFAULT_TIMEOUT_S
        made = Affinity(
            self.control.session_id, self.engine, state, opens, lasts_s, self.incarnation, self.used_by, False, False
        )
        if row is None:
            tx.run(_insert, _values(made))
        else:
            _write(tx, made)
        return Used(state, self.engine, lasts_s)

    def _become(self, tx: Tx, row: Affinity, state: Literal["opening", "bound", "closing"]) -> Used:
        lasts_s = self.control.timeout_s or row.timeout_s
        changed = row._replace(state=state, timeout_s=lasts_s, incarnation=self.incarnation, session_id=self.used_by)
        _write(tx, changed)
        return Used(state, row.engine, lasts_s)

    def _ended(self, tx: Tx, row: Affinity) -> Used:
        ending = _end(tx, row, self.incarnation)
        return Used("held") if ending is None else Used("ending", ending.engine)


class _OfTurn(_OfNames, frozen=True):
    """By the turn of session `used_by` that has the name at work."""

    control_id: str
    used_by: str
    incarnation: int

    def _own(self, tx: Tx, *states: State) -> Affinity | None:
        """The row, if this turn has brought it into one of these states."""
        row = _found(tx, self.control_id, 0.0)
        return row if row is not None and self._is_own(row, *states) else None

    def _is_own(self, row: Affinity, *states: State) -> bool:
        return row.state in states and (row.incarnation, row.session_id) == (self.incarnation, self.used_by)


class Move(_OfTurn, frozen=True):
    """`engine` cannot be reached: bind the name to another one; None where somebody else has changed it."""

    engine: str
    to: str
    holding: frozenset[str]

    def apply(self, tx: Tx) -> Moved | None:
        row = _found(tx, self.control_id, 0.0)
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


class Opened(_OfTurn, frozen=True):
    """The engine has opened its session, or has none to open (`worker_session` False); False where it is too late."""

    worker_session: bool

    def apply(self, tx: Tx) -> bool:
        row = self._own(tx, "opening")
        if row is not None:
            _write(tx, row._replace(state="bound", worker_session=self.worker_session))
        return row is not None


class End(_OfTurn, frozen=True):
    """The turn is over: what it was opening or closing is ended."""

    def apply(self, tx: Tx) -> Ending | None:
        row = self._own(tx, "opening", "closing")
        return None if row is None else _end(tx, row, self.incarnation)


class NotOpened(_OfTurn, frozen=True):
    """The engine has not opened its session: there is no binding."""

    def apply(self, tx: Tx) -> None:
        if self._own(tx, "opening") is not None:
            tx.run(_delete, {"control": self.control_id})


class Ended(_OfNames, frozen=True):
    """The engine has been told."""

    control_id: str
    incarnation: int

    def apply(self, tx: Tx) -> None:
        row = _found(tx, self.control_id, 0.0)
        if row is not None and row.state == "ending" and row.incarnation == self.incarnation:
            tx.run(_delete, {"control": self.control_id})


class EndDue(_OfNames, frozen=True):
    """What nobody uses any more: expired, or left by a dead process. This process's turns use the names `in_use`."""

    incarnation: int
    lease_s: float
    in_use: frozenset[str]

    def apply(self, tx: Tx) -> list[Ending]:
        candidates = [row for row in map(_affinity, tx.all(_due, {"lease_s": self.lease_s})) if self._may(row)]
        again = (_found(tx, row.control_id, self.lease_s) for row in candidates[:END_AT_ONCE])
        ended = [_end(tx, row, self.incarnation) for row in again if row is not None and self._may(row)]
        return [one for one in ended if one is not None]

    def _may(self, row: Affinity) -> bool:
        return row.may_be_ended(self.incarnation, self.in_use)


class EndOf(_OfNames, frozen=True):
    """A session has been closed, which ends what it used last."""

    used_by: str
    incarnation: int

    def apply(self, tx: Tx) -> list[Ending]:
        candidates = map(_affinity, tx.all(_of_session, {"sid": self.used_by, "lease_s": 0.0}))
        again = (_found(tx, row.control_id, 0.0) for row in candidates)
        ended = [_end(tx, row, self.incarnation) for row in again if row is not None and self._is_its(row)]
        return [one for one in ended if one is not None]

    def _is_its(self, row: Affinity) -> bool:
        return row.state == "bound" and row.session_id == self.used_by


class Slide(_OfNames, frozen=True):
    """Turns that use these names are still running."""

    control_ids: Sequence[str]

    def apply(self, tx: Tx) -> None:
        tx.run_all(_slide, [{"control": control_id} for control_id in sorted(self.control_ids)])
