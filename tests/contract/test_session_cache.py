"""The cache of sessions over a real store: what it hands out is never behind what this process has written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from helpers.store import Store
from sqlalchemy import literal_column, update
from sqlalchemy.sql import Executable

from app.domain.known_body import LONG_BODY
from app.domain.session import Session
from app.errors import SessionUnreadable
from app.protocols.chat import parse_chat
from app.sessions.cache import SessionCache
from app.store.database import Database
from app.store.dialect import Parameters, Row
from app.store.schema import turns as turns_table
from app.store.sessions import NEWEST_TURNS

T = TypeVar("T")

pytestmark = pytest.mark.anyio


class Counting:
    """A database that counts the statements outside transactions, and the reads in one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_sqlite = database.is_sqlite
        self.statements = self.transactions = 0

    async def read(self, function: Callable[..., Any], **options: Any) -> Any:
        self.transactions += 1
        return await self._database.read(function, **options)

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        self.statements += 1
        return await self._database.read_autocommit(statement, parameters)


async def test_requests_are_dropped_before_sessions(store: Store) -> None:
    """What is kept of long requests costs no other session its place."""
    body = b'{"messages":[{"role":"user","content":"%b"}]}' % (b"x" * LONG_BODY)
    layout = parse_chat(body).layout
    assert layout is not None
    names = ["a", "b", "c"]
    for name in names:
        await store.create(name)
        await store.take_turn(name)

    async def filled(max_bytes: int) -> SessionCache:
        cache = SessionCache(store.database, store.writer, max_bytes)
        for name in names:
            await cache.get(name)
        for name in names:
            cache.remember(name, 1, b"{}", None, layout, hashlib.sha256())
        return cache

    cache = await filled(1 << 30)
    assert [cache.continued(name, body, "chat") is not None for name in names] == [True] * 3
    sizes = cache.size
    for room, kept in ((sizes, 3), (sizes - 1, 2), (sizes - 2 * LONG_BODY, 1), (sizes - 3 * LONG_BODY, 0)):
        cache = await filled(room)
        assert sum(cache.continued(name, body, "chat") is not None for name in names) == kept
        assert cache.sessions == 3
        assert sizes - (3 - kept) * (LONG_BODY + 100) <= cache.size <= room
    cache = await filled(1 << 30)
    for name in names:
        cache.drop(name)
    assert (cache.size, cache.sessions) == (0, 0)


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([(0, "a"), (1, "ab"), (2, "abc")], 1),
        ([(0, "a!"), (1, "ab!"), (2, "abc!")], 1),
        ([(0, "a!"), (1, "ab!"), (1, "ac!")], 2),
        ([(0, "a!"), (1, "ab!"), (1, "ac!"), (2, "abd!"), (3, "ace!")], 2),
        ([(0, "ab"), (0, "ab")], 1),
        ([(0, "ab!"), (0, "ac!")], 2),
    ],
    ids=["goes on", "a moved mark", "a fork", "both go on", "once more", "two begin"],
)
async def test_a_path_keeps_one_request(store: Store, turns: list[tuple[int, str]], kept: int) -> None:
    """The newest turn's. Turns are (parent, messages), of which the last is marked with "!", as clients mark it for a
    provider's cache: it is another text then, but the same message."""
    await store.create("s")
    cache = SessionCache(store.database, store.writer, 1 << 20)
    await cache.get("s")
    bodies = []
    for number, (parent, names) in enumerate(turns, 1):
        texts = [b'{"role":"user","content":"%c%b"}' % (name, b"x" * LONG_BODY) for name in names.strip("!").encode()]
        if names.endswith("!"):
            texts[-1] = texts[-1][:-1] + b',"cache_control":{}}'
        body = b'{"messages":[%b]}' % b",".join(texts)
        layout = parse_chat(body, False, cache.continued("s", body, "chat")).layout
        committed = await store.take_turn("s", parent, base_messages=len(texts) - 1 if parent else 0)
        cache.advance("s", committed.events)
        await cache.current("s")
        cache.remember("s", number, b"{}", None, layout, hashlib.sha256())
        bodies.append(body)
    found = [cache.continued("s", body, "chat") for body in bodies]
    assert len({one.known.turn for one in found if one is not None}) == kept
    assert found[-1] is not None
    assert found[-1].known.turn == len(turns)


async def history_of(store: Store, turns: int) -> Session:
    """Session `s` after so many turns, each of which continues the one before."""
    await store.create("s")
    for number in range(turns):
        parent = {"base_messages": 2 * number, "base_tokens": 3 * number}
        await store.take_turn("s", text=b'{"turn":%d}' % number, **parent)
    session = await store.session("s")
    assert session is not None
    return session


@pytest.mark.parametrize("turns", [1, 3, NEWEST_TURNS, NEWEST_TURNS + 2])
@pytest.mark.parametrize("with_tokens", [False, True])
async def test_a_missed_turn_reads_once(store: Store, turns: int, with_tokens: bool) -> None:
    """One statement gives the log and the content of the newest turns. Only that of older ones is read by itself."""
    session = await history_of(store, turns)
    database = Counting(store.database)
    cache = SessionCache(database, store.writer, 1 << 20, with_tokens=with_tokens)  # type: ignore[arg-type]
    live = await cache.get("s")
    assert live is not None
    assert live.session == session
    assert (database.statements, database.transactions) == (1, 0)
    messages = await cache.messages(live, turns)
    assert messages == b",".join(b'{"turn":%d},{"turn":%d}' % (number, number) for number in range(turns))
    older = turns > NEWEST_TURNS
    assert (database.statements, database.transactions) == (1, int(older))
    assert await cache.tokens(live, turns) == b",".join([b"1,2,3"] * turns)
    assert (database.statements, database.transactions) == (1, 2 * older if with_tokens else older + 1)


async def test_content_read_in_advance_is_counted_and_not_kept(store: Store) -> None:
    """It takes memory until the turn has its messages, or has been committed without them."""
    await history_of(store, 2)
    cache = SessionCache(store.database, store.writer, 1 << 20)
    live = await cache.get("s")
    assert live is not None
    frames = sum(len(exchange or b"") for exchange in live.unread.exchanges.values())
    assert frames > 0
    before = cache.size
    messages = await cache.messages(live, 2)
    assert cache.size == before - frames + len(messages)
    cache.drop("s")
    live = await cache.get("s")
    assert live is not None
    cache.remember("s", 2, b"{}", None)
    assert live.unread.size == 0
    assert cache.size == before - frames


async def test_damaged_content_does_not_hide_the_log(store: Store) -> None:
    """A turn that does not need the damaged content can go on; one that does is told which session it is."""
    session = await history_of(store, 2)
    broken = update(turns_table).where(turns_table.c.turn == 1).values(exchange=literal_column("'text'"))
    await store.database.write(lambda tx: tx.run(broken, {}), durable=True)
    cache = SessionCache(store.database, store.writer, 1 << 20)
    live = await cache.get("s")
    assert live is not None
    assert live.session == session
    with pytest.raises(SessionUnreadable):
        await cache.messages(live, 2)


async def test_an_ended_session_leaves_first(store: Store) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        await store.create(name)
    roomy = SessionCache(store.database, store.writer, 1 << 20)
    await roomy.get("a")
    cache = SessionCache(store.database, store.writer, 3 * roomy.size)
    for name in names[:3]:
        await cache.get(name)
    cache.advance("b", (await store.close("b")).events)
    await cache.get("d")
    assert [name for name in names if cache.known(name) is not None] == ["a", "c", "d"]
