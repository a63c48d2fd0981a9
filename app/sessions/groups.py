"""Updates the groups table after changes of sessions."""

from __future__ import annotations

from app.errors import StoreDamaged
from app.store import group_reads
from app.store.groups import Settle, SettleGroup
from app.store.ports import Database, Writer

NOTES_AT_ONCE = 100
"""Groups updated in one transaction, which then takes some milliseconds."""


async def settle_groups(database: Database, writer: Writer) -> None:
    """Update all groups whose sessions have changed."""
    more = await database.read(group_reads.has_notes)
    while more:
        try:
            more = await writer.submit(Settle(NOTES_AT_ONCE))
        except StoreDamaged:
            return await _settle_each(database, writer)
    return None


async def _settle_each(database: Database, writer: Writer) -> None:
    """Update each group in a transaction of its own. A group with a session on a damaged page stays as it was."""
    for group_id in await database.read(group_reads.noted):
        try:
            await writer.submit(SettleGroup(group_id))
        except StoreDamaged as error:
            database.unreadable.warn_of_group(group_id, error)
