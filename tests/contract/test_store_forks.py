"""A fork has what its source has, and is written where that is still what it was decided by; on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.log import payload
from helpers.store import Store
from test_store_chunks import chunks

from app.domain.events import BlobRef, BlobsTombstoned
from app.features.forks.operation import Fork, read_source
from app.features.forks.rules import Forked, config_of_fork, fork
from app.store.content import load_blobs
from app.store.log import Appended, Refused, StoredBlob
from app.store.log_turns import Stale
from app.store.schema import turns
from app.store.sessions import last_tombstone
from workers import codec

pytestmark = pytest.mark.anyio

PARAMS = StoredBlob(0, "params", 2, "h" * 64, codec.compress(b"{}"))


async def source(store: Store) -> Forked:
    """Session `s` of two turns with payloads, and what a fork of the second has."""
    await store.create("s")
    brought: dict[str, Any] = {"blobs": [PARAMS], "new_blobs": (BlobRef(0, "params", 2, "h" * 64),)}
    for fence, shared in ((2, 0), (4, 1)):
        refs = (payload(fence, 0, shared=shared),)
        await store.take_turn("s", base_tokens=shared, payloads=refs, chunks=chunks(0), **brought)
        brought = {}
    return await decided(store)


async def decided(store: Store) -> Forked:
    session = await store.session("s")
    assert session is not None
    config = config_of_fork(session, None)
    return fork(session, await store.log("s"), 2, config=config, body_hash="f" * 32, metadata=None, loss=False)


async def test_a_fork_has_its_sources_content(store: Store) -> None:
    await store.submit(Fork("s", "f", 9.0, await source(store), None, 0))
    assert await store.database.read(lambda connection: load_blobs(connection, "f", [0])) == {0: b"{}"}
    assert {key: data for key, (data, _) in (await store.chunks("f")).items()} == {(2, 0): b"ab", (3, 0): b"ab"}
    assert await store.loaded("f") == await store.session("f")
    for session_id in "fs":
        await store.head_equals_fold(session_id)


async def test_nothing_is_written_where_the_source_has_changed_or_is_gone(store: Store) -> None:
    made = await source(store)
    await store.take_turn("s", after=(BlobsTombstoned((2,), ()),))
    tombstone = await store.database.read(lambda connection: last_tombstone(connection, "s"))
    assert await store.submit(Fork("s", "f", 9.0, made, None, 0)) == Stale()
    assert await store.submit(Fork("nobody", "f", 9.0, made, None, 0)) == Refused(None)
    await store.close("s")
    assert isinstance(await store.submit(Fork("s", "closed", 9.0, await decided(store), None, tombstone)), Appended)
    await store.erase("s")
    assert await store.submit(Fork("s", "f", 9.0, made, None, tombstone)) == Refused("erased")
    assert await store.head("f") is None


async def test_what_is_missing_of_a_source_is_named(store: Store) -> None:
    made = await source(store)
    gone = turns.delete().where(turns.c.session_id == "s", turns.c.turn == 2)
    for told in (None, "turns [2] are not there"):
        found = await store.database.read(lambda connection: read_source(connection, "s"))
        assert found.lacks(made) == told
        await store.database.write(lambda tx: tx.run(gone, {}), durable=True)
