"""What people are shown of a long session: its newest messages, and how many there are before them."""

from __future__ import annotations

import pytest
from helpers.store import Store

from app.sessions import conversation
from app.sessions.conversation import Conversations

pytestmark = pytest.mark.anyio

TURNS = 20


async def test_the_newest_messages_are_shown_and_the_others_counted(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn has two messages of 100 bytes."""
    await sqlite_store.create("s")
    for number in range(TURNS):
        base = {"base_messages": 2 * number, "base_tokens": 3 * number}
        await sqlite_store.take_turn("s", text=b'"%098d"' % number, **base)
    conversations = Conversations(sqlite_store.database)
    for limit, value, shown in (("MAX_MESSAGES", 30, 30), ("MAX_BYTES", 1060, 10)):
        monkeypatch.setattr(conversation, limit, value)
        found = await conversations.at("s", None, None)
        assert [one.index for one in found.messages] == list(range(2 * TURNS - shown, 2 * TURNS))
        assert found.omitted == 2 * TURNS - shown
        assert bytes(found.messages[-1].message or b"") == b'"%098d"' % (TURNS - 1)
    monkeypatch.setattr(conversation, "MAX_BYTES", 99)
    short = await conversations.at("s", None, None)
    assert short.messages[-1].message is None
    assert short.messages[-1].error == "100 bytes are too many to show"
