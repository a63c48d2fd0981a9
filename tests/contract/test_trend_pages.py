"""Sums over time, page by page: each session once, and each page is listed once, however few of its sessions fit."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.store import Store, engines_at

from app.api.page.trends import Trends
from app.sessions.session_list import SessionList, SessionListPage, SessionQuery

pytestmark = pytest.mark.anyio

MAX_TURNS = 3


class CountedList(SessionList):
    """Counts the pages that it was asked for."""

    pages = 0

    async def page(self, *given: Any, **named: Any) -> SessionListPage:
        self.pages += 1
        return await super().page(*given, **named)


async def test_what_does_not_fit_into_a_page_begins_the_next_one(store: Store) -> None:
    turns = {"a": 2, "b": 1, "c": 5, "d": 1, "e": 0, "f": 2, "g": 1}
    for name, count in turns.items():
        await store.create(name)
        for _ in range(count):
            await store.take_turn(name)
    listed = CountedList(store.database, dict, engines_at(), lambda: 0.0)
    trends = Trends(store.database, listed, MAX_TURNS)
    for times, expected in enumerate(([3, 1, 1, 2], [7]), 1):
        before = listed.pages
        pages = [await trends.page(SessionQuery(), "day", None)]
        while pages[-1].cursor is not None:
            pages.append(await trends.page(SessionQuery(), "day", pages[-1].cursor))
        assert [page.scanned for page in pages] == expected, times
        buckets = [bucket for page in pages for bucket in page.buckets]
        assert sum(bucket.sessions for bucket in buckets) == len(turns)
        assert sum(bucket.committed for bucket in buckets) == sum(turns.values())
        assert [page.total for page in pages] == [len(turns), *[None] * (len(pages) - 1)]
        assert listed.pages - before == len(pages)
