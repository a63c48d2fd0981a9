"""A failure is not a reward of 0, and an evaluation does not train: closes that say so, the feed, exports, clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from integration.cli import answer, complaint, run
from integration.places import Places
from integration.routing import problems
from integration.stand import Stand, Talk, error_of, serving
from integration.test_metrics_route import value as metric
from ops.simulator.process import SimulatorProcess
from turnlog import AsyncTurnlog, rollout

SANDBOX = {"kind": "sandbox", "message": "the disk is full"}


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of the module's own: its feed, its newest weight version."""
    with serving(places.new("failures"), sglang.base_url) as made:
        yield made
        assert problems(made) == []


def close(stand: Stand, talk: Talk, failed: Any = None) -> httpx.Response:
    return stand.http.post(f"{talk.path}/close", json={} if failed is None else {"failed": failed})


def reward(stand: Stand, talk: Talk, value: float) -> None:
    assert stand.http.put(f"{talk.path}/reward", json={"reward": value}).status_code == 200


def attempts(stand: Stand, outcomes: dict[float | str, float | None], group: str | None = None, **body: Any) -> str:
    """A group with an attempt for each outcome: a reward; or a kind of failure, after the reward that it has."""
    group = group or uuid.uuid4().hex
    for number, (outcome, before) in enumerate(outcomes.items()):
        talk = stand.talk(group_id=group, attempt=number, **body)
        talk.say("Hello", sim={"weight_version": "3"})
        for value in (before, outcome):
            if isinstance(value, (int, float)):
                reward(stand, talk, value)
        assert close(stand, talk, {"kind": outcome} if isinstance(outcome, str) else None).status_code == 204
    return group


def fed(stand: Stand, **asked: Any) -> dict[str, Any]:
    """The lines of the feed by group, which are then acknowledged."""
    response = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 100, **asked})
    assert response.status_code == 200, response.text
    lines = [json.loads(line) for line in response.content.splitlines()]
    given = [line["group_id"] for line in lines if "rows" in line]
    stand.http.post("/export/groups/ack", json={"consumer": "trainer", "groups": given}).raise_for_status()
    return {line["group_id"]: line for line in lines}


def test_a_close_says_why_a_rollout_failed_and_the_first_one_stands(used: Stand) -> None:
    talk = used.talk(metadata={"task": 1})
    talk.say("Hello")
    child = used.talk(parent_session_id=talk.id)
    child.say("Hello")
    assert close(used, talk, SANDBOX).status_code == 204
    for failed in ({"kind": "agent"}, None):
        assert error_of(close(used, talk, failed)) == (404, "session_closed")
    for one, reason in ((talk, {}), (child, {"reason": "root"})):
        [event] = [event for event in one.events() if event["type"] == "SessionClosed"]
        assert event | {"failed": SANDBOX, **reason} == event
        state = used.get(f"{one.path}/state")
        assert (state["status"], state["failed"], state["failed_turns"]) == ("closed", SANDBOX, [])
        [row] = one.rows()
        assert (row["status"], row["failed"], row["reward"], row["final"]) == ("completed", SANDBOX, None, True)
        [listed] = used.get("/sessions", prefix=one.id)["sessions"]
        assert (listed["status"], listed["failed"]) == ("closed", {"kind": "sandbox"})
    for shape in ("slime", "miles"):
        [row] = talk.rows(shape=shape)
        assert (row["status"], row["metadata"]["turnlog"]["failed"]) == ("failed", SANDBOX)
    cursor = used.http.get("/export", params={"session_id": talk.id}).headers["x-turnlog-next-cursor"]
    reward(used, talk, 0.5)
    assert [row["failed"] for one in (talk, child) for row in one.rows()] == [None, None]
    [again] = used.rows(cursor=cursor, session_id=talk.id)
    assert (again["reward"], again["failed"]) == (0.5, None), "who follows the export is told"
    assert talk.rows(shape="slime")[0]["status"] == "completed"


def test_a_close_without_a_failure_is_a_delete(used: Stand) -> None:
    for body in ({}, {"json": {}}, {"json": {"failed": None}}):
        talk = used.talk()
        assert used.http.post(f"{talk.path}/close", **body).status_code == 204
        assert talk.events()[-1].keys() == {"seq", "at", "type"}
    assert error_of(used.http.post("/sessions/never/close")) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("failed", "named"),
    [
        ({"kind": "reward"}, "failed.kind"),
        ({}, "failed.kind"),
        ({"message": "no kind"}, "failed.kind"),
        ({"kind": "other", "message": "x" * 4097}, "failed.message"),
        ({"kind": "other", "message": "a\0b"}, "failed.message"),
        ({"kind": "other", "message": 1}, "failed.message"),
        ({"kind": "other", "erased": True}, "failed.erased"),
        ("sandbox", "failed"),
    ],
)
def test_what_is_no_failure_closes_nothing(used: Stand, failed: Any, named: str) -> None:
    talk = used.talk()
    refused = close(used, talk, failed)
    assert error_of(refused) == (400, "invalid_request")
    assert refused.json()["error"]["message"].startswith(named)
    assert talk.types() == ["SessionCreated"]


def test_advantages_leave_a_failure_out_or_take_the_reward_that_it_has(used: Stand) -> None:
    group = attempts(used, {0.0: None, 1.0: None, "agent": 0.5, "timeout": None})
    state = used.get(f"/groups/{group}")
    assert state["complete"]
    assert [one["failed"] for one in state["attempts"]] == [None, None, {"kind": "agent"}, {"kind": "timeout"}]
    assert state["statistics"]["count"] == 2
    half = 0.5**0.5
    for failed, expected, count in (("drop", [-half, half, None, None], 2), ("keep", [-1.0, 1.0, 0.0], 3)):
        rows = used.rows(group_id=group, advantage="grpo", failed=failed, explain=True)
        out = [row["excluded"] for row in rows if row.get("excluded")]
        assert out == ([] if failed == "drop" else ["failed: timeout, and it has no reward"])
        given = [row for row in rows if not row.get("excluded")]
        assert [row["advantage"] for row in given] == [
            one if one is None else pytest.approx(one, abs=1e-4) for one in expected
        ]
        line = fed(used, failed=failed)[group] if failed == "drop" else None
        if line is not None:
            assert [row["advantage"] for row in line["rows"]] == [row["advantage"] for row in given]
            assert [one["failed"] for one in line["attempts"]] == [one["failed"] for one in state["attempts"]]
            assert (line["statistics"]["count"], line["excluded"]) == (count, [])
    for shape in ("tinker", "prime-rl"):
        rows = used.rows(group_id=group, shape=shape, advantage="grpo", explain=True)
        assert [row.get("excluded") for row in rows] == [None, None, "failed: agent", "failed: timeout"]
        assert len(used.rows(group_id=group, shape=shape)) == 4, "nobody has asked for advantages"
    for failed, scores in (("drop", [0.0, 1.0]), ("keep", [0.0, 1.0, 0.5])):
        [row] = used.rows(group_id=group, shape="atropos", advantage="grpo", failed=failed)
        assert row["scores"] == scores
    assert error_of(used.http.get("/export", params={"failed": "zero"})) == (400, "invalid_request")


def test_a_group_of_failures_alone_is_fed_without_advantages(used: Stand) -> None:
    group, other = (attempts(used, {"engine": None, "other": None}) for _ in range(2))
    lines = fed(used)
    for one in (group, other):
        assert lines[one]["statistics"] is None
        assert [(row["advantage"], row["reward"]) for row in lines[one]["rows"]] == [(None, None)] * 2
    kept = attempts(used, {"engine": None, "other": None})
    line = fed(used, failed="keep")[kept]
    assert line["rows"] == []
    assert [one["reason"] for one in line["excluded"]] == [
        f"failed: {kind}, and it has no reward" for kind in ("engine", "other")
    ]


def test_an_evaluation_is_in_no_export_and_no_feed_unless_it_is_asked_for(used: Stand) -> None:
    trained = attempts(used, {0.0: None, 1.0: None})
    judged = attempts(used, {0.25: None, 0.75: None}, evaluation=True)
    attempts(used, {9.0: None}, trained, evaluation=True)
    used.known(used.get("/sessions", group_id=judged)["sessions"][0]["session_id"])
    listed = used.get("/sessions", group_id=trained, evaluation=True)["sessions"]
    assert [(one["attempt"], one["evaluation"]) for one in listed] == [(0, True)]
    assert len(used.get("/sessions", group_id=trained, evaluation=False)["sessions"]) == 2
    mixed = used.get(f"/groups/{trained}")
    assert (mixed["statistics"]["count"], mixed["complete"], mixed["evaluation"]) == (2, True, False)
    assert used.get(f"/groups/{judged}")["evaluation"] is True

    assert used.rows(group_id=judged) == []
    excluded = used.rows(group_id=judged, explain=True)
    assert [row["excluded"] for row in excluded] == ["evaluation"] * 2
    with_it, without = (used.rows(group_id=trained, advantage="grpo", evaluation=asked) for asked in (True, False))
    assert [row["reward"] for row in without] == [0.0, 1.0]
    assert [row["reward"] for row in with_it] == [0.0, 1.0, 9.0]
    assert [row["advantage"] for row in with_it] == [*(row["advantage"] for row in without), 0.0]
    for shape in ("slime", "atropos"):
        assert len(used.rows(group_id=trained, shape=shape)) == (1 if shape == "atropos" else 2)
    assert used.rows(group_id=trained, shape="atropos")[0]["scores"] == [0.0, 1.0]

    lines = fed(used, explain=True)
    lost = sum(row["lost_tokens"] for row in excluded)
    assert lines[judged] == {"run": "default", "group_id": judged, "excluded": "evaluation", "lost_tokens": lost}
    assert lost > 0
    assert [one["reward"] for one in lines[trained]["attempts"]] == [0.0, 1.0]
    assert [one["reason"] for one in lines[trained]["excluded"]] == ["evaluation"]
    assert [row["reward"] for row in fed(used, evaluation=True)[judged]["rows"]] == [0.25, 0.75]


def test_an_evaluations_weights_make_nothing_stale(used: Stand) -> None:
    group = attempts(used, {0.0: None, 1.0: None})
    judged = used.talk(evaluation=True)
    judged.say("Hello", sim={"weight_version": "900"})
    [child] = [used.talk(parent_session_id=judged.id)]
    child.say("Hello", sim={"weight_version": "901"})
    assert child.rows() == [] != child.rows(evaluation=True)
    fork = used.http.post(f"{judged.path}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    assert used.known(fork).rows() == []
    assert len(used.rows(group_id=group, max_staleness=0)) == 2
    assert used.rows(group_id=group, max_staleness=0, evaluation=True) == []
    assert fed(used, max_staleness=0)[group]["staleness"] == 0
    samples = used.http.post(f"{judged.path}/samples", json={})
    assert samples.status_code == 200, "samples answer for them as for others"


def test_the_command_line_closes_a_failed_session(used: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_URL", used.server.base_url)
    talk, other = used.talk(), used.talk()
    assert complaint("close", talk.id, "--message", "why", code=2).endswith("--message requires --failed")
    assert "'bored' is not one of" in run("close", talk.id, "--failed", "bored", code=2).stderr
    run("close", talk.id, "--failed", "sandbox", "--message", "the disk is full")
    assert answer("show", talk.id)["failed"] == SANDBOX
    assert "failed: sandbox: the disk is full" in run("show", talk.id).stdout
    run("close", other.id)
    assert answer("show", other.id)["failed"] is None


def test_failures_are_counted_where_an_operator_looks(
    used: Stand, monkeypatch: pytest.MonkeyPatch, clean_environment: Callable[..., None], sqlite_url: str
) -> None:
    clean_environment(URL=used.server.base_url, DATABASE_URL=sqlite_url, RUN=(named := uuid.uuid4().hex))
    monkeypatch.setenv("COLUMNS", "300")
    outcomes: dict[float | str, float | None] = {"agent": None, "timeout": None, 1: None}
    before = {kind: metric(used, "turnlog_rollouts_failed_total", kind=kind) for kind in ("agent", "timeout", "engine")}
    group = attempts(used, outcomes, run=named)
    after = {kind: metric(used, "turnlog_rollouts_failed_total", kind=kind) for kind in before}
    assert {kind: after[kind] - before[kind] for kind in before} == {"agent": 1, "timeout": 1, "engine": 0}
    [row] = [line.split() for line in run("groups", "--group", group).stdout.splitlines() if line.startswith(group)]
    assert row[2:6] == ["3", "3", "3", "2"]
    assert answer("run", named)["failed"] == {"agent": 1, "timeout": 1}
    whats = {one["what"]: one["level"] for one in answer("doctor", "--no-generate")["findings"]}
    assert whats[f"2 of 3 rollouts of run {named} have failed: 1 agent, 1 timeout"] == "warning"
    assert not any("TURNLOG_RUN" in what for what in whats), "it is the client's"


@pytest.mark.anyio
async def test_a_failed_rollout_is_returned_or_played_again_as_the_same_attempt(used: Stand) -> None:
    failing = ["sandbox", "timeout"]

    async def run(base_url: str, prompt: str, metadata: Mapping[str, Any], **more: Any) -> Any:
        body = {"model": "simulator", "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient() as http:
            (await http.post(f"{base_url}/v1/chat/completions", json=body)).raise_for_status()
        return {"failed": {"kind": failing.pop(0)}} if failing else 1.0

    group = uuid.uuid4().hex
    async with AsyncTurnlog(used.base_url) as turnlog:
        fields: dict[str, Any] = {"group_id": group, "attempt": 3, "evaluation": True, "turnlog": turnlog}
        rewards = [
            (await rollout(run, "Hello", name=f"{group}:0", retry_failed=retries, **fields)).outcome.reward
            for retries in (0, 0, 1, 2, 0)
        ]
        with pytest.raises(ValueError, match="kind must be one of"):
            await turnlog.attach(f"{group}:0.2").close(failed={"kind": "bored"})  # type: ignore[typeddict-item]
    assert rewards == [None, None, None, 1.0, None]
    assert failing == []
    made = used.get("/sessions", group_id=group, order="asc")["sessions"]
    assert [one["attempt"] for one in made] == [3, 3, 3]
    assert [one["failed"] and one["failed"]["kind"] for one in made] == ["sandbox", "timeout", None]
