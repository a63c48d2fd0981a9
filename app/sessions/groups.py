"""Groups brought up to date with what their sessions became."""

from __future__ import annotations

from app.errors import StoreDamaged
from app.store import group_reads
from app.store.groups import Settle, SettleGroup
from app.store.ports import Database, Writer

NOTES_AT_ONCE = 100
"""Changed groups brought up to date in one transaction: some milliseconds."""


async def settle_groups(database: Database, writer: Writer) -> None:
    """Bring the groups up to date with all sessions' changes that are on disk by now."""
    more = await database.read(group_reads.has_notes)
    while more:
        try:
            more = await writer.submit(Settle(NOTES_AT_ONCE))
        except StoreDamaged:
            return await _settle_each(database, writer)
    return None


async def _settle_each(database: Database, writer: Writer) -> None:
    """Each group by itself: one with a session whose head is on a damaged page stays as it was, with its notes."""
    for group_id in await database.read(group_reads.noted):
        try:
            await writer.submit(SettleGroup(group_id))
        except StoreDamaged as error:
            database.unreadable.warn_of_group(group_id, error)
