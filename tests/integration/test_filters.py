"""Filters by run, group and metadata: each route that has them gives the same sessions, on both databases."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from integration.cli import answer, complaint, run
from integration.places import Places
from integration.stand import Stand, Talk, error_of, serving, until
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog

WORD = "zebra"

SETTINGS = {"TURNLOG_FEATURES": "all", "TURNLOG_FILE_ROOT": tempfile.gettempdir()}

SESSIONS: Mapping[str, dict[str, Any]] = {
    "a-0": {"run": "a", "group_id": "g/1", "metadata": {"task": 0}},
    "a-1": {"run": "a", "group_id": "g/1", "metadata": {"task": 1}},
    "a-agent": {"parent_session_id": "a-0"},
    "a-2": {"run": "a", "group_id": "h", "metadata": {"task": 1, "env": {"name": "maze"}}},
    "b-0": {"run": "b", "group_id": "g/1", "metadata": {"task": "0"}},
    "none": {"group_id": "k", "metadata": {"task": 9}},
    "bare": {},
}

Given = dict[str, Any]

TABLE: list[tuple[Given, str, str, str]] = [
    # The filter; the sessions that have it, the agents whose root has it, and the groups of which a root has it.
    ({}, "a-0 a-1 a-agent a-2 b-0 none bare", "", "g/1 h k"),
    ({"run": "a"}, "a-0 a-1 a-agent a-2", "", "g/1 h"),
    ({"run": "default"}, "none bare", "", "k"),
    ({"run": "never"}, "", "", ""),
    ({"group_id": "g/1"}, "a-0 a-1 b-0", "a-agent", "g/1"),
    ({"group_id": ["g/1", "h", "x"]}, "a-0 a-1 a-2 b-0", "a-agent", "g/1 h"),
    ({"group_prefix": "g/"}, "a-0 a-1 b-0", "a-agent", "g/1"),
    ({"group_prefix": "g/1/"}, "", "", ""),
    ({"group_prefix": "", "run": "a"}, "a-0 a-1 a-2", "a-agent", "g/1 h"),
    ({"run": "b", "group_id": ["g/1", "h"]}, "b-0", "", "g/1"),
    ({"run": "a", "group_id": "g/1", "group_prefix": "h"}, "", "", ""),
    ({"metadata.task": "0"}, "a-0 b-0", "", "g/1"),
    ({"metadata.task": ["1", "9"]}, "a-1 a-2 none", "", "g/1 h k"),
    ({"metadata.env.name": "maze", "metadata.task": "1"}, "a-2", "", "h"),
    ({"metadata.never": "1"}, "", "", ""),
    ({"run": "a", "group_prefix": "g", "metadata.task": "0"}, "a-0", "", "g/1"),
]


@pytest.fixture(scope="module")
def filled(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("filters"), sglang.base_url, environment=SETTINGS) as made:
        talks = {name: made.talk(session_id=name, **given) for name, given in SESSIONS.items()}
        for talk in talks.values():
            talk.say(f"Find the {WORD}")
        for name in [name for name in talks if name != "a-agent"]:
            ended(made, talks[name])
        until(lambda: made.get("/search", q=WORD)["is_current"])
        yield made


def ended(stand: Stand, talk: Talk) -> None:
    stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).raise_for_status()
    stand.http.delete(talk.path).raise_for_status()


def lines(stand: Stand, path: str, **given: Any) -> list[dict[str, Any]]:
    reply = stand.http.get(path, params=given)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.content.splitlines()]


def pages(stand: Stand, path: str, name: str, limit: int, **given: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = stand.get(path, limit=limit, **given, **({} if cursor is None else {"cursor": cursor}))
        found += page[name]
        if (cursor := page["next_cursor"]) is None:
            return found


ROUTES: Mapping[str, Callable[..., list[dict[str, Any]]]] = {
    "/sessions": lambda stand, **given: pages(stand, "/sessions", "sessions", 2, **given),
    "/ui/api/sessions": lambda stand, **given: pages(stand, "/ui/api/sessions", "sessions", 2, **given),
    "/search": lambda stand, **given: pages(stand, "/search", "hits", 1, q=WORD, role="user", **given),
    "/export": lambda stand, **given: lines(stand, "/export", **given),
    "/events": lambda stand, **given: lines(stand, "/events", type="TurnCommitted", **given),
    "/groups": lambda stand, **given: pages(stand, "/groups", "groups", 1, **given),
}


def told(route: str, one: dict[str, Any]) -> list[str]:
    """What a line or item is about; a position alone is about nothing."""
    if route == "/groups":
        return [one["group_id"]]
    return [one["session_id"]] if "session_id" in one else []


def test_every_route_gives_the_sessions_of_every_filter(filled: Stand) -> None:
    wrong = []
    for given, own, agents, groups in TABLE:
        every = own.split() + agents.split()
        expected = {"/groups": groups.split(), "/export": every, "/events": every}
        for route, ask in ROUTES.items():
            found = sorted({name for one in ask(filled, **given) for name in told(route, one)})
            if found != sorted(expected.get(route, own.split())):
                wrong.append((given, route, found))
        assert filled.get("/ui/api/exports", **given)["sessions"] == len(every)
    assert wrong == []


def test_a_limit_of_events_counts_those_that_match(filled: Stand) -> None:
    whole = [one for one in lines(filled, "/events", **{"metadata.task": "1"}) if "session_id" in one]
    after, found = {}, []
    while some := [one for one in lines(filled, "/events", limit=2, **{"metadata.task": "1"}, **after) if "seq" in one]:
        assert len(some) <= 2
        found += some
        after = {"after": some[-1]["position"]}
    assert [one["position"] for one in found] == [one["position"] for one in whole]
    assert {one["session_id"] for one in found} == {"a-1", "a-2"}


def test_rows_name_their_run(filled: Stand) -> None:
    runs = {row["session_id"]: row["run"] for row in lines(filled, "/export")}
    assert runs == {name: {"a": "a", "b": "b"}.get(name[:2].rstrip("-"), "default") for name in SESSIONS}
    assert {row["run"] for row in lines(filled, "/export", shape="tree", run="b")} == {"b"}
    assert {row["metadata"]["turnlog"]["run"] for row in lines(filled, "/export", shape="slime", run="b")} == {"b"}


def test_a_whole_group_is_a_row_where_one_of_its_roots_has_the_metadata(filled: Stand) -> None:
    def groups(**given: Any) -> list[list[str]]:
        rows = lines(filled, "/export", shape="atropos", advantage="grpo", **given)
        return sorted(sorted(row["session_ids"]) for row in rows)

    assert groups(**{"metadata.task": "0"}) == [["a-0", "a-1", "a-agent"], ["b-0"]]
    assert groups(**{"metadata.task": "1"}, run="a") == [["a-0", "a-1", "a-agent"], ["a-2"]]
    assert groups(**{"metadata.task": "8"}) == []


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        ({"group_id": ["k", "x"]}, ["k"]),
        ({"group_prefix": "k"}, ["k"]),
        ({"metadata.task": "9"}, ["k"]),
        ({"metadata.task": "8"}, []),
        ({"group_prefix": "kk"}, []),
        ({"group_id": "x"}, []),
    ],
)
def test_the_feed_hands_out_what_the_filter_names(filled: Stand, given: Given, groups: list[str]) -> None:
    """The consumer's own groups are given to it again, filtered too."""
    asked = {"consumer": "filters", "size": 5, **given}
    assert [group["group_id"] for group in lines(filled, "/export/groups", **asked)] == groups
    waiting = lines(filled, "/export/groups", **asked, explain="true", new_only="true")
    assert [one["group_id"] for one in waiting] == groups


@pytest.mark.parametrize("route", ["/sessions", "/ui/api/sessions", "/search", "/groups", "/export"])
def test_a_cursor_belongs_to_its_filter(filled: Stand, route: str) -> None:
    given = {"limit": 1, **({"q": WORD} if route == "/search" else {})}
    if route == "/export":
        cursor = lines(filled, route, **given, run="a")[0]["cursor"]
    else:
        cursor = filled.get(route, **given, run="a")["next_cursor"]
    assert filled.http.get(route, params={**given, "run": "a", "cursor": cursor}).status_code == 200
    for other in ({}, {"run": "b"}, {"run": "a", "metadata.task": "0"}):
        refused = filled.http.get(route, params={**given, **other, "cursor": cursor})
        assert error_of(refused) == (400, "invalid_request")
        assert "other filters" in refused.text


BAD: list[Given] = [
    {"run": "a b"},
    {"run": "*"},
    {"run": "r" * 129},
    {"group_id": "g\0"},
    {"group_id": ["g"] * 101},
    {"group_prefix": "\0"},
    {"metadata": "task=1"},
    {"metadata.": "1"},
    {"metadata.task": "\0"},
    {f"metadata.{number}": "1" for number in range(21)},
    {"metadata_task": "1"},
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_a_bad_filter_is_refused_everywhere(filled: Stand, given: Given) -> None:
    for route in (*ROUTES, "/ui/api/exports"):
        more = {"q": WORD} if route == "/search" else {}
        if route == "/ui/api/sessions" and given in ({"metadata_task": "1"}, {"metadata.": "1"}):
            continue  # the page's own route ignores what it does not know
        refused = filled.http.get(route, params={**more, **given})
        assert error_of(refused) == (400, "invalid_request"), route
        assert next(iter(given)).partition(".")[0] in refused.text


def test_the_client_and_the_command_line_have_them(filled: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"run": "a", "group_id": ["g/1", "h"], "metadata": {"task": 1}}
    with Turnlog(filled.base_url) as client:
        assert {one["session_id"] for one in client.sessions(**given)} == {"a-1", "a-2"}
        assert {one["session_id"] for one in client.search(WORD, **given)} == {"a-1", "a-2"}
        assert {row["session_id"] for row in client.export(**given)} == {"a-1", "a-2"}
        assert {event["session_id"] for event in client.events(**given)} == {"a-1", "a-2"}
        assert [group["group_id"] for group in client.groups(run="a", metadata={"task": 1})] == ["g/1", "h"]
        assert {one["session_id"] for one in client.sessions(metadata={"task": [1, 9]})} == {"a-1", "a-2", "none"}
    monkeypatch.setenv("TURNLOG_URL", filled.base_url)
    flags = ("--run", "a", "--group", "g/1", "--group", "h", "--metadata", "task=1")
    assert {one["session_id"] for one in answer("sessions", *flags)["sessions"]} == {"a-1", "a-2"}
    assert {one["session_id"] for one in answer("search", WORD, *flags)["hits"]} == {"a-1", "a-2"}
    assert [one["group_id"] for one in answer("groups", "--group-prefix", "g", "--run", "b")["groups"]] == ["g/1"]
    exported = [json.loads(line) for line in run("export", *flags).stdout.splitlines()]
    assert {row["session_id"] for row in exported} == {"a-1", "a-2"}
    followed = [json.loads(line) for line in run("tail", "--json", *flags).stdout.splitlines()]
    assert {event["session_id"] for event in followed if "seq" in event} == {"a-1", "a-2"}
    assert "KEY=VALUE" in complaint("sessions", "--metadata", "task", code=2)
    assert "filters" in complaint("groups", "g/1", "--group", "h", code=2)


def test_an_archive_takes_the_rollouts_that_the_filter_names(filled: Stand, tmp_path: Path) -> None:
    run_name = uuid.uuid4().hex
    for number in range(2):
        talk = filled.talk(run=run_name, metadata={"task": number})
        talk.say("Once")
        ended(filled, talk)

    def archived(**given: Any) -> int:
        body = {"to": tmp_path.as_uri(), "older_than_s": 0, **given}
        reply = filled.http.post("/archives", json=body)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["archived"])

    for none in (
        {"run": "never"},
        {"run": run_name, "group_prefix": "g"},
        {"run": run_name, "metadata": {"task": "7"}},
    ):
        assert archived(**none) == 0
    assert archived(run=run_name, metadata={"task": 0}) == 1
    [left] = filled.get("/sessions", run=run_name)["sessions"]
    assert (
        answer("archive", "--older-than", "0s", "--to", tmp_path.as_uri(), "--run", run_name, "--url", filled.base_url)[
            "archived"
        ]
        == 1
    )
    assert left["run"] == run_name
    refused = filled.http.post("/archives", json={"to": tmp_path.as_uri(), "older_than_s": 0, "run": "a b"})
    assert error_of(refused) == (400, "invalid_request")
