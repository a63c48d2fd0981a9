"""Another process holds SQLite's write lock: a backup tool, a shell."""

from __future__ import annotations

import sqlite3
import time

import httpx
from integration.stand import Stand, user

HELD_S = 3.0


def test_a_turn_waits_for_the_lock_and_health_does_not(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    foreign = sqlite3.connect(stand.server.database_path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    call = stand.meanwhile(talk.chat, [*talk.messages, user("Again")])
    created = stand.meanwhile(stand.http.post, "/sessions")
    slowest = 0.0
    with httpx.Client(base_url=stand.server.base_url) as http:
        while time.monotonic() - began < HELD_S:
            asked = time.monotonic()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.02)
            assert not call.done()
    foreign.execute("ROLLBACK")
    foreign.close()
    assert call.result().status_code == 200
    assert created.result().status_code == 200
    assert slowest < 0.5
    assert talk.types()[-2:] == ["TurnOpened", "TurnCommitted"]
    assert len(talk.committed()) == 2
