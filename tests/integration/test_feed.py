"""The training feed over HTTP: who gets which groups, what comes again, what is in a line."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.looking import change, value

from integration.places import Places
from integration.routing import BOTH, Session, problems, session_of
from integration.stand import Stand, Talk, error_of, serving, until
from ops.simulator.process import SimulatorProcess


@pytest.fixture
def fresh(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of the test's own, whose newest weight version is the test's."""
    with serving(places.new("feed"), sglang.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("feed"), sglang.base_url) as made:
        yield made


@pytest.fixture
def swept(used: Stand) -> Stand:
    """A server on which no complete group waits: the feed gives whatever does, whoever made it."""
    ask(used, "sweeper")
    expire(used)
    ack(used, "sweeper", *ids(ask(used, "sweeper", 1000)))
    return used


def finish(talk: Talk, stand: Stand, reward: float | None) -> None:
    if reward is not None:
        assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204


def a_group(
    stand: Stand,
    rewards: Sequence[float] = (0.0, 1.0),
    version: str = "3",
    *,
    group: str | None = None,
    run: str | None = None,
    **sim: Any,
) -> str:
    """A complete group of one-turn sessions with these rewards."""
    group = group or uuid.uuid4().hex
    for attempt, reward in enumerate(rewards):
        talk = stand.talk(group_id=group, attempt=attempt, run=run)
        talk.say("Hello", sim={"weight_version": version, **sim})
        finish(talk, stand, reward)
    return group


def ask(stand: Stand, consumer: str, size: int = 1, **parameters: Any) -> list[dict[str, Any]]:
    response = stand.http.get("/export/groups", params={"consumer": consumer, "size": size, **parameters})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.content.splitlines()]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["group_id"] for line in lines if "rows" in line]


def reasons(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["group_id"]: line["excluded"] for line in lines if "rows" not in line}


def ack(stand: Stand, consumer: str, *groups: str, **of_run: str) -> dict[str, list[str]]:
    response = stand.http.post("/export/groups/ack", json={"consumer": consumer, "groups": groups, **of_run})
    assert response.status_code == 200, response.text
    found: dict[str, list[str]] = response.json()
    return found


def expire(stand: Stand) -> None:
    """As if every lease had ended."""
    change(stand.url, "UPDATE groups SET lease_until = lease_until - 100000")


def test_a_line_is_a_whole_group_with_its_rows(swept: Stand) -> None:
    group = a_group(swept, (0.0, 1.0, 1.0))
    [line] = ask(swept, "trainer", 4)
    assert line["group_id"] == group
    assert [one["attempt"] for one in line["attempts"]] == [0, 1, 2]
    assert [one["reward"] for one in line["attempts"]] == [0.0, 1.0, 1.0]
    assert line["statistics"] == {
        "count": 3,
        "mean": pytest.approx(2 / 3),
        "std": pytest.approx(math.sqrt(1 / 3)),
        "min": 0.0,
        "max": 1.0,
        "zero_variance": False,
    }
    assert (line["handed_out"], line["staleness"], line["excluded"]) == (1, 0, [])
    assert [row["session_id"] for row in line["rows"]] == [one["session_id"] for one in line["attempts"]]
    std = math.sqrt(1 / 3)
    for row in line["rows"]:
        assert row["group_id"] == group
        assert row["final"] is True
        assert row["advantage"] == pytest.approx((row["reward"] - 2 / 3) / (std + 1e-6))
        [exported] = swept.rows(session_id=row["session_id"], advantage="grpo")
        for name in ("tokens", "logprobs", "loss_mask", "weight_versions", "messages", "advantage"):
            assert row[name] == exported[name], name


def test_what_is_not_acknowledged_in_time_goes_to_whoever_asks(swept: Stand) -> None:
    made = [a_group(swept) for _ in range(2)]
    assert ids(ask(swept, "dead", 2)) == made
    assert ids(ask(swept, "alive", 2)) == []
    expire(swept)
    assert ids(ask(swept, "alive", 1)) == made[:1]
    late = ack(swept, "dead", *made)
    assert late == {"acknowledged": [made[1]], "already": [], "not_leased": [made[0]], "unknown": []}
    assert ack(swept, "alive", made[0], "nonsense") == {
        "acknowledged": [made[0]],
        "already": [],
        "not_leased": [],
        "unknown": ["nonsense"],
    }


def test_a_group_is_its_runs(swept: Stand) -> None:
    """Two runs with groups of the same ids: what is given, leased, acknowledged and computed is each run's own."""
    run_a, run_b = f"a-{uuid.uuid4().hex}", f"b-{uuid.uuid4().hex}"
    group = a_group(swept, (0.0, 1.0), run=run_a)
    a_group(swept, (2.0, 2.0, 8.0), group=group, run=run_b)
    swept.talk(group_id=group, run=run_b, attempt=3)
    asked = swept.http.get(f"/groups/{group}")
    assert error_of(asked) == (400, "invalid_request")
    assert run_a in asked.text
    assert run_b in asked.text
    assert ask(swept, "trainer", 9, explain=True) == [], "the default run has none, and learns of none"
    assert reasons(ask(swept, "trainer", 9, run=run_b, explain=True)) == {
        group: "incomplete: 1 of 4 sessions are open, or neither rewarded nor failed"
    }
    [line] = ask(swept, "trainer", 9, run="*")
    assert (line["run"], line["group_id"], line["statistics"]["count"]) == (run_a, group, 2)
    assert [round(row["advantage"], 3) for row in line["rows"]] == [-0.707, 0.707]
    [row] = swept.rows(session_id=line["rows"][0]["session_id"], advantage="grpo")
    assert round(row["advantage"], 3) == -0.707, "an export's too"
    [open_one] = [one for one in swept.get("/sessions", run=run_b)["sessions"] if one["status"] == "open"]
    finish(swept.known(open_one["session_id"]), swept, 8.0)
    [other] = ask(swept, "rival", 9, run=run_b)
    assert (other["run"], other["statistics"]["count"]) == (run_b, 4)
    assert ack(swept, "trainer", group)["unknown"] == [group]
    assert ack(swept, "trainer", group, run=run_b)["not_leased"] == [group]
    assert ack(swept, "trainer", group, run=run_a)["acknowledged"] == [group]
    expire(swept)
    assert [one["run"] for one in ask(swept, "trainer", 9, run="*")] == [run_b]
    assert ask(swept, "trainer", 9, run=run_a) == []
    a_group(swept, group=group)
    seen = {run: swept.get(f"/groups/{group}", **({} if run is None else {"run": run})) for run in (None, run_a, run_b)}
    assert {run: (one["run"], one["arrived"]) for run, one in seen.items()} == {
        None: ("default", 2),
        run_a: (run_a, 2),
        run_b: (run_b, 4),
    }
    listed: list[dict[str, Any]] = []
    page: dict[str, Any] = {"next_cursor": None}
    while page["next_cursor"] is not None or not listed:
        cursor = {} if page["next_cursor"] is None else {"cursor": page["next_cursor"]}
        page = swept.get("/groups", limit=1, **cursor)
        listed += page["groups"]
    assert [(one["run"], one["state"]) for one in listed if one["group_id"] == group] == [
        (run_a, "acknowledged"),
        (run_b, "leased"),
        ("default", "complete"),
    ]
    assert [one["group_id"] for one in swept.get("/groups", run=run_a)["groups"]] == [group]


def test_a_group_waits_for_its_size_and_a_later_session_replaces_one_without_a_reward(swept: Stand) -> None:
    group, talks = uuid.uuid4().hex, []
    for attempt, reward in ((0, None), (0, 1.0), (1, 0.0)):
        assert ids(ask(swept, "trainer")) == []
        talks.append(swept.talk(group_id=group, attempt=attempt, group_size=2))
        talks[-1].say("Hello")
        if reward is None:
            agent = swept.talk(parent_session_id=talks[0].id)
            agent.say("Look")
        finish(talks[-1], swept, reward)
        if reward == 1.0:
            assert reasons(ask(swept, "trainer", explain=True)) == {group: "incomplete: 1 of 2 attempts"}
            assert swept.get(f"/groups/{group}")["complete"] is False
    replaced, *rest = [talk.id for talk in talks]
    for shape, rows in (("turnlog", 2), ("atropos", 1)):
        [line] = ask(swept, "trainer", shape=shape)
        assert [one["session_id"] for one in line["attempts"]] == rest
        assert len(line["rows"]) == rows
        assert line["excluded"] == [{"session_id": replaced, "reason": "replaced", "lost_tokens": None}]
        assert line["statistics"]["count"] == 2
    [row, *left_out] = swept.rows(group_id=group, shape="atropos", explain="true")
    assert row["session_ids"] == rest
    lost = {one["session_id"]: one["lost_tokens"] for one in left_out if one["excluded"] == "replaced"}
    assert lost == {talk.id: talk.committed()[0]["output_tokens"] for talk in (talks[0], agent)}
    [line] = ask(swept, "trainer", explain=True)
    assert [one["lost_tokens"] for one in line["excluded"]] == [sum(lost.values())]
    told = swept.get(f"/groups/{group}")
    assert (told["group_size"], told["arrived"], told["complete"]) == (2, 2, True)
    assert [one["session_id"] for one in told["attempts"] if one["replaced"]] == [replaced]
    assert swept.http.put(f"/sessions/{replaced}/reward", json={"reward": 0.5}).status_code == 200
    [line] = ask(swept, "trainer")
    assert (line["statistics"]["count"], line["excluded"]) == (3, [])


def test_stale_groups_stay_and_are_explained(fresh: Stand) -> None:
    old, middle, new = (a_group(fresh, version=version) for version in ("3", "5", "9"))
    found = ask(fresh, "trainer", 9, max_staleness=2, explain=True)
    assert ids(found) == [new]
    assert reasons(found).keys() == {old, middle}
    assert all(reason.startswith("stale: ") for reason in reasons(found).values())
    lost = {line["group_id"]: line["lost_tokens"] for line in found if "rows" not in line}
    assert lost == {group: sum(sum(row["loss_mask"]) for row in fresh.rows(group_id=group)) for group in lost}
    assert ids(ask(fresh, "other", 9, max_staleness=2)) == []
    [line] = ask(fresh, "other", 9, max_staleness=2, weight_version=7)
    assert (line["group_id"], line["staleness"]) == (middle, 2)
    [line] = ask(fresh, "third", 9)
    assert (line["group_id"], line["staleness"]) == (old, 6)


def test_only_complete_groups_are_given(swept: Stand) -> None:
    group = uuid.uuid4().hex
    one, two = (swept.talk(group_id=group) for _ in range(2))
    for talk in (one, two):
        talk.say("Hello")
    finish(one, swept, 1.0)
    assert ids(ask(swept, "trainer")) == []
    assert "1 of 2" in reasons(ask(swept, "trainer", explain=True))[group]
    finish(two, swept, None)
    assert ids(ask(swept, "trainer")) == []
    swept.http.put(f"{two.path}/reward", json={"reward": 0})
    assert "of 3 attempts" in reasons(ask(swept, "trainer", attempts=3, explain=True))[group]
    assert ids(ask(swept, "trainer", attempts=3)) == []
    assert ids(ask(swept, "trainer", attempts=2)) == [group]


def test_an_erased_session_is_named_and_the_others_are_given(swept: Stand) -> None:
    group = uuid.uuid4().hex
    one, gone, empty = (swept.talk(group_id=group, attempt=number) for number in range(3))
    for talk in (one, gone):
        talk.say("Hello")
    for reward, talk in enumerate((one, gone, empty)):
        finish(talk, swept, float(reward))
    assert swept.http.delete(gone.path, params={"erase": "true"}).status_code == 204
    [line] = ask(swept, "trainer", attempts=3)
    assert [row["session_id"] for row in line["rows"]] == [one.id]
    assert {one["session_id"]: one["reason"] for one in line["excluded"]} == {
        gone.id: "erased",
        empty.id: "no committed turn",
    }
    assert line["statistics"]["count"] == 2


def test_a_stale_group_is_given_with_what_its_request_asks_of_its_rows(fresh: Stand) -> None:
    """Its stale tokens are out of the loss; branches, loss and rewards of turns are as in an export."""
    a_group(fresh, version="9")
    group = uuid.uuid4().hex
    talk = fresh.talk(group_id=group, history="tree")
    for beginning in ("One", "Two"):
        talk.messages = []
        talk.say(beginning, sim={"weight_version": "3"})
    for turn, reward in ((1, 0.25), (2, -1.0)):
        put = fresh.http.put(f"{talk.path}/reward", json={"reward": reward, "turn": turn})
        assert put.status_code == 200, put.text
    finish(talk, fresh, 1.0)
    assert group not in ids(ask(fresh, "trainer", 9, max_staleness=2))
    given = {line["group_id"]: line for line in ask(fresh, "mask", 9, max_staleness=2, stale="mask")}
    assert given[group]["staleness"] == 6
    for row in given[group]["rows"]:
        assert (row["staleness"], row["stale_tokens"]) == (6, sum(row["sampled_mask"]))
        assert not any(row["loss_mask"])
    expire(fresh)
    [line] = [
        line
        for line in ask(fresh, "turns", 9, shape="skyrl", rewards="turn", branches="main")
        if line["group_id"] == group
    ]
    [row] = line["rows"]
    assert len(row["rewards"]) == len(row["response_ids"])
    assert [reward for reward in row["rewards"] if reward] == [1.0], "the last turn's own and the rest"


def test_versions_that_are_no_numbers_have_no_staleness(swept: Stand) -> None:
    group = a_group(swept, version="step-4")
    [line] = ask(swept, "trainer", max_staleness=0, weight_version=100)
    assert (line["group_id"], line["staleness"]) == (group, None)
    assert "number" in line["staleness_unknown"]


def test_rows_are_cut_as_in_an_export(swept: Stand) -> None:
    a_group(swept)
    [line] = ask(swept, "trainer", max_seq_len=1)
    assert line["rows"] == []
    assert [one["reason"] for one in line["excluded"]] == ["max_seq_len: no turn fits"] * 2
    [line] = ask(swept, "trainer")
    length = max(row["prompt_length"] for row in line["rows"]) + 1
    [line] = ask(swept, "trainer", max_seq_len=length, truncate="token")
    assert [(len(row["tokens"]), row["status"]) for row in line["rows"]] == [(length, "truncated")] * 2


BAD_PARAMETERS = (
    *(({"consumer": name}, "consumer") for name in ("", "a b", "x" * 129, "a\n")),
    *(({"size": size}, "size") for size in (0, "many")),
    *(({"lease_s": lease_s}, "lease_s") for lease_s in (0.5, 86401, "nan")),
    ({"max_staleness": -1}, "max_staleness"),
    ({"weight_version": "latest"}, "weight_version"),
    ({"attempts": 0}, "attempts"),
    ({"max_seq_len": 0}, "max_seq_len"),
    ({"truncate": "middle"}, "truncate"),
    ({"new_only": "perhaps"}, "new_only"),
    ({"shape": "none"}, "shape"),
    *(({"run": run}, "run") for run in ("", "a b", "**", "*\n")),
    ({"session_id": "s"}, "session_id"),
    ({"metadata": "task=1"}, "metadata"),
)
BAD_ACKNOWLEDGEMENTS: tuple[tuple[Any, str], ...] = (
    ({"groups": []}, "consumer"),
    ({"consumer": "a/b", "groups": []}, "consumer"),
    ({"consumer": "c"}, "groups"),
    ({"consumer": "c", "groups": [], "run": "*"}, "run"),
    ({"consumer": "c", "groups": "g"}, "groups"),
    ({"consumer": "c", "groups": [1]}, "groups.0"),
    ({"consumer": "c", "groups": [], "more": 1}, "more"),
    ([], "body"),
)


def test_what_is_wrong_in_a_request_is_named(stand: Stand) -> None:
    asked = [({}, "consumer"), *(({"consumer": "trainer", **query}, named) for query, named in BAD_PARAMETERS)]
    refused = [(stand.http.get("/export/groups", params=query), named) for query, named in asked]
    refused += [(stand.http.post("/export/groups/ack", json=body), named) for body, named in BAD_ACKNOWLEDGEMENTS]
    for response, named in refused:
        assert error_of(response) == (400, "invalid_request"), named
        assert named in response.json()["error"]["message"]


@pytest.fixture
def retaining(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(
        places.new("retaining"),
        sglang.base_url,
        environment={
            **BOTH,
            "TURNLOG_RETAIN_UNTIL_ACK": "true",
            "TURNLOG_CLOSED_REPLAY_TTL_S": "0",
            "TURNLOG_CLOSED_TTL_S": "1",
        },
    ) as made:
        yield made


def test_retention_waits_for_the_acknowledgement(retaining: Stand) -> None:
    stand = retaining
    waiting, alone = session_of(stand, group_id="g"), session_of(stand)
    for talk in (waiting, alone):
        talk.say("Hello")
        finish(talk, stand, 1.0)
    until(lambda: "SessionErased" in alone.types())
    assert waiting.types()[-1] == "SessionClosed"
    assert payload_bytes(waiting) > 0
    [line] = ask(stand, "trainer")
    assert [row["session_id"] for row in line["rows"]] == [waiting.id]
    assert payload_bytes(waiting) > 0
    ack(stand, "trainer", "g")
    until(lambda: "BlobsTombstoned" in waiting.types())
    until(lambda: "SessionErased" in waiting.types())
    until(lambda: payload_bytes(waiting) == 0)
    assert problems(stand) == []


def payload_bytes(talk: Session) -> int:
    query = "SELECT coalesce(sum(length(data)), 0) FROM chunks WHERE session_id = :id"
    return int(value(talk.stand.url, query, id=talk.id))


def test_other_shapes_are_given_whole(swept: Stand) -> None:
    group = a_group(swept)
    [line] = ask(swept, "trainer", shape="slime")
    assert line["group_id"] == group
    assert len(line["rows"]) == 2
    assert all("response_length" in row and "messages" not in row for row in line["rows"])
    [line] = ask(swept, "trainer", shape="atropos")
    assert len(line["rows"]) == 1, "a row of this shape is a whole group"
    assert len(line["rows"][0]["scores"]) == 2
