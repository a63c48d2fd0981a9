"""What an erasure removes from the log: the components of rewards, names and values, and notes with their tags.

Only they can hold a client's text in an event. The rows keep their places in both orders, so that readers find no gap;
each event says that something is missing. Components go in steps, because there may be megabytes of them. Notes go with
the session's own row, which shows the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from sqlalchemy import Connection, bindparam, select, update

from app.domain.events import Event, RewardAssigned, SessionNoted, UnknownEvent, decode, encode
from app.store import pins
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import BaseOperation
from app.store.schema import events

REWARD = RewardAssigned.__name__
NOTE = SessionNoted.__name__

UNREADABLE = b""
"""Replaces an event that is damaged or of a newer release, since nobody can say which parts may stay. It still counts
as unreadable."""

_rewards = (
    select(events.c.seq, events.c.version, events.c.data)
    .where(
        events.c.session_id == bindparam("sid"),
        events.c.seq > bindparam("after"),
        events.c.type == REWARD,
    )
    .order_by(events.c.seq)
)
_some_rewards = _rewards.limit(bindparam("most"))
_rewrite = (
    update(events)
    .where(events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place"))
    .values(version=RewardAssigned.VERSION, data=bindparam("left"))
)
_empty_notes = (
    update(events)
    .where(events.c.session_id == bindparam("sid"), events.c.type == NOTE)
    .values(version=SessionNoted.VERSION, data=encode(SessionNoted(erased=True)))
)


class RewardRow(NamedTuple):
    """A stored reward, not yet decoded."""

    seq: int
    version: int
    data: bytes


class Rewritten(NamedTuple):
    """The new content of event `seq`."""

    seq: int
    data: bytes


def reward_rows(connection: Connection, session_id: str, after: int, most: int) -> list[RewardRow]:
    """Up to `most` of a session's rewards after event `after`, in order."""
    found = connection.execute(_some_rewards, {"sid": session_id, "after": after, "most": most})
    return [RewardRow(*row) for row in found]


def without_components(rows: Iterable[RewardRow]) -> list[Rewritten]:
    """The rewards that have components, without them."""
    found: list[Rewritten] = []
    for row in rows:
        try:
            event = decode(REWARD, row.version, row.data)
        except UnknownEvent:
            if row.data != UNREADABLE:
                found.append(Rewritten(row.seq, UNREADABLE))
            continue
        if isinstance(event, RewardAssigned) and event.components:
            left = msgspec.structs.replace(event, components={}, components_erased=True)
            found.append(Rewritten(row.seq, encode(left)))
    return found


class EraseComponents(BaseOperation, frozen=True):
    """Rewrite rewards of a session that is being erased. `freed` is their size in bytes. `unless_pinned`: nothing is
    written if a checkpoint has the session."""

    durable: ClassVar[bool] = False
    session_id: str
    rewritten: Sequence[Rewritten]
    freed: int
    unless_pinned: bool = False

    @property
    def size(self) -> int:
        return self.freed

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if self.unless_pinned and pins.pinned_upto(tx, self.session_id):
            return False
        if head is None or head[1] == "open":
            return False
        rewrite(tx, self.session_id, self.rewritten)
        return True


def erase_remaining(tx: Tx, session_id: str, after: int) -> None:
    """Remove components of rewards assigned after event `after`, and all notes, in the transaction that erases the
    session, so that none can come between. They are few."""
    found = tx.all(_rewards, {"sid": session_id, "after": after})
    rewrite(tx, session_id, without_components(RewardRow(*row) for row in found))
    tx.run(_empty_notes, {"sid": session_id})


def has_text(event: Event) -> bool:
    """Does the event hold what an erasure removes?"""
    match event:
        case RewardAssigned():
            return bool(event.components)
        case SessionNoted():
            return event.note is not None or event.tags is not None
        case _:
            return False


def rewrite(tx: Tx, session_id: str, rewritten: Sequence[Rewritten]) -> None:
    tx.run_all(_rewrite, [{"sid": session_id, "place": one.seq, "left": one.data} for one in rewritten])
