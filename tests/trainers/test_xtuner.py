"""xtuner's agent loop in its own manager, in a process of its own: what it trains on is what the engine said."""

from __future__ import annotations

import importlib.util
import math
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
    pytest.mark.skipif(importlib.util.find_spec("xtuner") is None, reason="xtuner is not there, see CONTRIBUTING.md"),
]

MASKED = -100
RUN = {"TURNLOG_RUN": "xtuner"}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[TrainerStand]:
    with trainer_stand(tmp_path / "server", "--seed", "3", "--weight-version", "0") as made:
        yield made


def asked(
    *rows: tuple[str, str], group_size: int = 2, batch_size: int = 2, again: bool = False, **config: Any
) -> dict[str, Any]:
    messages = [{"messages": [{"role": "user", "content": text}], "what": what} for text, what in rows]
    return {"rows": messages, "group_size": group_size, "batch_size": batch_size, "again": again, "config": config}


def require(stand: TrainerStand, found: dict[str, Any], unused: int = 0) -> None:
    """Of each row of the data the tokens, labels and logprobs are the engine's, and of each state the reward."""
    rows = []
    for one in found["data"]:
        labels = one["shifted_labels"]
        mask = [0, *(int(label != MASKED) for label in labels)]
        tokens = [*one["input_ids"], labels[-1]]
        assert [token for token, sampled in zip(tokens, mask, strict=True) if sampled] == [
            label for label in labels if label != MASKED
        ]
        [advantage] = {value for value, label in zip(one["advantage"], labels, strict=True) if label != MASKED}
        assert math.isfinite(advantage)
        rows.append(Sequenced(tokens, mask, [0.0, *one["logprobs"]]))
    judge(rows, stand.generations(), unused=unused)
    outputs = [one.output for one in stand.generations()]
    for group in found["groups"]:
        for state in group:
            ids = [one["response_ids"] for one in group if one["rollout_id"] == state["rollout_id"]][-1]
            assert state["reward"]["score"] in {len(one) for one in outputs if tuple(ids[-len(one) :]) == one}
            assert state["status"] == "completed"
            assert state["response_model_steps"] == [0] * len(state["response_ids"])
            assert state["seq_staleness"] == 0


def test_the_data_for_training_is_what_the_engine_said(stand: TrainerStand, tmp_path: Path) -> None:
    """Of rollouts with two rows, and of a group that failed in part. In the place of one of which a single rollout is
    left, and of one that failed, other prompts are sampled."""
    # xtuner shuffles them: the second's rollouts are 0 to 2, the fourth's 3 to 5, the third's 6 to 8.
    given = asked(("One", "forgets"), ("Two", "odd raises"), ("Three", "raises"), ("Four", "odd raises"), group_size=3)
    with playing.program(tmp_path, "xtuner_program", given, stand.url) as trainer:
        found = trainer.result()
    trained = sorted([state["rollout_id"] for state in group] for group in found["groups"])
    assert trained == [[0, 2], [9, 9, 10, 10, 11, 11]]
    assert found["failed"] == 6
    require(stand, found, unused=8)
    with Turnlog(stand.url) as turnlog:
        exported = list(turnlog.export())
    assert all(one["pinned"]["params"] == {"temperature": 0.9, "top_p": 1.0, "top_k": -1} for one in exported)
    assert sorted(str((one["failed"] or {}).get("kind")) for one in exported) == ["None"] * 9 + ["agent"] * 6


def test_what_has_expired_is_played_again(stand: TrainerStand, tmp_path: Path) -> None:
    """A command is the agent."""
    command = [sys.executable, "-c", playing.COMMAND]
    given = asked(("One", "fine"), batch_size=1, again=True, command=command)
    with playing.program(tmp_path, "xtuner_program", given, stand.url) as trainer:
        found = trainer.result()
    assert [[state["rollout_id"] for state in group] for group in found["groups"]] == [[0, 1], [0, 1]]
    require(stand, found)


@pytest.mark.parametrize(("config", "run"), [({"mode": "eval"}, "xtuner"), ({}, "")], ids=["evaluation", "no run"])
def test_another_evaluation_and_another_training_without_a_run_are_played(
    stand: TrainerStand, tmp_path: Path, config: dict[str, Any], run: str
) -> None:
    for count in (2, 4):
        given = asked(("One", "fine"), batch_size=1, **config)
        with playing.program(tmp_path, "xtuner_program", given, stand.url, TURNLOG_RUN=run) as trainer:
            trainer.result()
        with Turnlog(stand.url) as turnlog:
            assert len(list(turnlog.sessions(evaluation=bool(config)))) == count


def test_tasks_with_the_same_prompts_are_played_each(stand: TrainerStand, tmp_path: Path) -> None:
    for task in ("first", "second"):
        given = asked(("One", "fine"), batch_size=1, task=task)
        with playing.program(tmp_path, "xtuner_program", given, stand.url, **RUN) as trainer:
            trainer.result()
    with Turnlog(stand.url) as turnlog:
        assert len(list(turnlog.sessions())) == 4


def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    given = asked(("Done before", "fine"), ("Cut off", "waits"))
    (tmp_path / "gate").touch()
    with playing.program(tmp_path, "xtuner_program", given, stand.url, **RUN) as trainer:
        trainer.until("waiting", 4)
        ended = trainer.ended(2)
        stand.kill()
        trainer.kill()
    with playing.program(tmp_path, "xtuner_program", given, stand.url, **RUN) as trainer:
        trainer.until("waiting", 6)
        stand.kill()
        trainer.gate.unlink()
        require(stand, trainer.result(), unused=2)
        assert len(trainer.until("played", 4)) == 4
    with Turnlog(stand.url) as turnlog:
        kinds = {one["session_id"]: (one["failed"] or {}).get("kind") for one in turnlog.export()}
    assert {kinds[session_id] for session_id in ended} == {None}
    assert sorted(map(str, kinds.values())) == ["None"] * 4 + ["other"] * 2
