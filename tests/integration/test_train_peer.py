"""The peer in memory of `ops.train`: rows from its traces, and what a kill of it loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ops.bench.peers.protocol import NotInstalled
from ops.server import OwnProcess
from ops.simulator.process import SimulatorProcess
from ops.train import run, task
from ops.train.audit import tally
from ops.train.peer import GatewayGroups, GatewaySessions, group_of
from ops.train.rollouts import lines


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[OwnProcess]:
    with SimulatorProcess("--dialect", "vllm") as engine:
        try:
            process = run.gateway(tmp_path, engine.base_url)
        except NotInstalled as error:
            pytest.skip(str(error))
        with process:
            yield process


def attempt(number: int, reward: float, version: int = 0) -> dict[str, Any]:
    trace = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    place = {"session_id": f"s{number}", "group": 1, "attempt": number}
    return {**place, "reward": reward, "version": version, "traces": [trace]}


def test_a_group_has_turnlogs_advantages() -> None:
    group = group_of(1, {0: attempt(0, 0.0), 1: attempt(1, 1.0, version=2)}, 3)
    assert [row["advantage"] for row in group["rows"]] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert group["staleness"] == 3
    assert group["rows"][1]["weight_versions"] == [-1, -1, 2]


def test_groups_in_a_step_are_not_given_again(tmp_path: Path) -> None:
    with (tmp_path / "rows-0.jsonl").open("w") as file:
        for group in (1, 2, 3):
            for number in range(task.ATTEMPTS):
                file.write(json.dumps({**attempt(number, 0.0), "group": group}) + "\n")
        file.write('{"session_id": "cut by a ki')
    step = {"groups": ["task-1"], "left": [{"group_id": "task-2", "reason": "stale"}]}
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    with closing(GatewayGroups("http://127.0.0.1:1", tmp_path)) as groups:
        groups.pause()  # an engine that is down is no error
        assert [group["group_id"] for group in groups.ready(8, 0)] == ["task-3"]


def test_an_agent_that_begins_again_gives_up_what_it_had(tmp_path: Path) -> None:
    notes = [{"began": "s0"}, {"began": "s1"}, {"began": "s2"}, {"gave_up": "s1", "why": "RolloutLost"}]
    (tmp_path / "agent-0.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    (tmp_path / "rows-0.jsonl").write_text(json.dumps(attempt(0, 1.0)) + "\n")
    with closing(GatewaySessions("http://127.0.0.1:1", tmp_path, 0)) as sessions:
        for _ in range(2):
            assert sessions.progress(0) == ({(1, 0)}, [])
    given_up = [(note["gave_up"], note["why"]) for note in lines(tmp_path / "agent-0.jsonl") if "gave_up" in note]
    assert given_up == [("s1", "RolloutLost"), ("s2", "killed")]


def test_what_is_counted_of_a_server_without_a_log(tmp_path: Path) -> None:
    replies = {"trained": 10, "stale": 7, "waiting": 5, "half": 4, "lost": 3, "killed": 2, "running": 1}
    notes: list[dict[str, Any]] = [{"reply": name, "tokens": tokens} for name, tokens in replies.items()]
    notes += [{"ended": name, "group_id": name} for name in ("trained", "stale", "half")]
    names = ["waiting", *map(str, range(task.ATTEMPTS - 1))]
    notes += [{"ended": name, "group_id": "waiting"} for name in names]
    notes += [{"gave_up": "lost", "why": "RolloutLost", "lost": 1}, {"gave_up": "killed", "why": "killed"}]
    (tmp_path / "agent-0.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    step = {"rows": [{"session_id": "trained"}], "left": [{"group_id": "stale", "reason": "stale"}]}
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    (tmp_path / "engine.jsonl").write_text(json.dumps({"at": 1, "tokens": 40}) + "\n")
    counted = tally(tmp_path)
    assert counted.fates == {
        "trained": 10,
        "stale": 7,
        "not yet trained": 5,
        "incomplete group": 5,
        "rollout lost: RolloutLost": 3,
        "rollout lost: killed": 2,
    }
    assert (counted.in_log, counted.generated, counted.lost, counted.violations) == (32, 40, 1, [])
    assert counted.twice == pytest.approx(0.2)
