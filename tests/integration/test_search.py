"""The search: what it finds, live, on both databases, also after kills; and that words of an erased session are on no
disk once the erasure is answered."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.looking import value

from app.crash_points import VARIABLE
from integration.cli import answer, complaint, run
from integration.places import Places
from integration.stand import Stand, Talk, error_of, serving, until, user
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog

ON = {"TURNLOG_FEATURES": "all"}


@pytest.fixture(scope="module")
def searched(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("search"), sglang.base_url, environment=ON) as made:
        yield made


def ask(stand: Stand, **parameters: Any) -> dict[str, Any]:
    reply = stand.http.get("/search", params=parameters)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def current(stand: Stand, **parameters: Any) -> dict[str, Any]:
    """The answer once the index has all that was acknowledged before."""
    found: list[dict[str, Any]] = []

    def is_current() -> bool:
        found.append(ask(stand, **parameters))
        return bool(found[-1]["is_current"])

    until(is_current)
    return ask(stand, **parameters)


def places_of(found: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(hit["session_id"], hit["turn"], hit["message"]) for hit in found["hits"]]


def marked(hit: dict[str, Any]) -> list[str]:
    return [hit["snippet"][start:end] for start, end in hit["marks"]]


def with_tools(talk: Talk, word: str) -> None:
    """A turn that calls `look`, and one with its result."""
    call = {"id": "c1", "type": "function", "function": {"name": f"look_{word}", "arguments": '{"at": "the attic"}'}}
    talk.say(f"Find the {word} in the house")
    said = [
        *talk.messages,
        user("Go on"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f"nothing in the attic but a {word}-trap"},
    ]
    assert talk.chat(said).status_code == 200


def test_messages_calls_and_results_are_found_once(searched: Stand) -> None:
    word = f"zebra{uuid.uuid4().hex[:8]}"
    talk = searched.talk(group_id=word, metadata={"env": {"name": word}, "level": 3})
    with_tools(talk, word)
    everything = current(searched, q=word.upper())
    assert places_of(everything) == [(talk.id, 2, 4), (talk.id, 2, 3), (talk.id, 1, 0)]
    assert [hit["role"] for hit in everything["hits"]] == ["tool", "assistant", "user"]
    assert [marked(hit) for hit in everything["hits"]] == [[word]] * 3
    assert everything["hits"][0]["tools"] == [f"look_{word}"]
    assert everything["hits"][0]["group_id"] == word
    assert everything["hits"][0]["run"] == "default"
    for query, turns in (
        (f'"find the {word}"', [1]),
        (f'"the find {word}"', []),
        (f"attic {word} -trap", [2]),
        (f"trap OR find {word}", [2, 1]),
        (f"{word}trap", []),
        (f"house trap {word}", []),
    ):
        assert [hit["turn"] for hit in ask(searched, q=query, group_id=word)["hits"]] == turns, query


def test_fields_narrow_a_search_and_stand_alone(searched: Stand) -> None:
    word = f"okapi{uuid.uuid4().hex[:8]}"
    talk = searched.talk(group_id=word, metadata={"env": {"name": word}, "level": 3})
    with_tools(talk, word)
    other = searched.talk(metadata={"level": 4}, attempt=2)
    other.say(f"Another {word}")
    engine = searched.http.get("/sessions", params={"prefix": other.id}).json()["sessions"][0]["engine"]
    assert searched.http.put(f"{talk.path}/reward", json={"reward": 0.5}).status_code == 200
    other.noted(tags=[word])
    assert searched.http.delete(other.path).status_code == 204
    assert len(current(searched, q=word)["hits"]) == 4
    for parameters, wanted in (
        ({"q": word, "role": "tool"}, [(talk.id, 2, 4)]),
        ({"tool": f"look_{word}"}, [(talk.id, 2, 4), (talk.id, 2, 3)]),
        ({"q": word, "tag": word}, [(other.id, 1, 0)]),
        ({"q": word, "status": "closed"}, [(other.id, 1, 0)]),
        ({"q": word, "session_id": other.id}, [(other.id, 1, 0)]),
        ({"group_id": word, "role": "user"}, [(talk.id, 2, 2), (talk.id, 1, 0)]),
        ({"metadata.env.name": word, "q": word, "role": "user"}, [(talk.id, 1, 0)]),
        ({"q": word, "metadata.env.name": word, "metadata.level": 4}, []),
        ({"q": word, "metadata.level": 4}, [(other.id, 1, 0)]),
        ({"q": word, "metadata.level": 5}, []),
        ({"q": word, "attempt": 2}, [(other.id, 1, 0)]),
        ({"q": f"another {word}", "engine": engine}, [(other.id, 1, 0)]),
        ({"q": word, "engine": f"{engine}/other"}, []),
        ({"q": word, "min_staleness": 10**9}, []),
        ({"q": word, "unrewarded": True}, [(other.id, 1, 0)]),
        ({"q": word, "role": "tool", "min_reward": 0.5, "max_reward": 0.5}, [(talk.id, 2, 4)]),
        ({"finish_reason": "stop", "session_id": other.id}, [(other.id, 1, 1)]),
    ):
        assert places_of(ask(searched, **parameters)) == wanted, parameters


def test_a_fork_adds_only_what_is_its_own(searched: Stand) -> None:
    word = f"lynx{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    talk.say(f"{word} one")
    fork = searched.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    own = searched.known(fork)
    own.messages = talk.messages[:2]
    own.say(f"{word} two")
    assert places_of(current(searched, q=word)) == [(fork, 2, 2), (talk.id, 1, 0)]


def test_a_restore_hides_what_it_undoes_and_shows_it_again(searched: Stand) -> None:
    word = f"moose{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    talk.say(f"{word} one")
    assert searched.http.post("/checkpoints", json={"name": word}).status_code == 200
    talk.say(f"{word} two")
    searched.talk().say(f"{word} of a later session")
    assert len(current(searched, q=word)["hits"]) == 3
    assert searched.http.post(f"/checkpoints/{word}/restore").status_code == 200
    assert places_of(current(searched, q=word)) == [(talk.id, 1, 0)]
    checkpoints = searched.http.get("/checkpoints").json()["checkpoints"]
    before = next(checkpoint["name"] for checkpoint in checkpoints if checkpoint["restores"] == word)
    assert searched.http.post(f"/checkpoints/{before}/restore").status_code == 200
    assert len(current(searched, q=word)["hits"]) == 3


def test_an_index_is_removed_where_the_search_is_off_and_made_anew(searched: Stand) -> None:
    word = f"dodo{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    talk.say(f"{word} one")
    assert len(current(searched, q=word)["hits"]) == 1
    searched.server.stop()
    environment = searched.server.environment
    searched.server.environment = environment | {"TURNLOG_FEATURES": ""}
    searched.server.start()
    assert searched.http.get("/search", params={"q": word}).status_code == 404
    searched.server.stop()
    if searched.url.startswith("sqlite"):
        assert not index_of(searched).exists()
    searched.server.environment = environment
    searched.server.start()
    talk.say(f"{word} two")
    assert [hit["turn"] for hit in current(searched, q=word)["hits"]] == [2, 1]


def index_of(stand: Stand) -> Path:
    return Path(f"{stand.server.database_path}.search")


def test_a_damaged_index_is_made_anew(sglang: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path, sglang.base_url, environment=ON) as stand:
        talk = stand.talk()
        talk.say("A rhinoceros")
        assert len(current(stand, q="rhinoceros")["hits"]) == 1
        assert index_of(stand).stat().st_mode & 0o777 == 0o600
        stand.server.stop()
        index_of(stand).write_bytes(b"not an index" * 1000)
        stand.server.start()
        until(lambda: stand.http.get("/search", params={"q": "rhinoceros"}).status_code == 200)
        assert places_of(current(stand, q="rhinoceros")) == [(talk.id, 1, 0)]


def test_a_bad_search_is_refused_and_no_text_is_a_fault_of_the_database(searched: Stand) -> None:
    odd = ({"limit": 101}, {"cursor": "nonsense"}, {"metadata": "novalue"}, {"session_id": "a b"})
    texts = ("", "...", "-word", "\0", "a " * 40)
    alone: tuple[dict[str, Any], ...] = ({}, {"status": "open"}, {"metadata.a": "b"}, *({"q": text} for text in texts))
    for parameters in (*alone, *({"q": "a", **one} for one in odd)):
        assert error_of(searched.http.get("/search", params=parameters)) == (400, "invalid_request"), parameters
    for query in ('a"b', "a OR", "OR a", "NOT a", "a*", "(a", "a AND b", "text:a", "é", "日本"):
        ask(searched, q=query)


def test_the_client_and_the_command_line_give_every_page(
    searched: Stand, clean_environment: Callable[..., None]
) -> None:
    clean_environment(URL=searched.server.base_url)
    word = f"ibis{uuid.uuid4().hex[:8]}"
    talk = searched.talk(metadata={"of": word})
    for number in range(25):
        talk.say(f"{word} number {number}")
    current(searched, q=word)
    with Turnlog(searched.server.base_url) as client:
        assert [hit["turn"] for hit in client.search(word, role="user", metadata={"of": word})] == list(
            range(25, 0, -1)
        )
    first = answer("search", word, "--limit", "20")
    rest = answer("search", word, "--cursor", first["next_cursor"])
    assert [hit["turn"] for hit in first["hits"] + rest["hits"]] == list(range(25, 0, -1))
    shown = run("search", word, "--limit", "1").stdout.splitlines()
    assert shown[1].split()[:4] == [talk.id, "25", "48", "user"]
    assert run("annotate", talk.id, "note", "Seen.").stdout == ""
    assert answer("annotate", talk.id, "tags", f'["{word}"]')["name"] == "tags"
    assert answer("annotate", talk.id, "judge", "0.5", "--turn", "2", "--writer", "ann")["turn"] == 2
    assert [row["note"] for row in answer("sessions", "--tag", word)["sessions"]] == ["Seen."]
    assert searched.get(f"{talk.path}/turns/2/annotations/judge")["value"] == 0.5


def test_where_it_is_off_the_command_says_so(stand: Stand, clean_environment: Callable[..., None]) -> None:
    """That nothing of it is loaded: test_otel.py."""
    clean_environment(URL=stand.server.base_url)
    assert "TURNLOG_FEATURES" in complaint("search", "word")


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
    word, kept = f"canary{uuid.uuid4().hex}", f"kept{uuid.uuid4().hex}"
    talk, other = searched.talk(), searched.talk()
    for number in range(5):
        talk.say(f"{word} number {number}", sim={"text": f"answer {word}{number}"})
        other.say(f"{kept} {number}")
    assert len(current(searched, q=word)["hits"]) == 5
    assert words_left(searched, word) != []
    assert searched.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert words_left(searched, word) == []
    assert ask(searched, q=word)["hits"] == []
    assert current(searched, q=word)["hits"] == []
    assert len(current(searched, q=kept)["hits"]) == 5


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


KILLS, TURNS = 3, 4


def test_each_message_is_found_once_after_kills(searched: Stand) -> None:
    """Whatever was half written."""
    word = f"gnu{uuid.uuid4().hex[:8]}"
    talks = [searched.talk() for _ in range(3)]
    for kill in range(KILLS):
        for _ in range(TURNS):
            for talk in talks:
                talk.say(f"{word} {kill}")
        searched.server.kill()
        searched.server.start()
    places_found = places_of(current(searched, q=word, limit=100))
    expected = Counter((talk.id, turn, 2 * (turn - 1)) for talk in talks for turn in range(1, KILLS * TURNS + 1))
    assert Counter(places_found) == expected
    assert len(ask(searched, q=f'"{word} 2"', limit=100)["hits"]) == len(talks) * TURNS


def test_an_erasure_while_the_index_is_filled_leaves_no_word(searched: Stand) -> None:
    """Each session is erased as soon as it has turns, so that the follower has read some of them when they go."""
    word = f"canary{uuid.uuid4().hex}"
    for _ in range(10):
        talk = searched.talk()
        for number in range(3):
            talk.say(f"{word} number {number}")
        assert searched.http.delete(talk.path, params={"erase": True}).status_code == 204
    kept = searched.talk()
    kept.say(f"{word} that stays")
    assert places_of(current(searched, q=word)) == [(kept.id, 1, 0)]
    assert searched.http.delete(kept.path, params={"erase": True}).status_code == 204
    assert words_left(searched, word) == []
