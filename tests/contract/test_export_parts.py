"""How many sessions of an export are in memory together."""

from __future__ import annotations

import pytest
from helpers.store import Store

from app.export.pages import ExportPages
from app.export.query import ExportQuery
from app.store.feed import START


@pytest.mark.anyio
@pytest.mark.parametrize(("images", "parts"), [(False, [5]), (True, [2, 2, 1])])
async def test_few_sessions_are_read_with_their_images(store: Store, images: bool, parts: list[int]) -> None:
    for number in range(5):
        await store.create(f"s{number}")
        await store.take_turn(f"s{number}")
    query = ExportQuery(images="inline" if images else "hash")
    pages = ExportPages(store.database, await store.horizon(), query, "kept")
    found, _ = await pages.following(START)
    assert [len(part) for part in found] == parts
