"""How many sessions of an export are in memory together, and which of their content."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from helpers.log import created
from helpers.store import Store, reward

from app.domain.events import ForkRef
from app.export.pages import ExportPages
from app.export.parts import PartRows
from app.export.query import Cursor, ExportQuery
from app.store.feed import END, START
from app.store.log_sessions import Create

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("images", "parts"), [(False, [5]), (True, [2, 2, 1])])
async def test_few_sessions_are_read_with_their_images(store: Store, images: bool, parts: list[int]) -> None:
    for number in range(5):
        await store.create(f"s{number}")
        await store.take_turn(f"s{number}")
    query = ExportQuery(images="inline" if images else "hash")
    pages = ExportPages(store.database, await store.horizon(), query, "kept")
    found, _ = await pages.following(START)
    assert [len(part) for part in found] == parts


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, {"long": [1, 2, 3, 4], "fork": [1], "poor": [1]}),
        ({"shape": "slime"}, {"long": [1, 2, 3, 4], "fork": [], "poor": [1]}),
        ({"shape": "tree"}, {"long": [1, 2, 3, 4], "fork": [1], "poor": [1]}),
        ({"min_reward": 1.0}, {"long": [1, 2, 3, 4], "fork": [], "poor": []}),
        ({"max_seq_len": 5}, {"long": [1], "fork": [1], "poor": [1]}),
        ({"status": "aborted"}, {"long": [], "fork": [], "poor": []}),
    ],
    ids=str,
)
async def test_only_what_rows_need_is_read(store: Store, query: dict[str, Any], expected: dict[str, list[int]]) -> None:
    await store.create("long")
    for turns in range(4):
        await store.take_turn("long", base_tokens=3 * turns, base_messages=2 * turns)
    await store.submit(reward("long", 1.0))
    copied = msgspec.structs.replace(created(), fork=ForkRef("long", 1, 1, False))
    for name, event in (("fork", copied), ("poor", created())):
        await store.submit(Create(name, 1.0, event, None))
        await store.take_turn(name)
    await store.submit(reward("poor", 0.0))
    pages, rows = exported(store, ExportQuery(**query))
    read = await pages.read(await pages.of(list(expected)), rows.plan)
    assert {name: sorted(one.stored.frames) for name, one in read.items()} == expected


def exported(store: Store, query: ExportQuery) -> tuple[ExportPages, PartRows]:
    pages = ExportPages(store.database, END, query, "kept")
    return pages, PartRows(query, Cursor("", START, END), "", "kept", lambda session_id, why: None)
