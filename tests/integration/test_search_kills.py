"""`kill -9` of a server that fills the search's index: each message is found once, whatever was half written."""

from __future__ import annotations

import uuid
from collections import Counter

from integration.places import Places
from integration.stand import serving
from integration.test_search import ON, ask, current, places_of
from ops.simulator.process import SimulatorProcess

KILLS, TURNS = 3, 4


def test_each_message_is_found_once_after_kills(sglang: SimulatorProcess, places: Places) -> None:
    word = f"gnu{uuid.uuid4().hex[:8]}"
    with serving(places.new("search-kills"), sglang.base_url, environment=ON) as stand:
        talks = [stand.talk() for _ in range(3)]
        for kill in range(KILLS):
            for _ in range(TURNS):
                for talk in talks:
                    talk.say(f"{word} {kill}")
            stand.server.kill()
            stand.server.start()
        places_found = places_of(current(stand, q=word, limit=100))
        expected = Counter((talk.id, turn, 2 * (turn - 1)) for talk in talks for turn in range(1, KILLS * TURNS + 1))
        assert Counter(places_found) == expected
        assert len(ask(stand, q=f'"{word} 2"', limit=100)["hits"]) == len(talks) * TURNS
