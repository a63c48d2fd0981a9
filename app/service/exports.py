"""Exports, as the routes and the feed ask for them: what makes rows is imported with the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.service.exported import Exported
from app.service.filters import Wish
from app.service.later import Later
from app.store.engine import Database

if TYPE_CHECKING:
    from app.export.row import Fields
    from app.service.export import Export, Exporter


class Exports:
    """`release` is this version's; `exported` counts."""

    def __init__(self, database: Database, release: str) -> None:
        self.release = release
        self.exported = Exported()
        self._database = database
        self._exporter = Later("app.service.export", self._make)

    def _make(self) -> Exporter:
        from app.service.export import Exporter

        return Exporter(self._database, self.release, exported=self.exported)

    async def start(self, wish: Wish, cursor: str | None) -> Export:
        """As `Exporter.start`."""
        return await (await self._exporter()).start(wish, cursor)

    async def rows(self, session_ids: Sequence[str], wish: Wish) -> list[Fields]:
        """As `Exporter.rows`."""
        return await (await self._exporter()).rows(session_ids, wish)
