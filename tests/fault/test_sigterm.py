"""SIGTERM under load: replies in flight land, nobody's claim stays behind, and the next process has nothing to mend."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from integration.stand import FIRST_TURN, Stand, Talk, held, until, user
from sqlalchemy import func, select

from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.schema import incarnations, open_turns
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

TITLE = "SIGTERM under load"
SLOW_S = 2.0
SLOWEST_S = 3.0
"""Of a turn whose client has gone: nobody's connection keeps the process from ending before it."""

WAITING = 8
HAMMERING = 6
GRACE_S = 15.0
"""Beyond the slowest reply; on an idle machine it takes a fraction of a second."""


class Hammer:
    """Turn after turn until the connection breaks; every 200 is kept."""

    def __init__(self, stand: Stand) -> None:
        self._http = httpx.Client(base_url=stand.server.base_url, timeout=30)
        self.talk = stand.talk()
        self.replies: list[httpx.Response] = []

    def run(self) -> str:
        """What ended it: the name of the transport's error."""
        messages: list[dict[str, Any]] = []
        try:
            while True:
                messages.append(user(f"Question {len(self.replies)}"))
                reply = self._http.post(self.talk.chat_path, json={"messages": messages, "sim": {"latency_s": 0.02}})
                assert reply.status_code == 200, reply.text
                self.replies.append(reply)
                messages.append(reply.json()["choices"][0]["message"])
        except httpx.TransportError as error:
            return type(error).__name__
        finally:
            self._http.close()


def kept(talk: Talk, *replies: httpx.Response) -> list[Acknowledged]:
    return [acknowledgement(talk.id, reply) for reply in replies]


async def left_behind(url: str) -> tuple[int, int]:
    """Open turns, and incarnations that have not ended."""
    database = Database(url, points=StorePoints())
    try:
        return await database.read(
            lambda connection: (
                connection.execute(select(func.count()).select_from(open_turns)).scalar_one(),
                connection.execute(select(func.count()).where(incarnations.c.ended_at.is_(None))).scalar_one(),
            )
        )
    finally:
        await database.close()


@pytest.mark.long
@pytest.mark.fault(14, TITLE)
def test_what_is_in_flight_lands_and_no_claim_is_left(
    tmp_path: Path, database_url: str, engine: SimulatorProcess, tally: Tally
) -> None:
    server = ForkedServer(tmp_path, database_url, [engine.base_url]).start()
    stand = Stand(server, engine.base_url)
    try:
        assert stand.sim.post("/sim/reset").status_code == 200
        talks = [stand.talk() for _ in range(WAITING)]
        hammers = [Hammer(stand) for _ in range(HAMMERING)]
        gone, body = stand.talk(), {"messages": [user("Slow")], "sim": {"latency_s": SLOWEST_S}}
        with held(stand.sim):
            calls = [stand.meanwhile(talk.chat, [user("Slow")], sim={"latency_s": SLOW_S}) for talk in talks]
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.base_url + gone.chat_path, json=body, timeout=0.3)
            until(lambda: stand.stats()["in_flight"] == WAITING + 1)
        runs = [stand.meanwhile(hammer.run) for hammer in hammers]
        until(lambda: all(hammer.replies for hammer in hammers))
        assert not all(call.done() for call in calls)

        server.signal(signal.SIGTERM)
        told = monotonic()
        tally.tried += 1
        assert server.ended() == -signal.SIGTERM
        assert monotonic() - told < SLOWEST_S + GRACE_S
        replies = [call.result() for call in calls]
        assert [reply.status_code for reply in replies] == [200] * WAITING
        assert all(isinstance(run.result(timeout=30), str) for run in runs)
        assert asyncio.run(left_behind(database_url)) == (0, 0)

        acknowledged = [one for talk, reply in zip(talks, replies, strict=True) for one in kept(talk, reply)]
        acknowledged += [one for hammer in hammers for one in kept(hammer.talk, *hammer.replies)]
        verified(database_url, acknowledged, tally)
        server.start()
        talks[0].messages = [user("Slow"), replies[0].json()["choices"][0]["message"]]
        talks[0].say("On")
        tally.recovered(monotonic() - told)
        assert gone.types() == ["SessionCreated", *FIRST_TURN, "ReplyUndelivered"]
        for talk in talks:
            tally.doubled += len(talk.committed()) - (2 if talk is talks[0] else 1)
    finally:
        stand.close()
        server.stop()
