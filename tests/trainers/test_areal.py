"""AReaL's engine and executor, in a process of their own: what they get of Turnlog is what the engine said."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainers import playing
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog

pytestmark = [
    pytest.mark.harness,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("areal") is None, reason="areal is not installed, see CONTRIBUTING.md"),
]

GCONFIG = {"n_samples": 1, "max_new_tokens": 40, "max_tokens": 32768, "temperature": 0.9, "top_k": 10**8}

RUN = {"TURNLOG_RUN": "areal"}
LEFT = "http://127.0.0.1:9"
"""An engine of an earlier start of this run."""


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[TrainerStand]:
    with trainer_stand(tmp_path / "server", "--seed", "3", "--weight-version", "default") as made:
        yield made


def row(text: str, what: str = "fine") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "what": what}


def asked(
    stand: TrainerStand, *rows: dict[str, Any], version: int = 5, evaluation: bool = False, **kwargs: Any
) -> dict[str, Any]:
    return {
        "engine": stand.engine.base_url,
        "rows": rows,
        "group_size": 2,
        "version": version,
        "evaluation": evaluation,
        "workflow_kwargs": {"gconfig": GCONFIG, **kwargs},
    }


def trajectories(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group's, without padding."""
    found = []
    for place, reward in enumerate(group["rewards"]):
        length = sum(group["attention_mask"][place])
        assert group["attention_mask"][place] == [True] * length + [False] * (len(group["input_ids"][0]) - length)
        columns = ("input_ids", "loss_mask", "logprobs", "versions")
        found.append({name: group[name][place][:length] for name in columns} | {"reward": reward})
    return found


def require(stand: TrainerStand, groups: list[dict[str, Any]], version: int = 5, unused: int = 0) -> None:
    """All that AReaL has is what the engine said. The rollouts of a group have equally many rows."""
    rows = []
    for found in map(trajectories, groups):
        for one in found:
            assert one["versions"] == [version if sampled else -1 for sampled in one["loss_mask"]]
            rows.append(Sequenced(one["input_ids"], one["loss_mask"], one["logprobs"]))
        size = len(found) // 2
        for rollout in (found[:size], found[size:]):
            *_, mask = (one["loss_mask"] for one in rollout)
            last = mask[: len(mask) - mask[::-1].index(1)][::-1].index(0)
            assert [one["reward"] for one in rollout] == [last] * size
    judge(rows, stand.generations(), unused=unused)


def test_trajectories_are_what_the_engine_said(stand: TrainerStand, tmp_path: Path) -> None:
    """Of rows that come twice with the same weights, of rollouts with two rows, and of an agent that raises."""
    rows = [row("Six times 7?"), row("And 7 times 8?", "forgets"), row("Six times 7?"), row("No", "raises")]
    given = asked(stand, *rows, metadata={"more": True})
    with Turnlog(stand.url) as turnlog:
        turnlog.remove_engine(stand.engine.base_url)  # AReaL knows it.
        turnlog.add_engine(LEFT, run=RUN["TURNLOG_RUN"])
        while next(one for one in turnlog.engines() if one["url"] == LEFT)["health"] != "dead":
            pass
        with playing.program(tmp_path, "areal_program", given, stand.url, **RUN) as trainer:
            found = trainer.result()
        assert [(one["url"], one["run"]) for one in turnlog.engines()] == [(stand.engine.base_url, RUN["TURNLOG_RUN"])]
    assert [len(group["rewards"]) if group else None for group in found["groups"]] == [2, 4, 2, None]
    require(stand, found["groups"][:3], unused=2)
    assert found["dtypes"] == {
        **dict.fromkeys(("input_ids", "loss_mask", "versions"), "torch.int64"),
        **dict.fromkeys(("logprobs", "rewards"), "torch.float32"),
        "attention_mask": "torch.bool",
    }
    [first, second, third, _] = (group["rewards"] if group else [] for group in found["groups"])
    assert found["stats"]["rollout/reward"] == pytest.approx(sum([*first, second[0], second[2], *third]) / 6)
    assert "no answer" in trainer.log.read_text()
    with Turnlog(stand.url) as turnlog:
        listed = list(turnlog.sessions())
        exported = list(turnlog.export())
    assert sorted(one["attempt"] for one in listed) == [0, 0, 0, 1, 1, 1, 2, 3]
    assert len({one["group_id"] for one in listed}) == 3
    assert {str(one["pinned"]["params"]) for one in exported if one["pinned"]} == {"{'temperature': 0.9}"}
    assert {(one["failed"] or {}).get("kind") for one in exported} == {None, "agent"}


def test_versions_are_the_engines_where_they_are_numbers(tmp_path: Path) -> None:
    """A command is the agent."""
    kwargs = {"command": [sys.executable, "-c", playing.COMMAND], "id": "query_id", "failed": "drop"}
    with trainer_stand(tmp_path / "server", "--weight-version", "12") as stand:
        rows = [{**row("Hello"), "query_id": "q/1"}]
        with playing.program(tmp_path, "areal_program", asked(stand, *rows, **kwargs), stand.url) as trainer:
            require(stand, trainer.result()["groups"], version=12)


@pytest.mark.parametrize(("evaluation", "run"), [(True, RUN), (False, {})], ids=["evaluation", "no run"])
def test_another_evaluation_and_another_training_without_a_run_are_played(
    stand: TrainerStand, tmp_path: Path, evaluation: bool, run: dict[str, str]
) -> None:
    for count in (2, 4):
        given = asked(stand, row("Hello"), evaluation=evaluation)
        with playing.program(tmp_path, "areal_program", given, stand.url, **run) as trainer:
            trainer.result()
        with Turnlog(stand.url) as turnlog:
            assert len(list(turnlog.sessions(evaluation=evaluation))) == count
    assert ("are not added" in trainer.log.read_text()) == (not run)


def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    given = asked(stand, row("Done before"), row("Cut off", "waits"))
    (tmp_path / "gate").touch()
    with playing.program(tmp_path, "areal_program", given, stand.url, **RUN) as trainer:
        trainer.until("waiting", 4)
        ended = trainer.ended(2)
        stand.kill()
        trainer.kill()
    with playing.program(tmp_path, "areal_program", given, stand.url, **RUN) as trainer:
        trainer.until("waiting", 6)
        stand.kill()
        trainer.gate.unlink()
        found = trainer.result()
        assert len(trainer.until("played", 4)) == 4
    assert [len(group["rewards"]) for group in found["groups"]] == [2, 2]
    require(stand, found["groups"], unused=2)
    with Turnlog(stand.url) as turnlog:
        kinds = {one["session_id"]: (one["failed"] or {}).get("kind") for one in turnlog.export()}
    assert len(kinds) == 6
    assert {kinds[session_id] for session_id in ended} == {None}
    assert sorted(map(str, kinds.values())) == ["None"] * 4 + ["other"] * 2
