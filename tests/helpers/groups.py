"""Shorthands over a store for groups of sessions: make them, settle, lease, acknowledge."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from app.domain.events import DEFAULT_RUN
from app.domain.groups import GroupKey
from app.features.groups import reads as group_reads
from app.features.groups.groups import settle_groups
from app.features.groups.operations import Acknowledge, Acknowledged, Lease, Leased
from app.features.groups.reads import Candidate
from app.features.groups.rules import Attempt
from app.features.groups.schema import groups
from app.store.dialect import now
from app.store.log import Appended
from app.store.log_sessions import Create
from app.store.selection import GroupFilter
from helpers.databases import connected
from helpers.log import created
from helpers.store import Store, reward

FIRST = (-1.0, "", "")


class Groups:
    """Shorthands over a store, for one group at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def create(
        self, group_id: str | None, session_id: str, attempt: int | None = None, at: float = 1.0, **given: Any
    ) -> None:
        event = created(group_id=group_id, attempt=attempt, **given)
        outcome = await self.store.submit(Create(session_id, at, event, None))
        assert isinstance(outcome, Appended)

    async def finish(self, session_id: str, value: float = 1.0) -> None:
        await self.store.submit(reward(session_id, value))
        await self.store.close(session_id)

    async def complete(self, group_id: str, size: int = 2, run: str | None = None) -> None:
        """A group of finished sessions `<group>-<n>`, in a run `<run>-<group>-<n>`."""
        for number in range(size):
            name = "-".join([*filter(None, [run]), group_id, str(number)])
            await self.create(group_id, name, number, run=run)
            await self.finish(name, float(number))

    async def settle_groups(self) -> None:
        await settle_groups(self.store.database, self.store.writer)

    async def row(self, group_id: str, run: str = DEFAULT_RUN) -> Any:
        await self.settle_groups()
        query = select(groups).where(groups.c.run == run, groups.c.group_id == group_id)
        return await self.store.database.read(lambda c: c.execute(query).one_or_none())

    async def attempts(self, group_id: str, run: str = DEFAULT_RUN) -> list[Attempt]:
        key = GroupKey(run, group_id)
        return (await self.store.database.read(lambda c: group_reads.attempts(c, [key])))[key]

    async def counts(self, group_id: str) -> tuple[int, int, int, bool]:
        """How many sessions are there, erased, unfinished; is it complete?"""
        row = await self.row(group_id)
        return row.sessions, row.erased, row.unfinished, row.completed_at is not None

    async def candidates(self, held_by: str | None = None, run: str | None = None, **given: Any) -> list[Candidate]:
        await self.settle_groups()
        wish = {"wanted": GroupFilter(run=run), "attempts": 1, "oldest": None, "after": FIRST, "limit": 100, **given}
        return await self.store.database.read(lambda c: group_reads.candidates(c, held_by=held_by, **wish))

    async def free(self, **given: Any) -> list[str]:
        return [one.group_id for one in await self.candidates(**given)]

    async def lease(
        self, consumer: str, wanted: list[Candidate], lease_s: float = 60.0, own_too: bool = True
    ) -> list[Leased]:
        leased: list[Leased] = await self.store.submit(Lease(consumer, lease_s, own_too, wanted))
        return leased

    async def take(self, consumer: str, size: int = 1, lease_s: float = 60.0) -> list[str]:
        """The next free groups."""
        return [one.key.group_id for one in await self.lease(consumer, await self.candidates(limit=size), lease_s)]

    async def ack(self, consumer: str, *group_ids: str, run: str = DEFAULT_RUN) -> Acknowledged:
        outcome: Acknowledged = await self.store.submit(Acknowledge(consumer, run, group_ids))
        return outcome

    async def expire(self, *group_ids: str) -> None:
        """As if the leases had ended a second ago."""
        over = update(groups).where(groups.c.group_id.in_(group_ids)).values(lease_until=now() - 1.0)
        async with connected(self.store.database.url, writes=True) as connection:
            await connection.execute(over)
