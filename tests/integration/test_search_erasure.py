"""What is erased is not found, and its words are on no disk, once that is answered: also over a crash in between."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.looking import value

from app.crash_points import VARIABLE
from integration.places import Places
from integration.stand import Stand, serving, until
from integration.test_search import ON, ask, current
from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def searched(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("search-erasure"), sglang.base_url, environment=ON) as made:
        yield made


def words_left(stand: Stand, word: str) -> list[str]:
    """The files, or the table on PostgreSQL, that have the word. FTS5 stores one without the beginning that it shares
    with the word before."""
    if not stand.url.startswith("sqlite"):
        rows = value(stand.url, f"SELECT count(*) FROM search_messages WHERE text LIKE '%{word}%'")
        return ["search_messages"] if rows else []
    path = Path(stand.server.database_path)
    contents = {file.name: file.read_bytes() for file in path.parent.glob(f"{path.name}*")}
    parts = [part.encode() for part in (word, word[10:], word[:20])]
    return [name for name, content in contents.items() if any(part in content for part in parts)]


def test_words_of_an_erased_session_are_nowhere(searched: Stand) -> None:
    word = f"canary{uuid.uuid4().hex}"
    talk, other = searched.talk(), searched.talk()
    for number in range(5):
        talk.say(f"{word} number {number}", sim={"text": f"answer {word}{number}"})
        other.say(f"Hello {number}")
    assert len(current(searched, q=word)["hits"]) == 5
    assert words_left(searched, word) != []
    assert searched.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert words_left(searched, word) == []
    assert ask(searched, q=word)["hits"] == []
    assert current(searched, q=word)["hits"] == []
    assert len(current(searched, q="hello")["hits"]) == 5


def test_a_crash_before_the_words_go_is_made_good(searched: Stand) -> None:
    """Nobody asks again: the follower finds the erasure in the log."""
    word = f"canary{uuid.uuid4().hex}"
    talk = searched.talk()
    talk.say(f"A {word}")
    assert len(current(searched, q=word)["hits"]) == 1
    searched.server.stop()
    searched.server.environment[VARIABLE] = "after_erase"
    searched.server.start()
    with pytest.raises(httpx.TransportError):
        searched.http.delete(talk.path, params={"erase": True})
    assert words_left(searched, word) != []
    searched.server.stop()
    del searched.server.environment[VARIABLE]
    searched.server.start()
    until(lambda: searched.http.get("/search", params={"q": "a"}).json()["is_current"])
    assert ask(searched, q=word)["hits"] == []
    if searched.url.startswith("sqlite"):
        assert f"{searched.server.database_path.name}.search" not in words_left(searched, word)
    else:
        assert words_left(searched, word) == []
