"""tinker-cookbook: its own group rollout, advantages and datums, with agents and environments on Turnlog."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainers import playing
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
MAX_TOKENS = 200
PROMPT = [{"role": "user", "content": "What is 6 times 7?"}]
AGENT = "trainers.playing:run"


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerStand]:
    playing.prepare(tmp_path)
    with trainer_stand(tmp_path / "server") as running:
        monkeypatch.setenv("TURNLOG_URL", running.url)
        monkeypatch.setenv(playing.FOLDER, str(tmp_path))
        yield running


def main(asked: dict[str, Any]) -> list[Sequenced]:
    """As a program that a test kills: plays groups, each of which has a name and says what its agents do."""

    async def play() -> list[Any]:
        wanted = [TurnlogGroup(PROMPT, ATTEMPTS, name, metadata={"what": what}) for name, what in asked["groups"]]
        return await asyncio.gather(*[played(TurnlogRollouts(AGENT), group) for group in wanted])

    groups = asyncio.run(play())
    assert all(group.get_total_rewards() == expected(group) for group in groups)
    return datums(groups)[1]


def expected(group: Any) -> list[float]:
    """The rewards of its agents: how many tokens the last turn has."""
    return [len(one.transitions[-1].ac.tokens) for one in group.trajectories_G]


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
    ("how", "what", "rows"),
    [
        ({"agent": AGENT}, "fine", 3),
        ({"agent": playing.run}, "forgets", 6),
        ({"command": (sys.executable, "-c", playing.COMMAND)}, "fine", 3),
    ],
    ids=["agent", "two rows", "command"],
)
async def test_its_datums_are_what_the_engine_said_and_the_shape_tinker(
    stand: TrainerStand, how: dict[str, Any], what: str, rows: int
) -> None:
    wanted = [TurnlogGroup(PROMPT, ATTEMPTS, f"0.{place}", {"what": what}) for place in (0, 1)]
    groups = [await played(TurnlogRollouts(**how), group) for group in wanted]
    made, read = datums(groups)
    assert len(made) == 2 * rows
    judge(read, stand.generations())
    rewards = [group.get_total_rewards() for group in groups]
    assert rewards == [expected(group) for group in groups]
    means = {f"0.{place}": statistics.fmean(of_group) for place, of_group in enumerate(rewards)}
    with Turnlog(stand.url) as turnlog:
        exported = [row for place in (0, 1) for row in turnlog.export(group_id=f"0.{place}", shape="tinker")]
    by_tokens = {tuple(row["model_input"]): row for row in exported}
    for datum in made:
        row = by_tokens.pop(tuple(datum.model_input.to_ints()))
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        assert inputs["target_tokens"] == row["target_tokens"]
        assert inputs["mask"] == row["mask"]
        assert inputs["logprobs"] == pytest.approx(row["logprobs"], abs=1e-6)
        advantage = row["reward"] - means[row["group_id"]]
        assert inputs["advantages"] == pytest.approx([advantage * sampled for sampled in row["mask"]], abs=1e-4)
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


async def first_is_silent(metadata: dict[str, Any], **asked: Any) -> float:
    return 1.0 if metadata["attempt"] == 0 else await playing.run(metadata=metadata, **asked)


@pytest.mark.parametrize("failed", ["drop", "keep"])
async def test_agents_that_raise_or_ask_nothing_are_among_the_groups_errors(stand: TrainerStand, failed: Any) -> None:
    wanted = TurnlogGroup(PROMPT, ATTEMPTS, "f.0", metadata={"what": "odd raises"})
    group = await played(TurnlogRollouts(first_is_silent, failed=failed), wanted)
    errors = [(one.error_type, one.error_message) for one in group.rollout_errors]
    assert errors == [("empty", "session f.0.0.0 has no turn to train on"), ("agent", "ValueError: no answer")]
    _, read = datums([group])
    assert len(read) == (2 if failed == "keep" else 1)
    judge(read, stand.generations(), unused=0 if failed == "keep" else 1)


async def test_a_group_of_which_all_fail_is_skipped_by_the_trainer(stand: TrainerStand) -> None:
    wanted = TurnlogGroup(PROMPT, 1, metadata={"what": "raises"})
    assert await played(TurnlogRollouts(AGENT), wanted) is None


def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    given = {"groups": [("7.0", "fine"), ("7.1", "waits")]}
    found = playing.over_kills(tmp_path, "test_tinker", given, stand, each=3)
    judge([Sequenced(*one) for one in found], stand.generations(), unused=3)
