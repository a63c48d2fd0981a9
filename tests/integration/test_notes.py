"""A session's note and tags: where they are seen, how long they last, and that an erasure takes them away."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from app.api.notes import MAX_NOTE, MAX_TAGS
from integration.stand import Stand, Talk, error_of


def noted(stand: Stand, talk: Talk, **body: Any) -> httpx.Response:
    return stand.http.put(f"{talk.path}/note", json=body)


def listed(stand: Stand, tag: str) -> dict[str, tuple[str | None, list[str]]]:
    """The sessions with a tag, in the list for clients; the page's list has the same."""
    reply = stand.http.get("/sessions", params={"tag": tag})
    assert reply.status_code == 200, reply.text
    found = {one["session_id"]: (one["note"], one["tags"]) for one in reply.json()["sessions"]}
    page = stand.http.get("/ui/api/sessions", params={"tag": tag}).json()
    assert {one["session_id"]: (one["note"], one["tags"]) for one in page["sessions"]} == found
    assert page["total"] == len(found)
    return found


def test_a_note_is_seen_wherever_its_session_is(stand: Stand) -> None:
    tag, talk, other = f"loop {uuid.uuid4().hex}", stand.talk(), stand.talk()
    talk.say("Hello")
    assert noted(stand, talk, note="Look at turn 1.", tags=[tag, "é, ü", tag]).status_code == 200
    assert noted(stand, other, tags=[f"{tag}!"]).status_code == 200
    tags = sorted({tag, "é, ü"})
    given = talk.state()["session"]
    assert (given["note"], given["tags"]) == ("Look at turn 1.", tags)
    [row] = talk.rows()
    assert (row["note"], row["tags"]) == ("Look at turn 1.", tags)
    assert listed(stand, tag) == {talk.id: ("Look at turn 1.", tags)}
    assert listed(stand, "é, ü").keys() >= {talk.id}
    assert listed(stand, tag[:-1]) == {}
    view = stand.http.get(f"/ui/api/sessions/{talk.id}").json()
    assert (view["note"], view["tags"]) == ("Look at turn 1.", tags)
    assert talk.events()[-1]["type"] == "SessionNoted"


def test_what_is_not_given_stays_and_what_is_empty_goes(stand: Stand) -> None:
    tag, talk = uuid.uuid4().hex, stand.talk()
    talk.say("Hello")
    for body, note, tags in (
        ({"note": "First"}, "First", []),
        ({"tags": [tag]}, "First", [tag]),
        ({"note": "Second", "tags": None}, "Second", [tag]),
        ({"note": ""}, None, [tag]),
        ({"note": "Third", "tags": []}, "Third", []),
    ):
        assert noted(stand, talk, **body).status_code == 200
        given = talk.state()["session"]
        assert (given["note"], given["tags"]) == (note, tags), body
    assert listed(stand, tag) == {}
    forks = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    assert stand.known(forks[0]["session_id"]).state()["session"]["note"] is None


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "",
        "[]",
        '{"note": null, "tags": null}',
        '{"note": 1}',
        '{"tags": "a"}',
        '{"tags": [1]}',
        '{"tags": [""]}',
        '{"tags": ["a\\nb"]}',
        '{"tags": ["a\\n"]}',
        '{"tags": ["%s"]}' % ("x" * 129),
        '{{"tags": [{}]}}'.format(",".join(f'"{number}"' for number in range(MAX_TAGS + 1))),
        '{"note": "%s"}' % ("x" * (MAX_NOTE + 1)),
        '{"note": "a\\u0000b"}',
        '{"note": "\\ud800"}',
        '{"note": "a", "other": 1}',
    ],
)
def test_a_bad_note_is_refused_and_leaves_no_event(stand: Stand, content: str) -> None:
    talk = stand.talk()
    before = talk.types()
    assert error_of(stand.http.put(f"{talk.path}/note", content=content)) == (400, "invalid_request")
    assert talk.types() == before


def test_a_closed_session_is_noted_and_an_erased_one_has_nothing_left(stand: Stand) -> None:
    word, talk = uuid.uuid4().hex, stand.talk()
    talk.say("Hello")
    assert noted(stand, talk, note=f"A note of {word}").status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    assert noted(stand, talk, tags=[word]).status_code == 200
    assert listed(stand, word) == {talk.id: (f"A note of {word}", [word])}
    assert talk.rows()[0]["tags"] == [word]
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert error_of(noted(stand, talk, note="Again")) == (404, "session_closed")
    assert listed(stand, word) == {}
    left = [event for event in talk.events() if event["type"] == "SessionNoted"]
    assert [(event.get("note"), event.get("tags"), event["erased"]) for event in left] == [(None, None, True)] * 2
    assert error_of(stand.http.put("/sessions/never-seen/note", json={"note": "a"})) == (404, "session_not_found")
