"""Checkpoints that are deleted while the store is taken back to them."""

from __future__ import annotations

import time

import pytest
from helpers.store import Meanwhile, Store

from app.errors import NotFound
from app.sessions.archives import Archives
from app.sessions.cache import SessionCache
from app.sessions.followers import Followers
from app.sessions.lifecycle import Sessions
from app.sessions.restores import Restores
from app.store.checkpoints import Delete, DropRows, Make
from app.store.writer import Writer

pytestmark = pytest.mark.anyio


def restores(store: Store, writer: Writer) -> Restores:
    cache, followers = SessionCache(store.database, store.writer, 1 << 20), Followers()
    archives = Archives(store.database, store.writer)
    return Restores(
        database=store.database,
        writer=writer,
        archives=archives,
        cache=cache,
        followers=followers,
        sessions=Sessions(store.database, store.writer, cache, followers, time.time, archives),
        clock=time.time,
    )


async def test_nothing_is_taken_back_to_a_checkpoint_that_is_just_deleted(store: Store) -> None:
    await store.create("s")
    await store.take_turn("s")
    await store.submit(Make("cut", "now"))
    deleted = Meanwhile(store.writer, Make, Delete("cut"), DropRows("", 10))
    with pytest.raises(NotFound, match="no checkpoint cut"):
        await restores(store, deleted.as_writer).run("cut", "before-1-cut")
    head = await store.head("s")
    assert head is not None
    assert (head.status, head.turns) == ("open", 1)
