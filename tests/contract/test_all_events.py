"""The events of all sessions as lines: in the order of commits, filtered, and gone on with behind any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from helpers.store import Store, reward
from sqlalchemy import literal_column, update

from app.domain import cursors
from app.domain.events import SessionConfig, SessionCreated
from app.errors import InvalidRequest, PositionGone, StoreUnavailable
from app.sessions import all_events as feeds
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.event_log import event_fields
from app.sessions.log_end import LogEnd
from app.store import feed
from app.store.dialect import Tx
from app.store.feed import EventFilter
from app.store.log_sessions import Create
from app.store.schema import events, store_meta

pytestmark = pytest.mark.anyio

PATIENCE_S = 30.0
Line = dict[str, Any]


class Reading:
    """The lines of one reader; `pieces` is what the route sends."""

    def __init__(self, store: Store) -> None:
        self.feed = AllEvents(store.database, LogEnd(store.database, 0.01))

    async def lines(self, after: str | None = None, limit: int | None = None, **wanted: Any) -> list[Line]:
        """All of a reply, position lines too."""
        pieces = await self.feed.start(EventQuery(after, False, limit, EventFilter(**wanted)))
        return [json.loads(line) async for piece in pieces for line in piece.splitlines()]

    async def events(self, after: str | None = None, limit: int | None = None, **wanted: Any) -> list[Line]:
        return [line for line in await self.lines(after, limit, **wanted) if "session_id" in line]

    @asynccontextmanager
    async def followed(self, after: str | None = None, **wanted: Any) -> AsyncIterator[AsyncIterator[Line]]:
        pieces = await self.feed.start(EventQuery(after, True, None, EventFilter(**wanted)))

        async def lines() -> AsyncIterator[Line]:
            async for piece in pieces:
                for line in piece.splitlines():
                    yield json.loads(line)

        async with asyncio.timeout(PATIENCE_S), aclosing(pieces):
            yield lines()


def names(lines: list[Line]) -> list[tuple[str, int]]:
    return [(line["session_id"], line["seq"]) for line in lines]


async def filled(store: Store) -> list[tuple[str, int]]:
    """Two sessions whose events alternate; the order in which they were written."""
    await store.create("a")
    await store.create("b")
    await store.take_turn("a")
    await store.submit(reward("b", 1.0))
    await store.close("a")
    await store.close("b")
    await store.erase("b")
    return [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2), ("a", 4), ("b", 3), ("b", 4)]


async def test_each_line_is_an_event_of_its_sessions_log_and_a_place_to_go_on(store: Store) -> None:
    order, reading = await filled(store), Reading(store)
    lines = await reading.lines()
    assert names(lines) == order
    for session_id in ("a", "b"):
        given = [line for line in lines if line["session_id"] == session_id]
        own = [json.loads(msgspec.json.encode(event_fields(recorded))) for recorded in await store.log(session_id)]
        named = [{"position": line["position"], "session_id": session_id} for line in given]
        assert given == [{**where, **event} for where, event in zip(named, own, strict=True)]
    for at, line in enumerate(lines):
        assert names(await reading.events(line["position"])) == order[at + 1 :]
        assert names(await reading.lines(limit=at + 1)) == order[: at + 1]
    assert await reading.lines(lines[-1]["position"]) == []


async def test_an_empty_log_has_a_position(store: Store) -> None:
    reading = Reading(store)
    [begin] = await reading.lines()
    [end] = await reading.lines("end")
    assert begin.keys() == end.keys() == {"position"}
    order = await filled(store)
    for line in (begin, end):
        assert names(await reading.events(line["position"])) == order
    assert (await reading.lines("end"))[0]["position"] == (await reading.lines())[-1]["position"]


FILTERS: list[tuple[Line, list[tuple[str, int]]]] = [
    ({"types": ("SessionCreated",)}, [("a", 1), ("b", 1)]),
    ({"types": ("RewardAssigned", "SessionErased")}, [("b", 2), ("b", 4)]),
    ({"types": ("TurnRejected",)}, []),
    ({"session_id": "a"}, [("a", 1), ("a", 2), ("a", 3), ("a", 4)]),
    ({"session_id": "a", "types": ("TurnCommitted",)}, [("a", 3)]),
    ({"session_id": "never-seen"}, []),
    ({"group_id": ("never-seen",)}, []),
    ({"run": "default", "types": ("SessionCreated", "TurnCommitted")}, [("a", 1), ("b", 1), ("a", 3)]),
    ({"run": "never-seen"}, []),
]


@pytest.mark.parametrize("window", [1, 3, 10_000])
@pytest.mark.parametrize("page", [1, 500])
async def test_a_filter_leaves_events_out_and_no_place_to_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, window: int, page: int
) -> None:
    monkeypatch.setattr(feed, "WINDOW", window)
    monkeypatch.setattr(feed, "FEW", window)  # with 1, the order is walked for the two sessions of the run
    monkeypatch.setattr(feeds, "PAGE", page)
    await filled(store)
    reading = Reading(store)
    end = (await reading.lines("end"))[0]["position"]
    for wanted, expected in FILTERS:
        lines = await reading.lines(**wanted)
        assert names([line for line in lines if "seq" in line]) == expected, wanted
        assert lines[-1]["position"] == end
        assert names(await reading.events(limit=1, **wanted)) == expected[:1]
        for at, line in enumerate(line for line in lines if "seq" in line):
            assert names(await reading.events(line["position"], **wanted)) == expected[at + 1 :]


async def test_a_group_has_its_agents_sessions_too(store: Store) -> None:
    def created(session_id: str, group_id: str | None, parent: str | None = None) -> Create:
        config = SessionConfig(rollback_window=1, group_id=group_id, parent=parent)
        return Create(session_id, 1.0, SessionCreated(config, "b" * 32), None)

    for session_id, group_id, parent in (("root", "g", None), ("agent", None, "root"), ("other", "h", None)):
        await store.submit(created(session_id, group_id, parent))
    await store.close("agent")
    reading = Reading(store)
    assert names(await reading.events(group_id=("g",))) == [("root", 1), ("agent", 1), ("agent", 2)]
    assert names(await reading.events(group_id=("h",), types=("SessionCreated",))) == [("other", 1)]


async def test_who_filters_learns_of_positions_without_events(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "POSITION_S", 0.0)
    order, reading = await filled(store), Reading(store)
    async with reading.followed(types=("TurnRejected",)) as lines:
        line = await anext(lines)
    assert line.keys() == {"position"}
    assert names(await reading.events(line["position"])) == []
    assert len(await reading.events()) == len(order)


@pytest.mark.parametrize(
    "after", ["", "x", "é", "WyIxIl0", "WyIxIixbMSwyXSwieCJd", cursors.encode(("1", (1 << 64, 0)))]
)
async def test_what_is_no_position_is_refused(store: Store, after: str) -> None:
    with pytest.raises(InvalidRequest, match="after was not issued by GET /events"):
        await Reading(store).lines(after)


async def test_an_event_that_cannot_be_read_says_so_and_stops_nobody(store: Store) -> None:
    order, reading = await filled(store), Reading(store)
    newer = update(events).where(events.c.session_id == "a", events.c.seq == 3).values(version=99)
    damaged = update(events).where(events.c.session_id == "b", events.c.seq == 2).values(data=b"{}#00000000")

    def write(tx: Tx) -> None:
        tx.run(newer, {})
        tx.run(damaged, {})

    await store.database.write(write, durable=True)
    lines = await reading.lines()
    assert names(lines) == order
    told = {(line["session_id"], line["seq"]): line["error"] for line in lines if "error" in line}
    assert told.keys() == {("a", 3), ("b", 2)}
    assert told["a", 3].endswith("version 99; this release reads up to 1: read it with the one that wrote it")
    assert "its checksum does not match" in told["b", 2]
    assert [line["type"] for line in lines if "error" in line] == ["TurnCommitted", "RewardAssigned"]


async def test_a_row_that_no_version_wrote_is_given_as_such(sqlite_store: Store) -> None:
    """SQLite stores a value's type in its row; the ordinary read meets it as damage."""
    order, reading = await filled(sqlite_store), Reading(sqlite_store)
    number = update(events).where(events.c.session_id == "b", events.c.seq == 2).values(data=literal_column("7"))
    await sqlite_store.database.write(lambda tx: tx.run(number, {}), durable=True)
    lines = await reading.lines()
    assert [names([line])[0] for line in lines if line["session_id"]] == [one for one in order if one != ("b", 2)]
    [lost] = [line for line in lines if line["session_id"] is None]
    assert lines.index(lost) == order.index(("b", 2))
    assert (lost["seq"], lost["type"]) == (None, None)
    assert "damaged" in lost["error"]
    assert names(await reading.events(lost["position"])) == order[order.index(("b", 2)) + 1 :]
    assert names(await reading.events(types=("RewardAssigned",))) == [(None, None)]


async def test_who_follows_waits_for_a_database_that_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order, reading = await filled(store), Reading(store)
    read, looks = store.database.read, asyncio.Semaphore(0)

    async def away(*arguments: Any, **named: Any) -> Any:
        if "one_moment" not in named:
            return await read(*arguments, **named)  # where the log ends
        looks.release()
        raise StoreUnavailable("away")

    async with reading.followed() as lines:
        assert len([await anext(lines) for _ in order]) == len(order)
        with monkeypatch.context() as patched:
            patched.setattr(store.database, "read", away)
            following = asyncio.ensure_future(anext(lines))
            await store.create("c")
            for _ in range(2):
                await looks.acquire()
        assert store.database.read == read
        assert names([await following]) == [("c", 1)]
    assert caplog.text.count("a reader of all events waits") == 1


async def test_who_follows_hears_of_what_is_new_until_the_server_stops(store: Store) -> None:
    order, reading = await filled(store), Reading(store)
    async with reading.followed() as lines:
        assert names([await anext(lines) for _ in order]) == order
        await store.create("c")
        assert names([await anext(lines)]) == [("c", 1)]
        reading.feed.stop()
        assert [line async for line in lines] == []
    async with reading.followed("end") as lines:
        assert [line.keys() async for line in lines] == [{"position"}]


async def test_a_position_of_a_store_that_was_restored_is_gone(store: Store) -> None:
    await filled(store)
    reading = Reading(store)
    position = (await reading.lines())[-1]["position"]
    await raise_epoch(store)
    with pytest.raises(PositionGone, match="restored"):
        await reading.lines(position)


async def raise_epoch(store: Store) -> None:
    raised = update(store_meta).where(store_meta.c.key == "epoch").values(value="2-another")
    await store.database.write(lambda tx: tx.run(raised, {}), durable=True)
