"""`kill -9` in the middle of live streams: nothing that a client may take for final that is not in the log."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.streams import is_final
from integration.stand import SPOKEN, Stand, Talk, serving, until, user

from fault.table import Tally
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "kill -9 in the middle of live streams"
KILLS = 3
LATENCIES_S = (0.05, 0.1, 0.2, 0.4, 0.6, 5.0)
"""Of the streams that a kill meets; the last has long to go when the first is final."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    environment = {"TURNLOG_UPSTREAM_DIALECT": "vllm"}
    with (
        SimulatorProcess("--seed", "22", "--dialect", "vllm", "--reasoning", "0") as engine,
        serving(tmp_path_factory.mktemp("live"), engine.base_url, environment=environment) as made,
    ):
        yield made


class Heard:
    """What a client got of one stream: `text` to its end, `has_begun` once a delta of it has come."""

    def __init__(self, stand: Stand, talk: Talk, **sim: Any) -> None:
        self.talk, self.text, self.has_begun = talk, "", False
        self._url = stand.base_url + talk.chat_path
        self._body = talk.body([user("Go")], stream=True, sim={"tool_calls": False, **sim})

    def listen(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for piece in response.iter_text():
                    self.text += piece
                    self.has_begun |= "delta" in self.text
        except httpx.TransportError:
            return


@pytest.mark.parametrize("protocol", SPOKEN)
def test_a_stream_that_a_kill_ends_is_not_final_and_its_retry_generates(live: Stand, protocol: str) -> None:
    talk = live.talk(protocol, stream_mode="live")
    heard = Heard(live, talk, latency_s=20.0)
    listening = live.meanwhile(heard.listen)
    until(lambda: heard.has_begun)
    live.server.kill()
    listening.result()
    assert not is_final(heard.text)
    live.server.start()
    assert talk.committed() == []
    assert talk.chat([user("Go")], sim={"tool_calls": False}).status_code == 200
    assert len(talk.committed()) == 1


@pytest.mark.fault(1, TITLE)
def test_what_was_final_is_in_the_log_after_any_kill(live: Stand, tally: Tally) -> None:
    rng = random.Random(1)
    streams: list[Heard] = []
    for number in range(KILLS):
        made = [
            Heard(live, live.talk(rng.choice(tuple(SPOKEN)), stream_mode="live"), latency_s=latency_s)
            for latency_s in LATENCIES_S
        ]
        listening = [live.meanwhile(one.listen) for one in made]
        if number:
            until(lambda made=made: any(one.has_begun for one in made))
        else:
            until(lambda made=made: made[-1].has_begun and any(is_final(one.text) for one in made))
        time.sleep(rng.uniform(0.0, 0.4))
        live.server.kill()
        for one in listening:
            one.result()
        live.server.start()
        streams += made
    final = [one for one in streams if is_final(one.text)]
    cut = [one for one in streams if one.has_begun and not is_final(one.text)]
    assert (bool(final), bool(cut)) == (True, True)
    tally.tried, tally.acknowledged = KILLS, len(final)
    tally.lost = sum(len(one.talk.committed()) != 1 for one in final)
