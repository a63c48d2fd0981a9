"""The search: what it finds, live, on both databases; and that it forgets what is erased."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.cli import answer, complaint, run
from integration.places import Places
from integration.stand import Stand, Talk, error_of, serving, until, user
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog

ON = {"TURNLOG_SEARCH": "on"}


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


def places_of(found: dict[str, Any]) -> list[tuple[str, int, int | None]]:
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
    assert searched.http.put(f"{other.path}/note", json={"tags": [word]}).status_code == 200
    assert searched.http.delete(other.path).status_code == 204
    refused = talk.chat([*talk.messages, user("Bad")], sim={"fault": "null_logprob"})
    assert refused.status_code == 502
    assert len(current(searched, q=word)["hits"]) == 4
    for parameters, wanted in (
        ({"q": word, "role": "tool"}, [(talk.id, 2, 4)]),
        ({"tool": f"look_{word}"}, [(talk.id, 2, 4), (talk.id, 2, 3)]),
        ({"q": word, "tag": word}, [(other.id, 1, 0)]),
        ({"q": word, "status": "closed"}, [(other.id, 1, 0)]),
        ({"q": word, "session_id": other.id}, [(other.id, 1, 0)]),
        ({"metadata": f"env.name={word}", "role": "user"}, [(talk.id, 2, 2), (talk.id, 1, 0)]),
        ({"q": word, "metadata": "level=4"}, [(other.id, 1, 0)]),
        ({"q": word, "metadata": "level=5"}, []),
        ({"q": word, "attempt": 2}, [(other.id, 1, 0)]),
        ({"q": f"another {word}", "engine": engine}, [(other.id, 1, 0)]),
        ({"q": word, "engine": f"{engine}/other"}, []),
        ({"q": word, "min_staleness": 10**9}, []),
        ({"q": word, "unrewarded": True}, [(other.id, 1, 0)]),
        ({"q": word, "role": "tool", "min_reward": 0.5, "max_reward": 0.5}, [(talk.id, 2, 4)]),
        ({"finish_reason": "stop", "session_id": other.id}, [(other.id, 1, 1)]),
        ({"role": "rejected", "group_id": word}, [(talk.id, 3, None)]),
        ({"reason": "upstream_invalid", "group_id": "none"}, []),
    ):
        assert places_of(ask(searched, **parameters)) == wanted, parameters


def test_an_odd_name_does_not_stop_the_index(searched: Stand) -> None:
    """PostgreSQL's text holds no NUL: one such name had kept the index from everything behind it."""
    word = uuid.uuid4().hex
    call = {"id": "c1", "type": "function", "function": {"name": "lo\0ok", "arguments": "{}"}}
    talk = searched.talk()
    said = [user(word), {"role": "assistant", "content": None, "tool_calls": [call]}, user("and?")]
    assert talk.chat(said).status_code == 200
    assert places_of(current(searched, q=word)) == [(talk.id, 1, 0)]
    assert places_of(ask(searched, tool="lo ok", session_id=talk.id)) == [(talk.id, 1, 1)]


def test_metrics_tell_how_far_the_index_is(searched: Stand) -> None:
    before = indexed(searched)
    talk = searched.talk()
    talk.say("One turn of two messages")
    current(searched, q="turn")
    after = indexed(searched)
    assert after['turnlog_search_indexed_total{kind="turns"}'] > before['turnlog_search_indexed_total{kind="turns"}']
    messages = 'turnlog_search_indexed_total{kind="messages"}'
    assert after[messages] >= before[messages] + 2
    until(lambda: indexed(searched)["turnlog_search_behind_events"] == 0)
    assert indexed(searched)["turnlog_search_behind_seconds"] == 0
    assert after["turnlog_search_failures_total"] == 0


def indexed(stand: Stand) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in stand.http.get("/metrics").text.splitlines())
    return {name: float(value) for name, _, value in lines if name.startswith("turnlog_search")}


def test_pages_continue_where_they_ended(searched: Stand) -> None:
    word = f"heron{uuid.uuid4().hex[:8]}"
    talks = [searched.talk() for _ in range(3)]
    for number in range(4):
        for talk in talks:
            talk.say(f"{word} number {number}")
    whole = places_of(current(searched, q=word, limit=100))
    assert len(whole) == 12
    found, cursor = [], None
    while True:
        page = ask(searched, q=word, limit=5, **({} if cursor is None else {"cursor": cursor}))
        found += places_of(page)
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == whole


def test_what_is_rolled_back_is_marked_and_a_fork_adds_only_what_is_its_own(searched: Stand) -> None:
    word = f"lynx{uuid.uuid4().hex[:8]}"
    talk = searched.talk(history="linear")
    talk.say(f"{word} one")
    talk.say(f"{word} two")
    talk.messages = talk.messages[:2]
    talk.say(f"{word} three")
    fork = searched.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    own = searched.known(fork)
    own.messages = talk.messages[:2]
    own.say(f"{word} four")
    found = current(searched, q=word)["hits"]
    assert [(hit["session_id"], hit["turn"], hit["reason"]) for hit in found] == [
        (fork, 2, None),
        (talk.id, 3, None),
        (talk.id, 2, "superseded"),
        (talk.id, 1, None),
    ]
    assert [hit["turn"] for hit in ask(searched, q=word, reason="superseded")["hits"]] == [2]


def test_a_restore_hides_what_it_set_aside(searched: Stand) -> None:
    word = f"moose{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    talk.say(f"{word} one")
    assert searched.http.post("/checkpoints", json={"name": word}).status_code == 200
    talk.say(f"{word} two")
    assert len(current(searched, q=word)["hits"]) == 2
    assert searched.http.post(f"/checkpoints/{word}/restore").status_code == 200
    assert [hit["turn"] for hit in current(searched, q=word)["hits"]] == [1]
    assert [hit["turn"] for hit in ask(searched, q=word, reason="set aside")["hits"]] == [2]


def test_an_erased_session_is_not_found_any_more(searched: Stand) -> None:
    word = f"quagga{uuid.uuid4().hex[:8]}"
    talk, other = searched.talk(metadata={"a": word}), searched.talk()
    for number in range(3):
        talk.say(f"{word} number {number}")
    other.say(f"A {word} that stays")
    assert len(current(searched, q=word)["hits"]) == 4
    assert searched.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert places_of(ask(searched, q=word)) == [(other.id, 1, 0)]
    assert ask(searched, metadata=f"a={word}")["hits"] == []


def test_the_index_is_made_anew_on_request_and_goes_on_after_a_restart(searched: Stand) -> None:
    word = f"dodo{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    talk.say(f"{word} one")
    assert len(current(searched, q=word)["hits"]) == 1
    assert searched.http.post("/search/reindex").status_code == 204
    assert len(current(searched, q=word)["hits"]) == 1
    searched.server.stop()
    searched.server.start()
    talk.say(f"{word} two")
    assert [hit["turn"] for hit in current(searched, q=word)["hits"]] == [2, 1]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"status": "open"},
        {"q": ""},
        {"q": "..."},
        {"q": "-word"},
        {"q": "\0"},
        {"q": "a " * 40},
        {"q": "a", "limit": 101},
        {"q": "a", "cursor": "nonsense"},
        {"metadata": "novalue"},
        {"q": "a", "session_id": "a b"},
    ],
)
def test_a_bad_search_is_refused(searched: Stand, parameters: dict[str, Any]) -> None:
    reply = searched.http.get("/search", params=parameters)
    assert error_of(reply) == (400, "invalid_request"), reply.text


@pytest.mark.parametrize("query", ['a"b', "a OR", "OR a", "NOT a", "a*", "(a", "a AND b", "text:a", "é", "日本"])
def test_no_text_is_a_fault_of_the_database(searched: Stand, query: str) -> None:
    ask(searched, q=query)


def test_without_the_setting_nothing_is_searched(stand: Stand) -> None:
    assert error_of(stand.http.get("/search", params={"q": "a"})) == (400, "search_off")
    assert error_of(stand.http.post("/search/reindex")) == (400, "search_off")


def test_words_of_an_erased_session_are_in_no_file(sglang: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path, sglang.base_url, environment=ON) as stand:
        word = f"canary{uuid.uuid4().hex}"
        talk, other = stand.talk(metadata={"owner": word}), stand.talk()
        for number in range(5):
            talk.say(f"{word} number {number}", sim={"text": f"answer {word}{number}"})
            other.say(f"Hello {number}")
        assert len(current(stand, q=word)["hits"]) == 5
        files = list(stand.server.database_path.parent.glob(f"{stand.server.database_path.name}*"))
        assert any(word.encode() in file.read_bytes() for file in files)
        assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
        # FTS5 stores a word without the beginning that it shares with the word before.
        for part in (word, word[10:], word[:20]):
            assert [file.name for file in files if part.encode() in file.read_bytes()] == []
        assert len(current(stand, q="hello")["hits"]) == 5


def test_the_client_and_the_command_line_give_every_page(
    searched: Stand, clean_environment: Callable[..., None]
) -> None:
    clean_environment(URL=searched.server.base_url)
    word = f"ibis{uuid.uuid4().hex[:8]}"
    talk = searched.talk()
    for number in range(25):
        talk.say(f"{word} number {number}")
    current(searched, q=word)
    with Turnlog(searched.server.base_url) as client:
        assert [hit["turn"] for hit in client.search(word, role="user")] == list(range(25, 0, -1))
    first = answer("search", word, "--limit", "20")
    rest = answer("search", word, "--cursor", first["next_cursor"])
    assert [hit["turn"] for hit in first["hits"] + rest["hits"]] == list(range(25, 0, -1))
    shown = run("search", word, "--limit", "1").stdout.splitlines()
    assert shown[1].split()[:4] == [talk.id, "25", "48", "user"]
    assert "being made anew" in run("search", "--reindex").stderr
    assert "stands alone" in complaint("search", word, "--reindex", code=2)
    assert run("note", talk.id, "Seen.", "--tag", word).stdout == ""
    assert [row["note"] for row in answer("sessions", "--tag", word)["sessions"]] == ["Seen."]
    assert "is needed" in complaint("note", talk.id, code=2)
