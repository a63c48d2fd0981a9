"""The drill of damage: a session whose log cannot be read is erased, and nothing is lost that need not be."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import LargeBinary, bindparam, select, update

from app.domain.events import RewardAssigned, SessionConfig, TurnCommitted, encode
from app.store.log_sessions import UNREADABLE
from app.store.schema import events
from tests.tools.simulation.client import TRIES, Client
from tests.tools.simulation.store import MemoryStore

_damage = (
    update(events)
    .where(events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place"))
    .values(data=bindparam("left", type_=LargeBinary))
)


class DamagedClient(Client):
    """Has a session of a turn, with a reward whose components say whose they are."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1))
        await self.turn()
        await self.insist(self._reward_with_components, TRIES)
        await self.close()
        said = f"\xffof-{self.session_id}-1".encode()
        log = self._world.store.log(self.session_id)
        damaged = {one.seq: one.event for one in log if isinstance(one.event, RewardAssigned | TurnCommitted)}
        before = self._data()
        self._write(dict.fromkeys(damaged, said))
        await self.insist(self._erase, TRIES)
        after = self._data()
        for seq, event in damaged.items():
            left = UNREADABLE if isinstance(event, RewardAssigned) else said
            self._world.must(after[seq] == left, f"{self.session_id}: the erasure has left {after[seq]!r} of {event}")
        erased = {
            seq: encode(msgspec.structs.replace(event, components={}, components_erased=True))
            for seq, event in damaged.items()
            if isinstance(event, RewardAssigned)
        }
        self._write({seq: erased.get(seq, before[seq]) for seq in damaged})  # For whoever reads it afterwards.

    async def _reward_with_components(self) -> None:
        process = self._process()
        assign = process.service.sessions.assign_reward
        await process.call(lambda: assign(self.session_id, 0.5, {f"of-{self.session_id}-1": 1.0}, None), lambda _: None)

    def _data(self) -> Mapping[int, bytes]:
        query = select(events.c.seq, events.c.data).where(events.c.session_id == self.session_id)
        return {row[0]: row[1] for row in self._world.store.read(lambda connection: connection.execute(query).all())}

    def _write(self, data: Mapping[int, bytes]) -> None:
        store = self._world.store
        assert isinstance(store, MemoryStore)
        rows = [{"sid": self.session_id, "place": seq, "left": left} for seq, left in data.items()]
        store.transact(lambda tx: tx.run_all(_damage, rows), durable=True)
