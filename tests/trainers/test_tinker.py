"""tinker-cookbook: its own group rollout, advantages and datums, with agents and environments on Turnlog."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ops.server import ROOT
from trainers import plays
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import AsyncTurnlog, Turnlog

tinker = pytest.importorskip("tinker", reason="tinker is not installed", exc_type=ImportError)
pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed", exc_type=ImportError)

from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages  # noqa: E402
from tinker_cookbook.rl.rollouts import (  # noqa: E402
    do_group_rollout,
    do_group_rollout_and_filter_constant_reward,
)
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult  # noqa: E402

from turnlog.integrations.tinker import TurnlogGroup, TurnlogRollouts, TurnlogTokenCompleter  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.harness, pytest.mark.anyio]

ATTEMPTS = 3
MAX_TOKENS = 24

TRAINER = """
import asyncio, json, sys
from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward as play
from turnlog.integrations.tinker import TurnlogGroup, TurnlogRollouts
from trainers import plays, test_tinker
group = TurnlogGroup(plays.PROMPT, 3, name="7.0", metadata={"hold": sys.argv[1]})
made = asyncio.run(play(None, group, 24, 1.0, False, strategy=TurnlogRollouts("trainers.plays:two_turns")))
print(json.dumps([test_tinker.datums([made])[1], made.get_total_rewards()]))
"""


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerStand]:
    with trainer_stand(tmp_path) as running:
        monkeypatch.setenv("TURNLOG_URL", running.url)
        yield running


def datums(groups: Sequence[Any]) -> tuple[list[Any], list[Sequenced]]:
    """The cookbook's own, and as the judge reads them."""
    made, _ = assemble_training_data(list(groups), compute_advantages(list(groups)))
    read = []
    for datum in made:
        inputs = datum.loss_fn_inputs
        tokens = [*datum.model_input.to_ints(), inputs["target_tokens"].tolist()[-1]]
        assert tokens[1:] == inputs["target_tokens"].tolist()
        mask = [0, *map(int, inputs["mask"].tolist())]
        read.append(Sequenced(tokens, mask, [0.0, *inputs["logprobs"].tolist()]))
    return made, read


async def played(strategy: TurnlogRollouts, group: EnvGroupBuilder) -> Any:
    """As `rl.train` plays a group. The sampling client is asked for nothing."""
    return await do_group_rollout_and_filter_constant_reward(None, group, MAX_TOKENS, 1.0, False, strategy=strategy)


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({"agent": "trainers.plays:two_turns"}, 3),
        ({"agent": plays.two_conversations}, 6),
        ({"command": plays.COMMAND}, 3),
    ],
    ids=["agent", "two rows", "command"],
)
async def test_its_datums_are_what_the_engine_said_and_the_shape_tinker(
    stand: TrainerStand, how: dict[str, Any], rows: int
) -> None:
    wanted = [TurnlogGroup(plays.PROMPT, ATTEMPTS, f"0.{place}") for place in (0, 1)]
    groups = [await played(TurnlogRollouts(**how), group) for group in wanted]
    made, read = datums(groups)
    assert len(made) == 2 * rows
    judge(read, stand.generations())
    assert [group.get_total_rewards() for group in groups] == [[0.0, 1.0, 2.0]] * 2
    with Turnlog(stand.url) as turnlog:
        exported = [row for place in (0, 1) for row in turnlog.export(group_id=f"0.{place}", shape="tinker")]
    by_tokens = {tuple(row["model_input"]): row for row in exported}
    for datum in made:
        row = by_tokens.pop(tuple(datum.model_input.to_ints()))
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        assert inputs["target_tokens"] == row["target_tokens"]
        assert inputs["mask"] == row["mask"]
        assert inputs["logprobs"] == pytest.approx(row["logprobs"], abs=1e-6)
        assert inputs["advantages"] == [(row["reward"] - 1.0) * sampled for sampled in row["mask"]]
    assert not by_tokens


class Questions(Env):  # type: ignore[misc]
    """Two turns of ids; the last reward is the second's length."""

    def __init__(self) -> None:
        self._seen: list[int] = [5, 6, 7]
        self._turns = 0

    async def initial_observation(self) -> Any:
        return tinker.ModelInput.from_ints(self._seen), [2]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        self._turns += 1
        self._seen = [*self._seen, *action, 8, 9]
        done = self._turns == 2
        return StepResult(len(action) if done else 0.25, done, tinker.ModelInput.from_ints(self._seen), [2])


class Group(EnvGroupBuilder):  # type: ignore[misc]
    name = "5.0"

    async def make_envs(self) -> Sequence[Env]:
        return [Questions() for _ in range(ATTEMPTS)]

    async def compute_group_rewards(self, trajectories: list[Any], envs: Sequence[Env]) -> list[tuple[float, Any]]:
        return [(0.5 if place == 0 else 0.0, {}) for place, _ in enumerate(zip(trajectories, envs, strict=True))]


async def test_its_environments_are_played_once_each_in_a_session(stand: TrainerStand) -> None:
    first, again = [await played(TurnlogRollouts(), Group()) for _ in range(2)]
    for group in (first, again):
        _, read = datums([group])
        assert len(read) == ATTEMPTS
        judge(read, stand.generations())
        assert [len(one.transitions) for one in group.trajectories_G] == [2] * ATTEMPTS
    assert again.get_total_rewards() == first.get_total_rewards()
    assert len(stand.generations()) == 2 * ATTEMPTS


async def test_a_completer_alone_plays_a_group_in_one_session(stand: TrainerStand) -> None:
    async with AsyncTurnlog() as turnlog:
        session = await turnlog.create_session(session_id="all", history="tree")
        completer = TurnlogTokenCompleter(session.anthropic_base_url, session.token, max_tokens=9, top_k=5)
        group = await do_group_rollout(Group(), completer)
        await completer.aclose()
        _, read = datums([group])
        judge(read, stand.generations())
        rows = [row async for row in turnlog.export(session_id="all")]
    assert sorted(one.tokens for one in read) == sorted(row["tokens"] for row in rows)


@pytest.mark.parametrize("failed", ["drop", "keep"])
async def test_an_agent_that_raises_is_among_the_groups_errors(stand: TrainerStand, failed: Any) -> None:
    wanted = TurnlogGroup(plays.PROMPT, ATTEMPTS, "f.0")
    group = await played(TurnlogRollouts(plays.first_raises, failed=failed), wanted)
    assert [(one.error_type, "the sandbox is gone" in one.error_message) for one in group.rollout_errors] == [
        ("agent", True)
    ]
    _, read = datums([group])
    assert len(read) == (ATTEMPTS if failed == "keep" else ATTEMPTS - 1)
    judge(read, stand.generations(), unused=0 if failed == "keep" else 1)


async def test_a_group_of_which_all_fail_is_skipped_by_the_trainer(stand: TrainerStand) -> None:
    assert await played(TurnlogRollouts(plays.first_raises), TurnlogGroup(plays.PROMPT, 1)) is None


async def test_a_killed_server_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    group = TurnlogGroup(plays.PROMPT, ATTEMPTS, "k.0", metadata={"hold": str(tmp_path)})
    made = await plays.while_held(tmp_path, played(TurnlogRollouts(plays.two_turns), group), stand.kill)
    _, read = datums([made])
    assert len(read) == ATTEMPTS
    judge(read, stand.generations(), unused=2)
    assert made.get_total_rewards() == [0.0, 1.0, 2.0]


async def test_a_killed_trainer_plays_nothing_again_that_had_ended(stand: TrainerStand, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TURNLOG_URL": stand.url}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    printed = await asyncio.wait_for(plays.killed_and_again(tmp_path, command, environment), 200)
    read, rewards = json.loads(printed.splitlines()[-1])
    assert rewards == [0.0, 1.0, 2.0]
    with Turnlog(stand.url) as turnlog:
        sessions = {one["session_id"]: one for one in turnlog.sessions()}
    # Of attempts 0 and 2 those that had ended before the kill have one session.
    assert sessions["7.0.1.0"]["failed"]["kind"] == "other"
    left = sum(one["turns"] for one in sessions.values() if one["failed"] is not None)
    judge([Sequenced(*one) for one in read], stand.generations(), unused=left)
