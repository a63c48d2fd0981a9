"""What people are shown of a session of thousands of turns: all its turns, its newest messages, and nobody waits."""

from __future__ import annotations

import asyncio

import pytest
from helpers.databases import connected
from helpers.log import committed, created
from helpers.store import Store
from sqlalchemy import insert

from app.domain.events import Event, encode, name_of
from app.sessions import conversation
from app.sessions.conversation import MAX_MESSAGES, Conversations
from app.sessions.session_view import SessionViews
from app.store.schema import events, turns
from workers import codec
from workers.codec import Exchange

pytestmark = pytest.mark.anyio

TURNS = 2_500


async def lengthened(store: Store, size: int = 1) -> None:
    """A session `s` of so many turns, each of which says something of `size` bytes and continues the one before."""
    log: list[Event] = [created()]
    for number in range(1, TURNS + 1):
        base = {"base_messages": 2 * (number - 1), "base_tokens": 3 * (number - 1)}
        log.append(committed(number, number - 1, 1, **base))
    rows = [
        {
            "session_id": "s",
            "seq": seq,
            "type": name_of(event),
            "version": 1,
            "at": float(seq),
            "data": encode(event),
            "position": seq,
        }
        for seq, event in enumerate(log, 1)
    ]
    frames = [
        {
            "session_id": "s",
            "turn": number,
            "parent_turn": number - 1,
            "segment": 0,
            "choice_index": 0,
            "protocol": "chat",
            "exchange": codec.pack(Exchange([b'"%d"' % number], b'"%b"' % (b"x" * (size - 2)), b"", [])),
        }
        for number in range(1, TURNS + 1)
    ]
    async with connected(store.database.url, writes=True) as connection:
        await connection.execute(insert(events), rows)
        await connection.execute(insert(turns), frames)


async def test_all_turns_are_shown_and_the_loop_goes_on_meanwhile(sqlite_store: Store) -> None:
    await lengthened(sqlite_store)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    beating = asyncio.create_task(beat())
    view = await SessionViews(sqlite_store.database, dict).at("s", None)
    beating.cancel()
    assert [turn["turn"] for turn in view["turns"]] == list(range(1, TURNS + 1))
    assert view["turns"][-1]["messages"] == 2 * TURNS
    assert beats > 5
    early = await SessionViews(sqlite_store.database, dict).at("s", 100)
    assert len(early["turns"]) == 99


async def test_the_newest_messages_are_shown_and_the_others_counted(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lengthened(sqlite_store, size=100)
    conversations = Conversations(sqlite_store.database)
    found = await conversations.at("s", None, None)
    assert len(found.messages) == MAX_MESSAGES
    assert found.omitted == 2 * TURNS - MAX_MESSAGES
    assert [one.index for one in found.messages] == list(range(found.omitted, 2 * TURNS))
    assert found.messages[-2].message is not None
    assert bytes(found.messages[-2].message) == b'"%d"' % TURNS
    monkeypatch.setattr(conversation, "MAX_BYTES", 1060)
    few = await conversations.at("s", None, None)
    assert len(few.messages) == 20
    assert few.omitted == 2 * TURNS - 20
    monkeypatch.setattr(conversation, "MAX_BYTES", 99)
    short = await conversations.at("s", None, None)
    assert [one.message is None for one in short.messages[-2:]] == [False, True]
    assert short.messages[-1].error == "100 bytes are too many to show"
