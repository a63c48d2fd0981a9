"""How many sessions of an export are in memory together."""

from __future__ import annotations

import pytest
from helpers.store import Store

from app.domain.events import EXPORTED
from app.export.pages import ExportPages
from app.store.feed import START


@pytest.mark.anyio
@pytest.mark.parametrize(("images", "parts"), [(False, [5]), (True, [2, 2, 1])])
async def test_few_sessions_are_read_with_their_images(store: Store, images: bool, parts: list[int]) -> None:
    for number in range(5):
        await store.create(f"s{number}")
        await store.take_turn(f"s{number}")
    pages = ExportPages(
        store.database,
        await store.horizon(),
        grouped=False,
        advantages=False,
        replay=False,
        url_s=60,
        images=images,
        columns=(),
        branches="kept",
    )
    found, _ = await pages.following(START, None, None, EXPORTED)
    assert [len(part) for part in found] == parts
