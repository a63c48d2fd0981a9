"""Exports for the routes and the feed; the modules that make rows are imported at the first export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.export.metrics import ExportMetrics
from app.export.query import ExportQuery
from app.lazy_import import LazyImport
from app.store.engine import Database

if TYPE_CHECKING:
    from app.export.exporter import Export, Exporter
    from app.export.row import Fields


class Exports:
    """`release` is Turnlog's version; `exported` are the metrics."""

    def __init__(self, database: Database, release: str) -> None:
        self.release = release
        self.exported = ExportMetrics()
        self._database = database
        self._exporter = LazyImport("app.export.exporter", self._make)

    def _make(self) -> Exporter:
        from app.export.exporter import Exporter

        return Exporter(self._database, self.release, exported=self.exported)

    async def start(self, query: ExportQuery, cursor: str | None) -> Export:
        return await (await self._exporter()).start(query, cursor)

    async def rows(self, session_ids: Sequence[str], query: ExportQuery) -> list[Fields]:
        return await (await self._exporter()).rows(session_ids, query)
