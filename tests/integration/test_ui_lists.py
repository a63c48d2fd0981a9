"""What the page shows of all sessions: the overview, groups, checkpoints, and what an export would leave out."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from integration.stand import Stand, error_of, until, user


def test_the_list_refuses_what_it_does_not_know(stand: Stand) -> None:
    wrong = {
        "state": "odd",
        "sort": "name",
        "limit": 501,
        "min_reward": "nan",
        "q": "a b",
        "cursor": "x",
        "stuck_s": -1,
    }
    for name, value in wrong.items():
        refused = stand.http.get("/ui/api/sessions", params={name: value})
        assert error_of(refused) == (400, "invalid_request"), name


def listed_groups(stand: Stand) -> Any:
    return stand.http.get("/groups", params={"limit": 500}).json()["groups"]


def test_groups_are_listed_with_what_makes_them_useless(stand: Stand) -> None:
    name = uuid.uuid4().hex
    rewards = {"alike": (1.0, 1.0), "differ": (0.0, 1.0), "lacking": (None, 1.0)}
    for group, values in rewards.items():
        for attempt, value in enumerate(values):
            talk = stand.talk(group_id=f"{name}-{group}", attempt=2 * attempt)
            if value is not None:
                stand.http.put(f"{talk.path}/reward", json={"reward": value}).raise_for_status()
            stand.http.delete(talk.path).raise_for_status()
    found: dict[str, Any] = {}
    cursor: str | None = None
    while True:
        page = stand.http.get("/groups", params={"limit": 2, **({} if cursor is None else {"cursor": cursor})}).json()
        found |= {group["group_id"]: group for group in page["groups"]}
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert list(found) == sorted(found)
    alike, differ, lacking = (found[f"{name}-{group}"] for group in rewards)
    assert (alike["zero_variance"], alike["std"], alike["state"]) == (True, 0.0, "complete")
    assert (differ["zero_variance"], differ["mean"], differ["std"]) == (False, 0.5, pytest.approx(0.5**0.5))
    assert (differ["min"], differ["max"], differ["missing_attempts"]) == (0.0, 1.0, [1])
    assert (lacking["sessions"], lacking["closed"], lacking["rewarded"], lacking["state"]) == (2, 2, 1, "open")
    taken = {"consumer": "ui", "size": 1000}
    stand.http.get("/export/groups", params=taken).raise_for_status()
    assert next(one for one in listed_groups(stand) if one["group_id"] == alike["group_id"])["state"] == ("leased")
    acknowledged = {"consumer": "ui", "groups": [alike["group_id"]]}
    stand.http.post("/export/groups/ack", json=acknowledged).raise_for_status()
    states = {one["group_id"]: one["state"] for one in listed_groups(stand)}
    assert states[alike["group_id"]] == "acknowledged"
    assert stand.http.get("/groups", params={"cursor": "é"}).status_code == 400


SHAPES = [
    {},
    {"shape": "atropos", "min_reward": 0.75},
    {"max_seq_len": 60, "truncate": "token"},
]


@pytest.mark.parametrize("asked", SHAPES, ids=lambda asked: "-".join(map(str, asked.values())) or "all")
def test_a_preview_counts_what_the_export_gives(stand: Stand, asked: dict[str, Any]) -> None:
    """Of one group, so that others' sessions on this server do not come between."""
    group = uuid.uuid4().hex
    talks = [stand.talk(group_id=group, attempt=number) for number in range(4)]
    for number, talk in enumerate(talks[:3]):
        talk.say("One")
        if number:
            talk.say("Two")
            talk.messages = talk.messages[:2]
            talk.say("Other")
        stand.http.put(f"{talk.path}/reward", json={"reward": number / 2}).raise_for_status()
        stand.http.delete(talk.path).raise_for_status()
    found = stand.get("/ui/api/exports", group_id=group, **asked)
    rows = stand.rows(group_id=group, explain=True, **asked)
    left_out = [row["excluded"] for row in rows if row.get("excluded") is not None]
    given = [row for row in rows if row.get("excluded") is None]
    assert found["complete"]
    assert found["cursor"] is None
    assert found["rows"] == len(given)
    if "shape" not in asked:
        assert found["tokens"] == sum(len(row["tokens"]) for row in given)
        assert found["trained_tokens"] == sum(sum(row["loss_mask"]) for row in given)
        assert found["sessions"] == len({row["session_id"] for row in given})
    details = [example["detail"] for one in found["missing"] for example in one["examples"]]
    assert sorted(details) == sorted(left_out)
    assert [one["count"] for one in found["missing"]] == [len(one["examples"]) for one in found["missing"]]
    assert left_out


def test_a_turn_that_waits_at_a_gate_is_shown_as_such(stand: Stand) -> None:
    talk = stand.talk(adapter="gated-one")
    stand.http.post("/adapters/gated-one/pause", json={}).raise_for_status()
    waiting = stand.meanwhile(talk.say, "Wait")
    try:
        until(lambda: stand.get("/ui/api/sessions", state="paused")["total"] == 1)
        [row] = stand.get("/ui/api/sessions", state="paused")["sessions"]
        assert (row["session_id"], row["state"], row["running_since"]) == (talk.id, "paused", None)
        assert stand.get(f"/ui/api/sessions/{talk.id}")["state"] == "paused"
        assert talk.id not in [row["session_id"] for row in stand.get("/ui/api/sessions", state="idle")["sessions"]]
        until(lambda: stand.get("/ui/api/overview")["sessions"]["paused"] == 1)
        assert "gated-one" in [one["name"] for one in stand.get("/ui/api/overview")["adapters"] if one["paused"]]
    finally:
        stand.http.post("/adapters/gated-one/resume").raise_for_status()
    waiting.result()
    assert stand.get("/ui/api/sessions", state="paused")["sessions"] == []


def test_columns_of_metadata(stand: Stand) -> None:
    """A key with dots is looked up as it is first, then as a path; what is too long is cut, what is none is missing."""
    given = {"task": "math", "env": {"name": "web", "size": 3}, "a.b": True, "long": "x" * 500, "none": None}
    stand.talk(session_id="columns-1", metadata=given)
    stand.talk(session_id="columns-2")
    gone = stand.talk(session_id="columns-3", metadata=given)
    assert stand.http.delete(gone.path, params={"erase": True}).status_code == 204
    columns = "task,env.name, env.size,a.b,long,none,env"
    page = stand.get("/ui/api/sessions", q="columns-", columns=columns)
    assert len(page["sessions"]) == 3
    assert page["metadata"] == {
        "columns-1": {"task": "math", "env.name": "web", "env.size": "3", "a.b": "true", "long": "x" * 200 + "…"}
    }, "the first six columns"
    assert stand.get("/ui/api/sessions", q="columns-")["metadata"] == {}


def test_the_overview_says_what_is_going_on(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello", sim={"weight_version": "123456"})
    assert talk.chat([*talk.messages, user("Bad")], sim={"fault": "missing_meta_info"}).status_code == 502
    slow = stand.meanwhile(talk.chat, [*talk.messages, user("Slow")], sim={"latency_s": 30.0})
    stand.until_generating(talk, 3)

    def now() -> dict[str, Any]:
        return dict(stand.get("/ui/api/overview"))

    until(lambda: stand.get("/ui/api/sessions", q=talk.id, state="running")["total"] == 1)
    until(lambda: now()["sessions"]["running"] >= 1)
    found = now()
    assert found["weight_version"] >= 123456
    assert found["sessions"]["idle"] <= found["sessions"]["open"] - 1
    assert found["sessions"]["active"] >= 1
    assert found["turns_per_s"] > 0
    assert 0 < found["overhead_ms"]["p50"] <= found["overhead_ms"]["p99"]
    assert found["engine_ms"]["p50"] > 0
    assert found["errors"]["upstream_invalid"] >= 1
    assert found["errors_total"]["upstream_invalid"] >= found["errors"]["upstream_invalid"]
    assert found["engines"] == stand.http.get("/engines").json()["engines"]
    assert found["gate"].keys() == stand.http.get("/fleet").json().keys()
    assert found["database"]["bytes"] > 0
    assert abs(found["at"] - time.time()) < 60
    stand.http.delete(talk.path).raise_for_status()
    slow.result()
    assert not stand.get("/ui/api/overview", run="default")["gate"]["paused"]
    stand.http.post("/fleet/pause", json={"mode": "abort", "lease_s": 600}).raise_for_status()
    try:
        until(lambda: stand.get("/ui/api/overview", run="default")["gate"]["paused"])
        gate = stand.get("/ui/api/overview", run="default")["gate"]
        assert (gate["mode"], gate["lease_left_s"] > 0) == ("abort", True), "the whole fleet's gate is shut"
    finally:
        stand.http.post("/fleet/resume").raise_for_status()
