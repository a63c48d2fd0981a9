"""`ops.train` before the real engine: two steps, whose rows the trainer's own weights explain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ops.engine.process import is_installed
from ops.train import task
from ops.train.rollouts import lines
from ops.train.run import run

pytestmark = pytest.mark.real_engine

STEPS = 2
EXACT = 1e-3


def test_two_steps(tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("there is no engine: sh ops/setup real-engine")
    figures = run(tmp_path / "run", seed=1, steps=STEPS)
    steps = lines(tmp_path / "run" / "steps.jsonl")
    assert [step["version"] for step in steps] == [1, 2]
    assert figures["ratio_error_first"] < EXACT
    assert figures["ratio_error_max"] < EXACT, "an engine sampled with other weights than it named"
    assert steps[0]["fresh_tokens"] == steps[0]["tokens"] > 0
    for step in steps:
        rollouts = {(row["group_id"], row["attempt"]) for row in step["rows"]}
        assert rollouts == {(group, attempt) for group in step["groups"] for attempt in range(task.ATTEMPTS)}
    trained = Counter(row["session_id"] for step in steps for row in step["rows"])
    assert set(trained.values()) == {1}, "a rollout is one row, of one step"
