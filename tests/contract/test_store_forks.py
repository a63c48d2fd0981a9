"""A fork copies what its source has, inside the database; on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.log import created, payload, rolled_back
from helpers.store import Store, claim
from sqlalchemy import select
from test_store_chunks import chunks

from app.domain.events import BlobRef, BlobsTombstoned
from app.features.forks.operation import Fork, read_source
from app.features.forks.rules import Forked, config_of_fork, fork
from app.store.content import load_blobs
from app.store.log import Appended, Refused, StoredBlob
from app.store.log_sessions import Create
from app.store.log_turns import Stale
from app.store.schema import turns
from app.store.sessions import last_tombstone
from workers import codec

pytestmark = pytest.mark.anyio


def blob(number: int, kind: str, text: bytes) -> StoredBlob:
    return StoredBlob(number, kind, len(text), f"{number:064}", codec.compress(text))


def ref(one: StoredBlob, kind: Any) -> BlobRef:
    return BlobRef(one.number, kind, one.size, one.hash)


PARAMS = (blob(0, "params", b'{"temperature":1}'), blob(1, "tools", b"[]"), blob(2, "params", b'{"temperature":2}'))


async def branching(store: Store) -> None:
    """Session s: turn 1, a turn 2 with a payload that turn 3 discards, and turns 3 and 4 with payloads that share."""
    await store.create("s")
    brought = {"blobs": PARAMS[:1], "new_blobs": (ref(PARAMS[0], "params"),)}
    await store.take_turn("s", text=b'"one"', **brought)
    await paid(store, "two", 1, 0, 1)
    await store.submit(claim("s", (await known(store)).version, store.me, turn=3, parent=1, last_event_at=3.0))
    fence = (await known(store)).version
    new = {"blobs": PARAMS[1:], "new_blobs": (ref(PARAMS[1], "tools"), ref(PARAMS[2], "params"))}
    await store.commit(
        "s",
        fence,
        turn=3,
        parent=1,
        base_tokens=1,
        before=(rolled_back(1, 2),),
        payloads=(payload(fence, 0, 1),),
        chunks=chunks(0, 1),
        text=b'"three"',
        params=2,
        tools=1,
        **new,
    )
    await paid(store, "four", 3, 0, shared=2, params=2, tools=1)


async def known(store: Store) -> Any:
    session = await store.session("s")
    assert session is not None
    return session


async def paid(store: Store, text: str, parent: int, *numbers: int, shared: int = 0, **fields: Any) -> None:
    fence = (await known(store)).version + 1
    refs = (payload(fence, *numbers, shared=shared),)
    content = {"text": f'"{text}"'.encode(), "payloads": refs, "chunks": chunks(*numbers)}
    await store.take_turn("s", base_tokens=1, **content, **fields)


async def decided(store: Store, turn: int, **given: Any) -> Forked:
    session = await known(store)
    config = config_of_fork(session, None)
    options = {"body_hash": "f" * 32, "metadata": None, "loss": False, **given}
    return fork(session, await store.log("s"), turn, config=config, **options)


async def forked(store: Store, fork_id: str, turn: int, **given: Any) -> Any:
    return await store.submit(Fork("s", fork_id, 9.0, await decided(store, turn, **given), None, 0))


async def content(store: Store, session_id: str) -> list[tuple[Any, ...]]:
    columns = [column for column in turns.c if column.name not in ("session_id", "written_at")]
    query = select(*columns).where(turns.c.session_id == session_id).order_by(turns.c.turn)
    return await store.database.read(lambda connection: [tuple(row) for row in connection.execute(query)])


async def test_the_line_of_a_turn_is_copied_and_numbered_anew(store: Store) -> None:
    await branching(store)
    made = await forked(store, "f", 4)
    assert [type(one.event).__name__ for one in made.events] == ["SessionCreated"]
    source = {row[0]: row for row in await content(store, "s")}
    copies = await content(store, "f")
    assert [row[:2] for row in copies] == [(1, 0), (2, 1), (3, 2)]
    assert [row[2:] for row in copies] == [source[number][2:] for number in (1, 3, 4)]
    found = await store.database.read(lambda connection: load_blobs(connection, "f", [0, 1, 2]))
    assert [found[number] for number in range(3)] == [b'{"temperature":1}', b'{"temperature":2}', b"[]"]
    copied = (await decided(store, 4)).copied
    assert [(one.params, one.tools) for one in copied] == [(0, None), (1, 2), (1, 2)]
    assert await store.chunks("f") == {(3, 0): (b"ab", None), (3, 1): (b"ab", None), (4, 0): (b"ab", None)}
    await store.head_equals_fold("f")
    await store.head_equals_fold("s")
    assert await store.loaded("f") == await store.session("f")


async def test_a_rolled_back_turn_is_forked_with_the_payload_that_it_still_has(store: Store) -> None:
    await branching(store)
    await forked(store, "f", 2)
    assert [row[:2] for row in await content(store, "f")] == [(1, 0), (2, 1)]
    assert sorted(await store.chunks("f")) == [(3, 0), (3, 1)]


async def test_a_payload_behind_the_window_is_a_tombstone_as_it_would_be_at_the_source(store: Store) -> None:
    await branching(store)
    await paid(store, "five", 4, 0, params=2, tools=1)
    await paid(store, "six", 5, 0, params=2, tools=1)
    await forked(store, "f", 6)
    tombstone = (await store.log("f"))[-1].seq
    kept = await store.chunks("f")
    assert {key for key, (data, _) in kept.items() if data is not None} == {(5, 0), (6, 0)}
    assert {by for data, by in kept.values() if data is None} == {tombstone}
    await store.head_equals_fold("f")


async def test_an_open_turn_of_the_source_goes_on(store: Store) -> None:
    await branching(store)
    session = await known(store)
    await store.claim("s", session.version, turn=5, parent=4)
    await forked(store, "f", 4)
    assert isinstance(await store.commit("s", session.version + 1, turn=5, parent=4, params=2), Appended)
    assert len((await known(store)).turns) == 5


async def test_metadata_is_the_sources_or_ones_own(store: Store) -> None:
    theirs, ours = blob(0, "metadata", b'{"a":1}'), blob(0, "metadata", b'{"b":2}')
    params = StoredBlob(1, "params", 2, "1" * 64, codec.compress(b"{}"))
    event = created(metadata=ref(theirs, "metadata"))
    await store.submit(Create("s", 1.0, event, theirs))
    await store.take_turn("s", params=1, blobs=(params,), new_blobs=(ref(params, "params"),))
    await forked(store, "theirs", 1)
    made = await decided(store, 1, metadata=ref(ours, "metadata"))
    await store.submit(Fork("s", "ours", 9.0, made, ours, 0))
    for name, text in (("theirs", b'{"a":1}'), ("ours", b'{"b":2}')):
        found = await store.database.read(lambda c, name=name: load_blobs(c, name, [0, 1]))  # type: ignore[misc]
        assert found == {0: text, 1: b"{}"}


async def test_nothing_is_written_where_the_source_has_changed_or_is_gone(store: Store) -> None:
    await branching(store)
    made = await decided(store, 4)
    await store.take_turn("s", params=2, after=(BlobsTombstoned((4,), ()),) * 2)
    tombstone = await store.database.read(lambda connection: last_tombstone(connection, "s"))
    assert await store.submit(Fork("s", "f", 9.0, made, None, 0)) == Stale()
    assert await store.submit(Fork("nobody", "f", 9.0, made, None, 0)) == Refused(None)
    await store.close("s")
    assert isinstance(await store.submit(Fork("s", "closed", 9.0, await decided(store, 4), None, tombstone)), Appended)
    await store.erase("s")
    assert await store.submit(Fork("s", "f", 9.0, made, None, tombstone)) == Refused("erased")
    assert await store.head("f") is None
    assert await content(store, "f") == []


async def test_what_is_missing_of_a_source_is_named(store: Store) -> None:
    await branching(store)
    made = await decided(store, 4)
    found = await store.database.read(lambda connection: read_source(connection, "s"))
    assert found.lacks(made) is None
    gone = turns.delete().where(turns.c.session_id == "s", turns.c.turn == 3)
    await store.database.write(lambda tx: tx.run(gone, {}), durable=True)
    found = await store.database.read(lambda connection: read_source(connection, "s"))
    assert found.lacks(made) == "turns [3] are missing"
