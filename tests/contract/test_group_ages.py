"""How old a group's oldest token is, after its sessions have changed; on both databases."""

from __future__ import annotations

import msgspec
import pytest
from helpers.groups import Groups
from helpers.store import Store

from app.features.groups.operations import Measure

pytestmark = pytest.mark.anyio


async def test_a_group_is_measured_again_where_as_many_sessions_are_others(store: Store) -> None:
    made = Groups(store)
    await made.complete("g", 2)
    [group] = await made.candidates()
    await store.submit(Measure([msgspec.structs.replace(group, oldest_version=1)]))
    assert (await made.row("g")).measured
    assert await made.free(oldest=4) == [], "too old while it has the session of version 1"
    await store.erase("g-0")
    await made.create("g", "g-new", 2)
    await made.finish("g-new")
    assert await made.counts("g") == (2, 1, 0, True)
    assert not (await made.row("g")).measured
    assert await made.free(oldest=4) == ["g"]
