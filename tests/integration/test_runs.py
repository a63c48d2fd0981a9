"""Runs: their figures, limits, end and erasure, and that a name may be used anew."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import string
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.answering import Answer, Answering
from helpers.pages import overwrite, pages

from integration.cli import answer
from integration.cli import run as command
from integration.interrupting import latency
from integration.places import Places
from integration.stand import HOURS, Stand, Talk, error_of, serving, until, user
from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog
from turnlog.errors import NotFound


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("runs"), sglang.base_url) as made:
        yield made


def named() -> str:
    return f"run-{uuid.uuid4().hex}"


def played(stand: Stand, run: str, reward: float | None = None, **body: Any) -> Talk:
    talk = stand.talk(run=run, **body)
    talk.say("Hello")
    if reward is not None:
        assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
        assert stand.http.delete(talk.path).status_code == 204
    return talk


def put(stand: Stand, run: str, /, **body: Any) -> httpx.Response:
    return stand.http.put(f"/runs/{run}", json=body)


def refusal(response: httpx.Response) -> tuple[tuple[int, str], str]:
    return error_of(response), response.json()["error"]["message"]


def lines(stand: Stand, **parameters: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stand.http.get("/events", params=parameters).content.splitlines()]


def test_the_pages_first_view_of_a_run(used: Stand) -> None:
    """By weight version, without evaluations and without the groups of the same names of another run."""
    run, other = named(), named()

    def rollout(of: str, group: str, reward: float | None, *versions: int, **body: Any) -> Talk:
        talk = used.talk(run=of, group_id=group, **body)
        for version in versions:
            talk.say("Hello", sim={"weight_versions": [str(version)]})
        if reward is not None:
            assert used.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
            assert used.http.delete(talk.path).status_code == 204
        return talk

    for reward in (0.0, 1.0):
        rollout(run, "mixed", reward, 3, 5)
        rollout(run, "flat", 0.25, 5)
        rollout(other, "mixed", 0.75, 9)
    rollout(run, "mixed", 0.5, 8, evaluation=True)
    rollout(run, "stuck", 0.9, 6, attempt=0, group_size=3)
    failed = rollout(run, "stuck", None, 6, attempt=1)
    assert used.http.post(f"{failed.path}/close", json={"failed": {"kind": "agent"}}).status_code == 204
    replaced = rollout(run, "again", None, attempt=0)
    rollout(run, "again", 0.4, 5, attempt=0)
    refused = replaced.chat([user("Fail")], sim={"fault": "missing_prompt_ids"})
    assert refused.status_code == 502, refused.text
    last = rollout(run, "alone", None, 6)
    assert last.chat([*last.messages, user("Fail")], sim={"fault": "missing_prompt_ids"}).status_code == 502

    view = used.get(f"/ui/api/runs/{run}")
    assert view["run"] == used.get(f"/runs/{run}")
    at_six = {"version": 6, "sessions": 3, "open": 1, "turns": 3, "rewarded": 1, "mean_reward": 0.9, "engine_errors": 1}
    at_five = {
        "version": 5,
        "sessions": 5,
        "open": 0,
        "turns": 7,
        "rewarded": 5,
        "mean_reward": 1.9 / 5,
        "engine_errors": 0,
    }
    assert view["versions"] == [
        {**at_six, "failed": 1, "tool_errors": 0, "staleness": 0.0},
        {**at_five, "mean_reward": pytest.approx(1.9 / 5), "failed": 0, "tool_errors": 0, "staleness": (2 + 2) / 5},
    ]
    assert view["failed"] == {"agent": 1}
    groups = view["groups"]
    assert (groups["rewarded"], groups["flat"]) == (4, 1)
    assert [one["group_id"] for one in groups["lowest"]] == ["flat", "again", "mixed", "stuck"]
    assert [one["group_id"] for one in groups["zero_variance"]] == ["flat"]
    assert [(one["group_id"], one["arrived"]) for one in groups["stuck"]] == [("stuck", 2), ("alone", 1)]
    listed = {one["group_id"]: one for one in used.get("/groups", run=run)["groups"]}
    assert all(listed[one["group_id"]] == {**one, "run": run} for one in groups["lowest"])
    assert view["gates"] == []
    assert used.http.post(f"/runs/{run}/fleet/pause", json={"lease_s": 60}).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(last.say, "Now?")
        until(lambda: [one["held"] for one in used.get(f"/ui/api/runs/{run}")["gates"]] == [1])
        [gate] = used.get(f"/ui/api/runs/{run}")["gates"]
        assert (gate["of"], gate["adapter"], gate["reason"]) == ("run", None, "abort")
        assert used.get(f"/ui/api/runs/{other}")["gates"] == []
        assert used.http.post(f"/runs/{run}/fleet/resume").status_code == 200
        assert waits.result(20).status_code == 200
    assert error_of(used.http.get(f"/ui/api/runs/{named()}")) == (404, "not_found")


def test_the_figures_of_a_run(used: Stand) -> None:
    run, other = named(), named()
    assert error_of(used.http.get(f"/runs/{run}")) == (404, "not_found")
    talks = [played(used, run, reward, group_id=f"{run}-{reward}") for reward in (0.0, 1.0)]
    failed = played(used, run)
    assert used.http.put(f"{failed.path}/reward", json={"reward": 9.0}).status_code == 200
    closed = used.http.post(f"{failed.path}/close", json={"failed": {"kind": "sandbox"}})
    assert closed.status_code == 204, closed.text
    talks.append(failed)
    live, judged = used.talk(run=run), used.talk(run=run, evaluation=True)
    assert used.http.put(f"{judged.path}/reward", json={"reward": 90.0}).status_code == 200
    live.say("Hello", sim={"weight_version": "7"})
    judged.say("Hello", sim={"weight_version": "900"})
    assert used.http.put(f"{judged.path}/reward", json={"reward": 9.0}).status_code == 200
    child = used.talk(parent_session_id=live.id)
    refused = child.chat([user("Fail")], sim={"fault": "missing_prompt_ids"})
    assert refused.status_code == 502, refused.text
    fork = used.http.post(f"{live.path}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    played(used, other, 0.5, group_id=f"{run}-0.0")
    line = used.http.get("/export/groups", params={"consumer": run, "run": run}).text
    assert [json.loads(one)["run"] for one in line.splitlines()] == [run]
    found = used.get(f"/runs/{run}")
    committed = [event for talk in (*talks, live, judged) for event in talk.committed()]
    assert found == {
        "run": run,
        "status": "open",
        "limits": {"live": None, "tokens": None},
        "metadata": None,
        "note": None,
        "sessions": {"open": 4, "closed": 3, "erased": 0},
        "turns": 6,
        "engine_errors": 1,
        "tool_errors": 0,
        "groups": {"complete": 2, "handed_out": 1, "acknowledged": 0},
        "reward": {"count": 2, "mean": 0.5, "std": 0.5**0.5, "min": 0.0, "max": 1.0, "zero_variance": False},
        "failed": {"sandbox": 1},
        "weight_versions": {"newest": 7, "oldest_live": 7},
        "first_at": talks[0].events()[0]["at"],
        "last_at": found["last_at"],
        "tokens": {
            "prompt": sum(event["base_tokens"] + event["suffix_tokens"] for event in committed),
            "generated": sum(event["output_tokens"] for event in committed),
        },
        "errors": {"upstream_invalid": 1},
    }
    live.say("Go on")
    assert used.get(f"/runs/{run}")["tokens"]["generated"] == found["tokens"]["generated"] + sum(
        event["output_tokens"] for event in live.committed()[1:]
    )
    assert fork in {one["session_id"] for one in used.get("/sessions", run=run)["sessions"]}


def failing(code: int) -> dict[str, Any]:
    return {"role": "user", "content": f"<returncode>{code}</returncode>\n<output>\nno\n</output>"}


def test_a_session_the_list_its_group_and_its_run_count_the_same_errors(used: Stand) -> None:
    """Over commits, rejections, abandoned turns, refusals, rollbacks, a fork, a restore and a restart."""
    run = named()
    fields = {"run": run, "group_id": "counted", "rollback_window": 2}
    talk, short = used.talk(**fields, attempt=0), used.talk(**fields, attempt=1, limits={"turns": 1})

    def agree(*expected: tuple[int, int]) -> None:
        """`expected` are those of the engine and of tools, of each session of the run as they were created."""
        listed = [one for one in used.get("/sessions", run=run, order="asc")["sessions"] if one["status"] != "undone"]
        counts = {one["session_id"]: (one["engine_errors"], one["tool_errors"]) for one in listed}
        assert tuple(counts.values()) == expected
        states = {name: used.get(f"/sessions/{name}/state") for name in counts}
        assert {name: (one["engine_errors"], one["tool_errors"]) for name, one in states.items()} == counts
        attempts = used.get("/groups/counted", run=run)["attempts"]
        assert {one["session_id"]: (one["engine_errors"], one["tool_errors"]) for one in attempts} == counts
        figures = used.get(f"/runs/{run}")
        assert (figures["engine_errors"], figures["tool_errors"]) == tuple(map(sum, zip(*expected, strict=True)))
        assert sum(figures["errors"].values()) == figures["engine_errors"]
        for place, kind in enumerate(("engine_errors", "tool_errors")):
            asked = {f"min_{kind}": 1, "sort": kind, "run": run}
            found = [one["session_id"] for one in used.get("/sessions", **asked)["sessions"]]
            assert set(found) == {name for name, both in counts.items() if both[place]}
            assert found == sorted(found, key=lambda name: counts[name][place], reverse=True)

    talk.say("Go")
    talk.add(failing(1), failing(0), failing(2))
    agree((0, 2), (0, 0))
    refused = talk.chat([*talk.messages, failing(3)], sim={"fault": "missing_prompt_ids"})
    assert refused.status_code == 502, refused.text
    short.add(failing(1))
    for _ in range(2):  # the first is noted
        assert short.chat([*short.messages, user("More")]).status_code == 409
    agree((1, 2), (1, 1))
    assert used.http.post("/checkpoints", json={"name": run, "run": run}).status_code == 200
    latency(used, HOURS)
    waits = used.meanwhile(talk.chat, [*talk.messages, user("Wait")])
    used.until_generating(talk, 4)
    latency(used, 0.0)
    assert used.http.delete(short.path).status_code == 204
    used.server.kill()
    used.server.start()
    used.end()
    assert isinstance(waits.exception(), httpx.HTTPError)
    talk.messages = talk.messages[:2]
    talk.add(failing(4))
    agree((2, 1), (1, 1))
    fork = used.http.post(f"{talk.path}/fork", json={"turn": talk.committed()[-1]["turn"], "group_id": "counted"})
    assert fork.status_code == 200, fork.text
    agree((2, 1), (1, 1), (0, 1))
    assert used.http.post(f"/checkpoints/{run}/restore", params={"run": run}).status_code == 200
    agree((1, 2), (1, 1))
    talk.messages = talk.messages[:2]
    talk.add(failing(1))
    agree((1, 1), (1, 1))


def test_a_list_of_runs_has_those_with_a_session_and_those_given_something(used: Stand) -> None:
    prefix = named()
    names = [f"{prefix}-{number}" for number in range(5)]
    for name in names[::2]:
        used.talk(run=name)
    for name in names[1::2]:
        assert put(used, name, note=name, metadata={"seed": 1}).status_code == 200
    with Turnlog(used.base_url) as client:
        listed = {one["run"]: one for one in client.runs() if one["run"].startswith(prefix)}
        assert list(listed) == names
        assert client.put_run(names[0], live=3, note="n")["limits"] == {"live": 3, "tokens": None}
        assert client.run(names[1])["note"] == names[1]
        client.close_run(names[1])
        assert client.erase_run(names[3])
        with pytest.raises(NotFound):
            client.run(names[3])
    assert [(one["note"], one["metadata"]) for one in listed.values()][:2] == [(None, None), (names[1], {"seed": 1})]
    pages: list[str] = []
    cursor = None
    while cursor is not None or not pages:
        page = used.get("/runs", limit=1, **({} if cursor is None else {"cursor": cursor}))
        pages += [one["run"] for one in page["runs"]]
        cursor = page["next_cursor"]
    assert [name for name in pages if name.startswith(prefix)] == [names[0], names[1], names[2], names[4]]
    assert names[2] in command("runs", "--limit", "1000", "--url", used.base_url).stdout
    assert "1 open" in command("run", names[2], "--url", used.base_url).stdout
    command("run", names[2], "--close", "--url", used.base_url)
    assert used.get(f"/runs/{names[2]}")["status"] == "closed"


@pytest.mark.parametrize(
    "body",
    [{"limits": {"live": 0}}, {"limits": {"turns": 1}}, {"note": 1}, {"metadata": []}, {"run": "x"}],
    ids=str,
)
def test_bad_input_is_refused(used: Stand, body: dict[str, Any]) -> None:
    assert error_of(put(used, named(), **body)) == (400, "invalid_request")
    for name in ("...", "a%20b", "x" * 129):
        assert used.http.put(f"/runs/{name}", json={}).status_code in (400, 404)
    assert error_of(used.http.get("/runs", params={"cursor": "x"})) == (400, "invalid_request")
    for method in ("GET", "DELETE"):
        assert error_of(used.http.request(method, f"/runs/{named()}")) == (404, "not_found")


def test_a_closed_run_takes_no_session(used: Stand) -> None:
    run = named()
    talk = played(used, run)
    child = used.talk(parent_session_id=talk.id)
    for _ in range(2):
        assert used.http.delete(f"/runs/{run}").status_code == 204
    assert [used.known(one.id).types()[-1] for one in (talk, child)] == ["SessionClosed"] * 2
    for response in (
        used.http.post("/sessions", json={"run": run}),
        used.http.post(f"{talk.path}/fork", json={"turn": 1}),
        put(used, run, note="again"),
    ):
        assert refusal(response) == ((409, "session_closed"), f"run {run} is closed")
    assert used.get(f"/runs/{run}")["status"] == "closed"


def test_past_its_tokens_a_run_takes_no_session_and_no_turn(used: Stand) -> None:
    run, other = named(), named()
    talk, elsewhere = played(used, run), played(used, other)
    spent = sum(event["output_tokens"] for event in talk.committed())
    key = {"idempotency-key": "once"}
    given = talk.chat([*talk.messages, user("More")], headers=key)
    assert given.status_code == 200
    spent = sum(event["output_tokens"] for event in talk.committed())
    assert put(used, run, limits={"tokens": spent}).json()["limits"] == {"live": None, "tokens": spent}
    why = ((409, "over_budget"), f"run {run} has reached its limit on tokens: {spent} of {spent}")
    turn = talk.chat([*talk.messages, user("Other")])
    assert turn.headers["x-should-retry"] == "false"
    for response in (turn, used.http.post("/sessions", json={"run": run})):
        assert refusal(response) == why
    again = talk.chat([*talk.messages, user("More")], headers=key)
    assert again.json() == given.json()  # what was committed is given again
    elsewhere.say("Unconcerned")
    put(used, run, limits={"tokens": spent + 1})
    talk.say("Go on")
    until(lambda: talk.chat([*talk.messages, user("Late")]).status_code == 409)
    put(used, run)
    talk.say("Without a limit")


def test_an_erased_run_leaves_nothing_and_its_name_may_be_used_anew(used: Stand) -> None:
    run, secret = named(), uuid.uuid4().hex
    put(used, run, note=secret, metadata={"secret": secret}, limits={"live": 9})
    talks = [played(used, run, 1.0, group_id=run), played(used, run)]
    child = used.talk(parent_session_id=talks[1].id, metadata={"secret": secret})
    talks[1].say(secret)
    bystander = played(used, named())
    position = lines(used, after="end")[-1]["position"]
    for _ in range(2):
        assert used.http.delete(f"/runs/{run}", params={"erase": "true"}).status_code == 204
    told = lines(used, after=position)
    erased = {event["session_id"] for event in told if event.get("type") == "SessionErased"}
    assert erased == {talk.id for talk in (*talks, child)}
    assert error_of(used.http.get(f"/runs/{run}")) == (404, "not_found")
    assert run not in {one["run"] for one in used.get("/runs", limit=1000)["runs"]}
    assert used.rows(session_id=talks[0].id) == []
    bystander.say("Still here")
    anew = played(used, run)
    found = used.get(f"/runs/{run}")
    assert (found["sessions"], found["turns"], found["note"]) == ({"open": 1, "closed": 0, "erased": 0}, 1, None)
    assert found["limits"] == {"live": None, "tokens": None}
    assert found["tokens"]["generated"] == sum(event["output_tokens"] for event in anew.committed())


def test_a_run_that_cannot_be_erased_holds_up_no_other(sglang: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path, sglang.base_url) as stand:
        bad = stand.talk(run="a")
        text = "".join(random.Random(7).choices(string.ascii_letters, k=50_000))
        assert bad.annotate("long", text).is_success
        played(stand, "b")
        stand.server.stop()
        path = stand.server.database_path
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for run in ("a", "b"):
                connection.execute("INSERT INTO runs (run, status) VALUES (?, 'erasing')", (run,))
        overwrite(path, [page.number for page in pages(path, "events", kind="overflow")], "zeros", random.Random(7))
        stand.server.start()
        until(lambda: stand.http.get("/runs/b").status_code == 404)
        assert stand.get("/runs/a")["status"] == "erasing"
        until(lambda: "run a cannot be closed or erased yet" in stand.server.log_path.read_text())
        assert error_of(stand.http.delete("/runs/a", params={"erase": "true"})) == (500, "session_unreadable")


def test_an_erasure_that_goes_on_elsewhere_is_not_called_done() -> None:
    with Answering(lambda asked: Answer(status=202 if "later" in asked.path else 204)) as server:
        with Turnlog(server.base_url) as client:
            assert [client.erase_run(name) for name in ("now", "later")] == [True, False]
            assert [client.attach(name).erase() for name in ("now", "later")] == [True, False]
        for name, status in (("now", "erased"), ("later", "erasing")):
            assert answer("run", name, "--erase", "--url", server.base_url) == {"run": name, "status": status}


def test_the_limit_on_live_sessions_is_exact(places: Places, sglang: SimulatorProcess) -> None:
    """Also of two processes that create at once, in batches, by forks and below a root."""
    place, run, most = places.new("live"), named(), 7
    with serving(place, sglang.base_url) as stand:
        servers = [stand.server]
        if place.postgres is not None:
            other = ServerProcess(
                place.folder, upstreams=[sglang.base_url], environment=VERBATIM, database_url=stand.url
            )
            servers.append(other.start())
        assert put(stand, run, limits={"live": most}).status_code == 200
        root = played(stand, run)
        bodies = [{"run": run}, {"run": run, "parent_session_id": root.id}]

        def create(number: int) -> httpx.Response:
            base = servers[number % len(servers)].base_url
            if number % 5 == 0:
                return httpx.post(f"{base}{root.path}/fork", json={"turn": 1}, timeout=60)
            return httpx.post(f"{base}/sessions", json=bodies[number % 3 == 0], timeout=60)

        with ThreadPoolExecutor(16) as threads:
            replies = list(threads.map(create, range(48)))
        refused = [one for one in replies if one.status_code != 200]
        assert len(replies) - len(refused) == most - 1
        why = ((409, "over_budget"), f"run {run} has reached its limit on live sessions: {most} of {most}")
        assert {refusal(one) for one in refused} == {why}
        assert stand.http.post("/sessions", json={"run": run, "session_id": root.id}).status_code in (200, 409)
        stand.talk(run=named())
        assert stand.http.delete(root.path).status_code == 204
        assert stand.get(f"/runs/{run}")["sessions"]["open"] < most
        stand.talk(run=run)
        if len(servers) > 1:
            servers[1].stop()
