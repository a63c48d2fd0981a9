"""Exports of stores in which one thing is damaged, filtered out or erased: said of its session, and of no other."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from helpers.databases import read_engine
from helpers.log import created, float64, int32
from helpers.store import Store, reward
from sqlalchemy import Table, delete, event, update

from app.domain.events import BlobRef
from app.domain.samples import Sample
from app.export import formats
from app.export.exporter import Exporter
from app.export.formats import CONTAINERS, DEFAULT, DOCUMENTS, SHAPES
from app.export.query import ExportQuery
from app.export.row import Fields, Source
from app.export.rows import SessionRows
from app.export.shapes import shared
from app.features.groups.feed import Feed, FeedQuery
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.log import StoredBlob
from app.store.log_sessions import Create
from app.store.schema import blobs, events, sessions
from integration.reading import Row, read
from workers import codec
from workers.codec import Exchange, StoredTokens

pytestmark = pytest.mark.anyio

PARAMS = b'{"model":"m","temperature":1.0}'
SAID = b'{"role":"assistant","content":"a"}'
HASH = codec.content_hash(
    codec.pack(StoredTokens(int32([1]), int32([2, 3]), float64([-0.5, -1.5]))),
    codec.pack(Exchange(messages=[SAID], message=SAID, reply=SAID, headers=[])),
)
"""Of what `Store.take_turn` stores: one prompt token and two sampled ones."""


async def add(
    store: Store, session_id: str, group_id: str | None = None, value: float | None = None, **fields: Any
) -> None:
    """A session of one turn, closed; `fields` are of its TurnCommitted."""
    await store.submit(Create(session_id, 1.0, created(group_id=group_id), None))
    ref = BlobRef(0, "params", len(PARAMS), "h" * 64)
    stored = StoredBlob(0, "params", len(PARAMS), "h" * 64, codec.compress(PARAMS))
    await store.take_turn(session_id, text=SAID, content_hash=HASH, new_blobs=(ref,), blobs=[stored], **fields)
    if value is not None:
        await store.submit(reward(session_id, value))
        await store.close(session_id)


async def segment(store: Store, session_id: str, **fields: Any) -> None:
    """A second turn that begins a segment."""
    drift = {"segment": 1, "segment_cause": "drift", "base_messages": 2}
    await store.take_turn(session_id, text=SAID, content_hash=HASH, **drift, **fields)


async def damage(store: Store, table: Table, *where: Any, **values: Any) -> None:
    """Change rows behind the server's back; without `values` they are gone."""
    change: Any = update(table).where(*where).values(**values) if values else delete(table).where(*where)
    await store.database.write(lambda tx: tx.run(change, {}), durable=True)


async def rows_of(store: Store, wish: ExportQuery, cursor: str | None = None) -> list[Row]:
    started = await Exporter(store.database, "test").start(wish, cursor)
    return read(wish.format, b"".join([piece async for piece in started.pieces]))


async def handed_out(store: Store, shape: str) -> dict[str, Row]:
    """The feed's groups, given to the same consumer each time."""
    exporter = Exporter(store.database, "test")
    feed = Feed(store.database, store.writer, exporter)
    lines = b"".join(
        [piece async for piece in await feed.hand_out(FeedQuery(consumer="trainer", size=9, lease_s=60.0, shape=shape))]
    )
    return {line["group_id"]: line for line in map(json.loads, lines.splitlines())}


def excluded(rows: list[Row]) -> dict[str, str]:
    return {row["session_id"]: row["excluded"] for row in rows if "excluded" in row}


async def test_a_reward_that_cannot_be_read_leaves_out_its_session_alone(store: Store) -> None:
    for name, value in (("a", 0.0), ("bad", 5.0), ("c", 1.0)):
        await add(store, name, "g", value)
    await add(store, "alone", "h", 1.0)
    await damage(store, events, events.c.session_id == "bad", events.c.type == "RewardAssigned", data=b"{")
    rows = await rows_of(store, ExportQuery(advantage="grpo", explain=True))
    assert excluded(rows).keys() == {"bad"}
    assert excluded(rows)["bad"].startswith("unreadable: ")
    told = {row["session_id"]: row["advantage"] for row in rows if "excluded" not in row}
    assert (told["a"], told["c"]) == pytest.approx((-(0.5**0.5), 0.5**0.5), abs=1e-5), "of the others' rewards"
    rows = await rows_of(store, ExportQuery(shape="atropos", advantage="grpo", explain=True))
    assert [row["session_ids"] for row in rows if "excluded" not in row] == [["alone"]]
    assert excluded(rows).keys() == {"bad", "c"}, "the session, and at its last one's place the group"
    for shape in ("turnlog", "atropos"):
        lines = await handed_out(store, shape)
        assert (lines.keys(), len(lines["h"]["rows"])) == ({"g", "h"}, 1)
        assert "bad" in {one["session_id"] for one in lines["g"]["excluded"]}


FORMS = [
    *(("ndjson", shape) for shape in SHAPES),
    *((format, shape) for format in CONTAINERS if format != "ndjson" for shape in ("turnlog", "slime", "atropos")),
    *((format, DEFAULT) for format in DOCUMENTS),
]

STORED = {
    "1e999": b'{"temperature":1e999,"top_k":1e999,"top_p":-1e999,"min_p":1e999,"seed":1e999}',
    "past-64-bits": b'{"temperature":18446744073709551616,"top_k":-9223372036854775809,"top_p":%s}' % (b"1" * 400),
    "no-number": b'{"temperature":true,"top_k":"1","top_p":"x","min_p":[]}',
    "no-text": b'{"top_p":"\\ud800"}',
    "no-json": b"{",
    "no-object": b"[]",
}


async def test_stored_parameters_that_no_row_holds_are_null_or_leave_out_their_session(sqlite_store: Store) -> None:
    for name, params in STORED.items():
        await add(sqlite_store, name, name, 1.0)
        await damage(sqlite_store, blobs, blobs.c.session_id == name, data=codec.compress(params))
    await add(sqlite_store, "good", "h", 0.5)
    for format, shape in FORMS:
        await whole(sqlite_store, format, shape, len(STORED))
    rows = {row["session_id"]: row for row in await rows_of(sqlite_store, ExportQuery(explain=True))}
    assert {name for name, row in rows.items() if "excluded" in row} == {"no-text", "no-json", "no-object"}
    for name in ("1e999", "past-64-bits", "no-number"):
        assert {rows[name]["sampling"][0][param] for param in ("temperature", "top_k", "top_p", "min_p")} == {None}


async def whole(store: Store, format: str, shape: str, others: int = 1) -> None:
    """`good` is in the export and in the feed; so is each of the others, or left out with a reason."""
    wish = ExportQuery(format=format, shape=shape)
    explained = await rows_of(store, wish.model_copy(update={"explain": True}))
    reasons = [row["excluded"] for row in explained if row.get("excluded") is not None]
    assert len(explained) == others + 1, (format, shape, explained)
    assert "secret" not in "".join(reasons)
    assert len(await rows_of(store, wish)) == others + 1 - len(reasons) > 0, (format, shape)
    if format == "ndjson":
        lines = await handed_out(store, shape)
        assert (len(lines), len(lines["h"]["rows"])) == (others + 1, 1), shape
        assert all(len(line["rows"]) + len(line["excluded"]) == 1 for line in lines.values()), shape


async def test_a_fault_that_nobody_has_thought_of_is_its_sessions_business(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a row is made, or written; the reason has nothing of the error's text."""
    await add(sqlite_store, "bad", "g", 1.0)
    await add(sqlite_store, "good", "h", 0.5)
    source, of_row, of_group = SessionRows._source, formats.of_row, formats.of_group

    def failing(made: SessionRows, sample: Sample) -> Source:
        if made.session.session_id == "bad":
            raise LookupError("secret")
        return source(made, sample)

    def unwritable(fields: Fields) -> Fields:
        is_bad = shared.identity_of(fields)["session_id"] == "bad"
        return {**fields, "secret": object()} if is_bad else fields

    with monkeypatch.context() as patched:
        patched.setattr(SessionRows, "_source", failing)
        for format, shape in FORMS:
            await whole(sqlite_store, format, shape)
        [told, _] = await rows_of(sqlite_store, ExportQuery(explain=True))
        assert told["excluded"] == "unreadable: LookupError in failing"
    monkeypatch.setattr(formats, "of_row", lambda *given: unwritable(of_row(*given)))
    monkeypatch.setattr(formats, "of_group", lambda *given: unwritable(of_group(*given)))
    for format, shape in FORMS:
        await whole(sqlite_store, format, shape)
    [told, _] = await rows_of(sqlite_store, ExportQuery(explain=True))
    assert (told["session_id"], told["segment"]) == ("bad", 0)


async def test_a_stored_reward_beyond_32_bits_is_no_row_where_a_trainer_needs_them(sqlite_store: Store) -> None:
    await add(sqlite_store, "bad", "g", -1e39)
    await add(sqlite_store, "good", "h", 3e38)
    for format in CONTAINERS:
        rows = await rows_of(sqlite_store, ExportQuery(format=format, shape="areal", explain=True))
        told = {row["session_id"]: row.get("excluded") for row in rows}
        assert told == {"bad": "the reward is beyond a float32", "good": None}
    assert [row["reward"] for row in await rows_of(sqlite_store, ExportQuery())] == [-1e39, 3e38]


async def test_a_time_that_no_calendar_has_is_a_reason(sqlite_store: Store) -> None:
    await add(sqlite_store, "bad", requested_at=1e308)
    await add(sqlite_store, "good")
    rows = await rows_of(sqlite_store, ExportQuery(format="atif", explain=True))
    assert (excluded(rows), len(rows)) == ({"bad": "a time of it is out of range"}, 2)


async def test_a_segment_that_cannot_be_read_does_not_take_those_before_it(sqlite_store: Store) -> None:
    """Samples are made one at a time, each when its row is."""
    await add(sqlite_store, "one")
    await segment(sqlite_store, "one", suffix_tokens=5)
    first, second = await rows_of(sqlite_store, ExportQuery(explain=True))
    assert (first["segment"], first["tokens"], first["final"]) == (0, [1, 2, 3], False)
    assert second["excluded"].startswith("unreadable: turn 2 has 1 + 2 tokens")


async def test_a_group_whose_last_session_is_erased_keeps_its_place_and_its_advantages(store: Store) -> None:
    for name, group, value in (("a", "g", 0.0), ("c", None, None), ("b", "g", 1.0), ("d", None, None)):
        await add(store, name, group, value)
    grouped = ExportQuery(shape="atropos", advantage="grpo", explain=True)
    single = ExportQuery(advantage="grpo")
    pinned = (await Exporter(store.database, "test").start(single, None)).cursor
    before = await rows_of(store, single, pinned)
    page = await rows_of(store, grouped)
    assert [(row.get("session_ids"), row.get("excluded", "")[:9]) for row in page][1:2] == [(["a", "b"], "")]
    await store.erase("b")
    rest = await rows_of(store, grouped, page[0]["cursor"])
    assert [row.get("session_ids", row.get("session_id")) for row in rest][:2] == [["a"], "b"]
    assert excluded(rest)["b"] == "erased"
    after = await rows_of(store, single, pinned)
    assert [row for row in before if row["session_id"] != "b"] == after
    assert after[0]["advantage"] == pytest.approx(-(0.5**0.5), abs=1e-5)


async def erase_elsewhere(url: str, session_id: str) -> None:
    """As another process does it."""
    database = Database(url, points=StorePoints())
    await database.open()
    async with Store.over(database) as other:
        await other.erase(session_id)
    await database.close()


async def test_an_erase_between_two_statements_of_an_export_is_not_half_seen(postgres_store: Store) -> None:
    await add(postgres_store, "one", None, 1.0)
    database, begun = postgres_store.database, []

    def erase(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "FROM turns" in statement and not begun:
            begun.append(statement)
            thread = threading.Thread(target=lambda: asyncio.run(erase_elsewhere(database.url, "one")))
            thread.start()
            thread.join(20)

    event.listen(read_engine(database), "before_cursor_execute", erase)
    [row] = await rows_of(postgres_store, ExportQuery(explain=True))
    assert row["tokens"] == [1, 2, 3], "as it was when the reading began"
    event.remove(read_engine(database), "before_cursor_execute", erase)
    head = await postgres_store.head("one")
    assert head is not None
    assert head.status == "erased"
    assert excluded(await rows_of(postgres_store, ExportQuery(explain=True))) == {"one": "erased"}


async def test_a_segment_that_is_too_long_is_still_the_last(sqlite_store: Store) -> None:
    await add(sqlite_store, "one")
    await segment(sqlite_store, "one", suffix_tokens=50)
    await sqlite_store.submit(reward("one", 1.0))
    for shape, last in (("turnlog", "final"), ("skyrl", "is_last_step")):
        row, missing = await rows_of(sqlite_store, ExportQuery(shape=shape, max_seq_len=10, explain=True))
        assert row[last] is False, shape
        assert missing["excluded"] == "max_seq_len: no turn fits"


async def test_a_session_that_cannot_be_read_has_no_rows_in_its_rollout(store: Store) -> None:
    for name in ("a", "bad", "c"):
        await add(store, name)
    await damage(store, sessions, sessions.c.session_id != "a", root_id="a")
    await damage(store, events, events.c.session_id == "bad", events.c.type == "TurnCommitted", data=b"{")
    rows = await rows_of(store, ExportQuery(explain=True))
    assert excluded(rows).keys() == {"bad"}
    assert {row["session_id"]: row["rollout_rows"] for row in rows if "excluded" not in row} == {"a": 2, "c": 2}
