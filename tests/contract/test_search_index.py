"""The search's index by itself, on both databases: what is found in it, and what is not written."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from helpers.store import Store

from app.errors import StoreUnavailable
from app.features.search import index as sqlite_index
from app.features.search import index_file
from app.features.search.index import FIRST, Index, Message, Page, SqliteIndex, Wanted
from app.features.search.postgres import PostgresIndex
from app.features.search.query import parse

pytestmark = pytest.mark.anyio


@pytest.fixture
async def index(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Index]:
    monkeypatch.setattr(sqlite_index, "SHARD", 3)
    made: Index = (
        SqliteIndex(store.database)
        if store.database.is_sqlite
        else PostgresIndex(store.database, store.writer, lambda: store.me, 8.0)
    )
    await made.open()
    yield made
    await made.close()


def said(session_id: str, turn: int, text: str) -> Message:
    return Message(0, session_id, turn, 0, 1.0, "user", "\nlook\n", None, text)


async def fill(index: Index, page: Page) -> None:
    fence = await index.take_lease()
    assert fence is not None
    await index.write(page, fence)


async def found(index: Index, q: str, *, session_ids: list[str] | None = None, before: int = FIRST) -> list[int]:
    rows = await index.find(Wanted(parse(q), None, "look", None, session_ids, before, 100))
    return [row.turn for row in rows]


async def test_messages_are_found_newest_first_in_all_or_few_sessions(store: Store, index: Index) -> None:
    for name in "ab":
        await store.create(name)
    messages = [said("ab"[turn % 2], turn, f"a word number{turn}") for turn in range(1, 11)]
    await fill(index, Page("p1", messages))
    assert await found(index, "word") == list(range(10, 0, -1))
    assert await found(index, "word -number4 -number5", session_ids=["a"]) == [10, 8, 6, 2]
    rows = await index.find(Wanted(parse('"a word" number7 OR number3'), "user", None, None, None, FIRST, 100))
    assert [row.turn for row in rows] == [7, 3]
    assert await found(index, "word", before=rows[0].id) == list(range(6, 0, -1))
    assert len(await index.find(Wanted(parse("word"), None, None, None, None, FIRST, 4))) == 4
    assert await index.find(Wanted(None, None, None, "stop", None, FIRST, 4)) == []
    await fill(index, Page("p2", live={"a": {2, 4}}))
    assert await found(index, "word", session_ids=["a"]) == [4, 2]
    assert await index.position() == "p2"
    await index.clear()
    assert (await index.position(), await found(index, "word")) == (None, [])


async def test_nothing_is_written_of_a_session_that_was_erased_meanwhile(store: Store, index: Index) -> None:
    for name in "ab":
        await store.create(name)
        await store.close(name)
    page = Page("p1", [said("a", 1, "a word"), said("b", 2, "a word")])  # read, then erased, then written
    await store.erase("a")
    await fill(index, page)
    assert await found(index, "word") == [2]
    await store.erase("b")
    await fill(index, Page("p2", erased={"b"}))
    assert await found(index, "word") == []


async def test_a_forgotten_session_leaves_the_others(store: Store, index: Index) -> None:
    for name in "ab":
        await store.create(name)
    await fill(index, Page("p1", [said("ab"[turn % 2], turn, f"word canary{turn}") for turn in range(1, 11)]))
    await index.forget("a")
    await index.forget("nobody")
    assert await found(index, "word") == [9, 7, 5, 3, 1]
    assert await found(index, "canary4 OR canary5") == [5]
    if isinstance(index, SqliteIndex):
        file = index_file(store.database)
        contents = b"".join(path.read_bytes() for path in file.parent.glob(f"{file.name}*"))
        assert (b"canary4" in contents, b"canary5" in contents) == (False, True)


async def test_an_index_that_cannot_be_made_is_the_stores_error(sqlite_store: Store) -> None:
    """The server starts all the same, and the follower tries again."""
    file = index_file(sqlite_store.database)
    file.symlink_to(file)
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        await SqliteIndex(sqlite_store.database).open()
