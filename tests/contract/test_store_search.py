"""The search index as the store keeps it: pages, one filler, erasures, many shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from helpers.log import BODY, created
from helpers.store import Store
from sqlalchemy import text as sql
from sqlalchemy import update
from sqlalchemy.engine import make_url

from app.domain.events import TurnCommitted
from app.domain.search_query import parse
from app.domain.search_text import MAX_NAME, MAX_TEXT, MAX_TOOLS
from app.sessions import index_reading, indexer
from app.sessions.erasure import forget_words
from app.sessions.index_reading import IndexReader
from app.sessions.indexer import Indexer
from app.sessions.log_end import LogEnd
from app.sessions.log_position import LogPosition
from app.sessions.search import Search
from app.sessions.session_filter import SessionConditions
from app.store import reads
from app.store.dialect import Tx
from app.store.heads_view import HeadFilter
from app.store.log_sessions import Create
from app.store.reads import START
from app.store.schema import search_state
from app.store.search import reading, writing
from app.store.search.reading import FIRST, EntryFilter
from app.store.search.writing import (
    Begin,
    Clear,
    DropEntries,
    Entry,
    IndexPage,
    Marks,
    MergeShard,
    Metadata,
    TakeIndexing,
    TurnEntries,
    dirty_shards,
)

pytestmark = pytest.mark.anyio


def said(session_id: str, turn: int, text: str) -> TurnEntries:
    return TurnEntries(session_id, turn, 1.0, [Entry(0, "user", ("look",), None, None, text)])


async def found(store: Store, q: str, limit: int = 100, before: int = FIRST) -> list[tuple[str, int]]:
    rows = await store.database.read(lambda c: reading.find(c, parse(q), EntryFilter(), HeadFilter(), before, limit))
    return [(row.session_id, row.turn) for row in rows]


async def index(store: Store, changes: Sequence[TurnEntries | Marks], expected: str, position: str) -> bool:
    done: bool = await store.submit(IndexPage(expected, position, changes))
    return done


async def test_a_page_is_written_once_and_only_from_its_place(store: Store) -> None:
    await store.create("s")
    await store.submit(Begin("0"))
    assert await index(store, [said("s", 1, "apples")], "0", "1")
    assert not await index(store, [said("s", 2, "apples")], "0", "1")
    assert await index(store, [said("s", 1, "apples again")], "1", "2")
    assert await found(store, "apples") == [("s", 1)]
    assert (await store.database.read(writing.state)).position == "2"


async def test_a_long_turn_is_written_in_pieces_and_goes_on_after_a_crash(store: Store) -> None:
    """One of 4 MiB had held the writer, and with it every turn, for 0.3 s."""
    entries = [Entry(number, "user", (), None, None, f"apples {number} {'x' * 400}") for number in range(5, 1005)]
    parts = indexer.parts_of([said("s", 1, "pears"), TurnEntries("s", 2, 1.0, entries), said("s", 3, "pears")])
    assert len(parts) > 3
    assert max(sum(len(change.entries) for change in part if isinstance(change, TurnEntries)) for part in parts) < 300
    await store.create("s")
    await store.submit(Begin("0"))
    for part in parts[:2]:
        assert await store.submit(IndexPage("0", "0", part))
    for part in parts:
        assert await store.submit(IndexPage("0", "0", part))
    rows = await store.database.read(
        lambda c: reading.find(c, None, EntryFilter(session_id="s"), HeadFilter(), FIRST, 2000)
    )
    assert [(row.turn, row.message) for row in rows] == [
        (3, 0),
        *((2, number) for number in range(1004, 4, -1)),
        (1, 0),
    ]


async def test_nothing_is_written_of_a_session_that_was_erased_meanwhile(store: Store) -> None:
    for name in ("gone", "kept"):
        await store.create(name)
    await store.submit(Begin("0"))
    await store.close("gone")
    await store.erase("gone")
    assert await index(store, [said("gone", 1, "apples"), said("kept", 1, "apples")], "0", "1")
    assert await found(store, "apples") == [("kept", 1)]


async def test_one_process_fills_the_index(store: Store) -> None:
    assert await store.submit(TakeIndexing("1", 60.0))
    assert not await store.submit(TakeIndexing("2", 60.0))
    assert await store.submit(TakeIndexing("1", 0.0))
    assert await store.submit(TakeIndexing("2", 60.0))


async def test_the_largest_message_fits_the_index(store: Store) -> None:
    """In characters of four bytes, each word and each name another one."""
    wide = "\U00020fff"
    names = [chr(0x20000 + number) + wide * (MAX_NAME - 1) for number in range(MAX_TOOLS)]
    text = " ".join(chr(0x20000 + number) + wide for number in range(MAX_TEXT // 3 + 1))[:MAX_TEXT]
    entry = Entry(0, names[0], tuple(names), names[1], None, text)
    await store.create("s")
    await store.submit(Begin("0"))
    assert await index(store, [TurnEntries("s", 1, 1.0, [entry])], "0", "1")
    wanted = EntryFilter(tool=names[-1], finish_reason=names[1])
    rows = await store.database.read(lambda c: reading.find(c, None, wanted, HeadFilter(), FIRST, 2))
    assert [row.turn for row in rows] == [1]


async def test_marks_and_a_cleared_index(store: Store) -> None:
    await store.create("s")
    await store.submit(Begin("0"))
    await index(store, [said("s", 1, "apples"), said("s", 2, "apples"), said("s", 3, "apples")], "0", "1")
    await index(store, [Marks("s", {1: writing.SUPERSEDED, 2: writing.SET_ASIDE})], "1", "2")
    assert await found(store, "apples") == [("s", 3), ("s", 1)]
    assert await store.submit(Clear(2))
    assert (await store.database.read(writing.state)).position is None
    assert not await store.submit(Clear(2))
    await store.submit(Begin("0"))
    assert await found(store, "apples") == []
    await index(store, [said("s", 1, "pears")], "0", "1")
    assert await found(store, "pears") == [("s", 1)]


async def test_an_index_is_cleared_in_small_steps_and_sessions_are_erased_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step drops more than one of SQLite's full-text tables, which takes some ten milliseconds."""
    monkeypatch.setattr(writing, "SHARD_ENTRIES", 2)
    await store.submit(Begin("0"))
    for number in range(1, 9):
        await store.create(f"s{number}")
        assert await index(store, [said(f"s{number}", 1, "apples")], str(number - 1), str(number))
    tables = sql("SELECT count(*) FROM sqlite_master WHERE name GLOB 'search_fts_?'")
    left = [4]
    more = True
    while more:
        more = await store.submit(Clear(1))
        for name in {1: ("s4",), 2: ("s5", "s8")}.get(len(left), ()):
            await store.close(name)
            await store.erase(name)
        left.append(
            await store.database.read(lambda c: c.execute(tables).scalar_one()) if store.database.is_sqlite else 0
        )
    assert await store.database.read(writing.entry_count) == 0
    assert await found(store, "apples") == []
    assert not await store.submit(MergeShard(1))
    if store.database.is_sqlite:
        assert left[:6] == [4, 3, 2, 1, 0, 0]


async def test_an_index_of_an_earlier_version_is_not_searched(store: Store) -> None:
    """Its full-text tables have other columns, until it has been cleared."""
    await store.create("s")
    await store.submit(Begin("0"))
    assert await index(store, [said("s", 1, "apples")], "0", "1")

    def as_earlier(tx: Tx) -> None:
        tx.run(update(search_state).where(search_state.c.key == "version").values(value="1"), {})
        if store.database.is_sqlite:
            tx.run(sql("DROP TABLE search_fts_1"), {})
            tx.run(sql("CREATE VIRTUAL TABLE search_fts_1 USING fts5(text, content='search_entries')"), {})

    await store.database.write(as_earlier, durable=False)
    search = Search(store.database, LogEnd(store.database, poll_s=0.0), lambda _: None)
    found = await search.page("apples", EntryFilter(role="user"), SessionConditions(), None, 10)
    assert (found.hits, found.next_cursor, found.is_current) == ([], None, False)


async def test_an_erasure_leaves_no_word_in_any_shard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the erased session lie between those of others, in three shards."""
    monkeypatch.setattr(writing, "SHARD_ENTRIES", 200)
    monkeypatch.setattr(writing, "MERGED_PAGES", 2)
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9))) for _ in range(2000)]
    names = [f"s{number}" for number in range(10)]
    for name in names:
        await store.create(name)
    await store.submit(Begin("0"))
    for turn in range(1, 61):
        page = [said(name, turn, f"{name}-secret-{turn}q " + " ".join(chance.choices(words, k=20))) for name in names]
        assert await index(store, page, str(turn - 1), str(turn))
    assert await found(store, '"s3 secret"') == [("s3", turn) for turn in range(60, 0, -1)]
    rows = await store.database.read(
        lambda c: reading.find(c, parse("secret"), EntryFilter(session_id="s3"), HeadFilter(), FIRST, 50)
    )
    assert await found(store, '"s3 secret"', before=rows[-1].id) == [("s3", turn) for turn in range(10, 0, -1)]
    unique = [f"{turn}q".encode() for turn in range(1, 61)]
    await store.close("s3")
    assert await store.submit(DropEntries("s3", 40))
    await store.erase("s3")
    assert await found(store, '"s3 secret"') == []
    assert await found(store, '"s4 secret"') == [("s4", turn) for turn in range(60, 0, -1)]
    if not store.database.is_sqlite:
        return
    assert await store.database.read(dirty_shards) == [1, 2, 3]
    for name in names:
        if name != "s3":
            await store.close(name)
            await store.erase(name)
    await forget_words(store.database, store.writer)
    assert await store.database.read(dirty_shards) == []
    await store.database.empty_log_file()
    path = make_url(store.database.url).database
    assert path is not None
    with open(path, "rb") as file:
        whole = file.read()
    assert [
        word for word in (b"secret", *unique, *(word.encode() for word in words if len(word) > 6)) if word in whole
    ] == []


@pytest.mark.parametrize("steps", [1, 2])
async def test_what_is_erased_during_a_merge_leaves_no_word_either(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The merge that another erasure has begun does not have it, and had called the shard clean."""
    monkeypatch.setattr(writing, "MERGED_PAGES", 2)
    chance, store = random.Random(1), sqlite_store
    words = {name: [chance.randbytes(5).hex() for _ in range(600)] for name in ("first", "second", "kept")}
    await store.submit(Begin("0"))
    for name in words:
        await store.create(name)
    for turn in range(30):
        page = [said(name, turn, " ".join(words[name][20 * turn : 20 * turn + 20])) for name in words]
        assert await index(store, page, str(turn), str(turn + 1))
    await store.close("first")
    await store.close("second")
    await store.erase("first")
    for _ in range(steps):
        assert await store.submit(MergeShard(1))
    await store.erase("second")
    while await store.submit(MergeShard(1)):
        pass
    await forget_words(store.database, store.writer)
    await store.database.empty_log_file()
    path = make_url(store.database.url).database
    assert path is not None
    whole = Path(path).read_bytes()
    left = {name: sum(word.encode() in whole for word in of_session) for name, of_session in words.items()}
    assert left == {"first": 0, "second": 0, "kept": 600}


LIMITS: dict[str, dict[str, int]] = {
    "as they are": {},
    "no session is one of few": {"FEW_SESSIONS": 0, "NEWEST_ENTRIES": 5},
    "all sessions are few": {"FEW_SESSIONS": 100, "NEWEST_ENTRIES": 0},
    "their entries are too many": {"FEW_ENTRIES": 3, "NEWEST_ENTRIES": 50},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
async def test_each_way_finds_what_matches(
    store: Store, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Every combination of a query and conditions finds what a look at each entry finds, newest first, by pages."""
    monkeypatch.setattr(writing, "SHARD_ENTRIES", 40)
    for name, value in limits.items():
        monkeypatch.setattr(reading, name, value)
    chance = random.Random(1)
    groups = {f"s{number}": f"g{number % 3}" for number in range(6)}
    for name, group in groups.items():
        await store.submit(Create(name, 1.0, created(), BODY, group, None))
    await store.submit(Begin("0"))
    every: list[tuple[str, int, Entry]] = []
    for number in range(1, 151):
        session_id = chance.choice(list(groups))
        tools = tuple(chance.sample(["look", "re-ad", "mcp.x__y", "'quo\\ted'", "工具"], chance.randint(0, 2)))
        text = " ".join(chance.choices(["apples", "pears", "plums", "tool", "look"], [8, 4, 1, 1, 1], k=3))
        entry = Entry(
            number, chance.choice(["user", "tool"]), tools, chance.choice([None, "stop", "tool_calls"]), None, text
        )
        every.append((session_id, number, entry))
    for at in range(0, len(every), 15):
        page = [TurnEntries(name, number, 1.0, [entry]) for name, number, entry in every[at : at + 15]]
        assert await index(store, page, str(at), str(at + 15))
    await index(store, [Metadata(name, ["odd=1"]) for name in ("s1", "s3")], "150", "151")

    conditions: list[tuple[EntryFilter, Callable[[str, Entry], bool]]] = [
        (EntryFilter(), lambda _, entry: True),
        (EntryFilter(role="tool"), lambda _, entry: entry.role == "tool"),
        *[
            (EntryFilter(tool=tool), lambda _, entry, tool=tool: tool in entry.tools)
            for tool in ("look", "ad", "re-ad", "mcp.x__y", "'quo\\ted'", "工具", "-")
        ],
        (
            EntryFilter(role="user", finish_reason="tool_calls"),
            lambda _, e: (e.role, e.finish_reason) == ("user", "tool_calls"),
        ),
        (EntryFilter(session_id="s4"), lambda name, _: name == "s4"),
        (EntryFilter(pair="odd=1", tool="look"), lambda name, e: name in ("s1", "s3") and "look" in e.tools),
    ]
    for wanted, is_wanted in conditions:
        for heads, group in ((HeadFilter(), None), (HeadFilter(group_id="g1"), "g1")):
            for q, words in ((None, ()), ("apples", ("apples",)), ("plums look", ("plums", "look"))):
                expected = [
                    (name, turn)
                    for name, turn, entry in reversed(every)
                    if is_wanted(name, entry)
                    and group in (None, groups[name])
                    and all(word in entry.text.split() for word in words)
                ]
                query = None if q is None else parse(q)
                pages: list[tuple[str, int]] = []
                before = FIRST
                while True:
                    rows = await store.database.read(lambda c: reading.find(c, query, wanted, heads, before, 25))  # noqa: B023
                    pages += [(row.session_id, row.turn) for row in rows]
                    if len(rows) < 25:
                        break
                    before = rows[-1].id
                assert pages == expected, (wanted, heads, q)


async def test_only_so_much_content_is_read_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of turns with images had been in memory at once: half a gigabyte, or more."""
    monkeypatch.setattr(index_reading, "CONTENT_BYTES", 3_000)
    chance = random.Random(1)
    for number, size in enumerate([100, 1_000, 900, 1_000, 9_000, 100, 100, 1_800]):
        await store.create(f"s{number}")
        said = msgspec.json.encode({"role": "user", "content": f"apples {chance.randbytes(size).hex()}"})
        await store.take_turn(f"s{number}", text=said)
    end = LogEnd(store.database, poll_s=0.0)
    filler = Indexer(store.database, store.writer, end, lambda: store.me)
    reader = IndexReader(store.database)
    events, _ = await reader.events(
        LogPosition(await store.database.read(reads.log_epoch), START), await end.present()
    ) or ((), 0)
    groups = await reader.groups(events)
    assert [one for group in groups for one in group] == events
    turns = [{session_id for session_id, one in group if isinstance(one.event, TurnCommitted)} for group in groups]
    assert turns == [{"s0", "s1", "s2"}, {"s3"}, {"s4"}, {"s5", "s6", "s7"}]
    await filler.catch_up()
    assert len(await found(store, "apples")) == 2 * 8
