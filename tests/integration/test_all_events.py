"""`GET /events` at a real server: by the client, by the command line, and by readers that do not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from integration.cli import complaint, run
from integration.stand import Stand, error_of, until
from turnlog import Turnlog

Line = dict[str, Any]


def lines(stand: Stand, **parameters: Any) -> list[Line]:
    reply = stand.http.get("/events", params=parameters)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.content.splitlines()]


def end(stand: Stand) -> str:
    """The position behind all that there is."""
    [line] = lines(stand, after="end")
    return str(line["position"])


def own(line: Line) -> Line:
    """The line as its session's own log has it."""
    return {name: value for name, value in line.items() if name not in ("position", "session_id")}


def test_every_sessions_log_is_in_it(stand: Stand) -> None:
    before = end(stand)
    group = "all-events"
    talks = [stand.talk(group_id=group) for _ in range(3)]
    for talk in talks:
        talk.say("Hello")
    stand.http.put(f"{talks[0].path}/reward", json={"reward": 1.0})
    stand.http.delete(talks[1].path)
    stand.http.delete(talks[2].path, params={"erase": "true"})
    found = lines(stand, after=before)
    for talk in talks:
        assert [own(line) for line in found if line["session_id"] == talk.id] == talk.events()
    assert lines(stand, after=before, group_id=group) == found
    for types in (["SessionClosed,RewardAssigned"], ["SessionClosed", "SessionErased"]):
        wanted = ",".join(types).split(",")
        kept = [line for line in found if line["type"] in wanted]
        assert kept
        assert [line for line in lines(stand, after=before, type=types) if "seq" in line] == kept
    kept = [line for line in found if line["session_id"] == talks[0].id]
    assert [line for line in lines(stand, after=before, session_id=talks[0].id) if "seq" in line] == kept
    assert lines(stand, after=before, limit=2) == found[:2]
    assert lines(stand, after=found[1]["position"], limit=2) == found[2:4]


WRONG: tuple[Line, ...] = (
    *({"after": "x"}, {"after": ""}, {"follow": "perhaps"}, {"limit": 0}, {"typ": "SessionClosed"}),
    *({"type": "TurnComitted"}, {"type": ["SessionClosed", ""]}, {"session_id": "a b"}, {"group_id": "a\0b"}),
)


def test_a_wrong_parameter_is_named(stand: Stand) -> None:
    for parameters in WRONG:
        reply, [name] = stand.http.get("/events", params=parameters), parameters
        assert error_of(reply) == (400, "invalid_request")
        assert reply.json()["error"]["message"].startswith(name)
        assert "Value error" not in reply.text


def test_the_client_follows_and_goes_on(stand: Stand) -> None:
    before = end(stand)
    with Turnlog(stand.server.base_url) as client:
        events = client.events(after=before, follow=True, type=["SessionCreated", "SessionClosed"])
        following = iter(events)
        talk = stand.talk()
        assert own(next(following)) == talk.events()[0]
        talk.say("Hello")
        stand.http.delete(talk.path)
        assert next(following)["type"] == "SessionClosed"
        assert [line["type"] for line in client.events(after=before, session_id=talk.id, limit=3)] == talk.types()[:3]
        left = client.events(after=events.position)
        assert [line for line in left if line["session_id"] == talk.id] == []
        assert left.position is not None


def test_the_command_line_prints_them(stand: Stand, clean_environment: Callable[..., None]) -> None:
    clean_environment(URL=stand.server.base_url)
    before = end(stand)
    talk = stand.talk()
    talk.say("Hello")
    printed = run("tail", "--after", before, "--json").stdout.splitlines()
    assert [own(json.loads(line)) for line in printed] == talk.events()
    done = run("tail", "--after", before, "--type", "SessionCreated", "--type", "TurnCommitted")
    assert [line.split()[3:5] for line in done.stdout.splitlines()] == [
        [talk.id, "SessionCreated"],
        [talk.id, "TurnCommitted"],
    ]
    assert done.stderr.startswith("turnlog: continue with --after ")
    position = done.stderr.split()[-1]
    assert run("tail", "--after", position, "--json").stdout.splitlines() == []
    assert len(run("tail", "--after", before, "--limit", "2", "--json").stdout.splitlines()) == 2
    assert "are only for the events of all sessions" in complaint("tail", talk.id, "--type", "TurnCommitted", code=2)
    assert "expected the number" in complaint("tail", talk.id, "--after", "x", code=2)


def test_a_reader_that_leaves_is_forgotten(stand: Stand) -> None:
    def readers() -> float:
        values = stand.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in values if line.startswith("turnlog_event_readers"))

    until(lambda: readers() == 0)
    with stand.http.stream("GET", "/events", params={"follow": "true", "after": "end"}) as reply:
        received = reply.iter_lines()  # kept: the connection ends with it
        assert "position" in next(received)
        assert readers() == 1
    until(lambda: readers() == 0)
