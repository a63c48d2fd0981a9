"""Advantages by the trainers' own code, of rollouts with one row each and of the same with several: equal.

`pytest -rP` prints the numbers. Packages: see 'Trainers' packages' in CONTRIBUTING.md.
"""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from integration.stand import Stand, Talk

JSON = dict[str, Any]
Place = tuple[int, int]
"""Of a rollout: its task and its attempt."""

REWARDS = (1.0, 0.0, 1.0, 0.0)
"""Of the attempts at each of two tasks."""

SPLIT: dict[Place, str] = {(0, 1): "segments", (1, 1): "segments", (1, 2): "sessions"}
"""Rollouts that have two rows, and what these are."""


class Rollouts:
    """Eight rollouts, and where the rows of each come from."""

    def __init__(self, stand: Stand, split: dict[Place, str]) -> None:
        self._stand = stand
        self._groups = [uuid.uuid4().hex, uuid.uuid4().hex]
        self.places: dict[str, Place] = {}
        for task, group_id in enumerate(self._groups):
            for attempt, reward in enumerate(REWARDS):
                root = stand.talk(group_id=group_id, attempt=attempt, on_divergence="segment")
                self.places[root.id] = (task, attempt)
                self._play(root, split.get((task, attempt)))
                assert stand.http.put(f"{root.path}/reward", json={"reward": reward}).status_code == 200
                assert stand.http.delete(root.path).status_code == 204

    def _play(self, root: Talk, split: str | None) -> None:
        root.say("Hello")
        if split == "segments":
            root.messages = []
            root.say("What came before, in short")
        elif split == "sessions":
            self._stand.talk(parent_session_id=root.id).say("A part of it")

    def rows(self, shape: str, **query: str) -> list[JSON]:
        return [row for group in self._groups for row in self._stand.rows(group_id=group, shape=shape, **query)]

    def by_rollout(self, rollout_ids: Sequence[str], advantages: Sequence[float]) -> dict[Place, float]:
        """All rows of a rollout have the same advantage."""
        found: dict[Place, set[float]] = defaultdict(set)
        for rollout_id, advantage in zip(rollout_ids, advantages, strict=True):
            found[self.places[rollout_id]].add(round(advantage, 5))
        assert {len(values) for values in found.values()} == {1}
        return {place: found[place].pop() for place in sorted(found)}


@pytest.fixture(scope="module")
def whole(shared: Stand) -> Rollouts:
    return Rollouts(shared, {})


@pytest.fixture(scope="module")
def split(shared: Stand) -> Rollouts:
    return Rollouts(shared, SPLIT)


def test_the_rows_of_a_rollouts_other_sessions_are_counted_as_of_the_export(stand: Stand) -> None:
    """Those of an agent with two segments, and of one without a turn; later ones are of the next export."""
    root = stand.talk()
    agent, silent = (stand.talk(parent_session_id=root.id, on_divergence="segment") for _ in range(2))
    root.say("Hello")
    agent.say("Hello")
    agent.messages = []
    agent.say("What came before, in short")
    exports = (stand.http.get("/export", params={"session_id": talk.id}) for talk in (root, agent))
    then = [{"cursor": export.headers["x-turnlog-cursor"]} for export in exports]
    silent.say("Late")

    def told(queries: Sequence[dict[str, str]] = ({}, {})) -> list[list[int]]:
        asked = zip((root, agent), queries, strict=True)
        return [[row["rollout_rows"] for row in talk.rows(**query)] for talk, query in asked]

    assert (told(then), told()) == ([[3], [3, 3]], [[4], [4, 4]])
    assert stand.http.delete(agent.path, params={"erase": "true"}).status_code == 204
    assert (told(then), told()) == ([[1], []], [[2], []])


def test_grpo_counts_a_rollout_once(whole: Rollouts, split: Rollouts) -> None:
    found = []
    for given in (whole, split):
        rows = given.rows("turnlog", advantage="grpo")
        found.append(given.by_rollout([row["rollout_id"] for row in rows], [row["advantage"] for row in rows]))
    assert found[0] == found[1]
    assert set(found[0].values()) == {0.86602, -0.86602}


Advantages = tuple[list[str], list[float]]
"""Of each row its rollout, and its advantage."""


def verl(rollouts: Rollouts, *, counts_rollouts: bool) -> Advantages:
    """Its trainer knows a rollout's outputs by their keys, `<uid>_<session>_<index>`; without them, by `uid` alone."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rows = rollouts.rows("verl")
    rollout_ids = [row["extra_fields"]["rollout_id"] for row in rows]
    scores = torch.tensor([[row["reward_score"]] for row in rows])
    masks, uids = torch.ones(len(rows), 1), [row["uid"] for row in rows]
    columns: JSON = {"token_level_rewards": scores, "response_mask": masks, "responses": masks.long()}
    data = DataProto.from_single_dict({**columns, "uid": as_objects(uids)})
    if counts_rollouts:
        seen: Counter[str] = Counter()
        keys = []
        for uid, rollout_id in zip(uids, rollout_ids, strict=True):
            keys.append(f"{uid}_{rollout_id}_{seen[rollout_id]}")
            seen[rollout_id] += 1
        found = compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"]
    else:
        found, _ = compute_grpo_outcome_advantage(scores, masks, data.non_tensor_batch["uid"])
    return rollout_ids, found.flatten().tolist()


def as_objects(values: Sequence[str]) -> Any:
    import numpy as np

    return np.array(values, object)


def trl(rollouts: Rollouts, *, counts_rollouts: bool) -> Advantages:
    """Its asynchronous worker scores conversations, each with one or more sequences, which name their rollout."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop

    def score(completions: list[Any], reward: list[float], **columns: Any) -> list[float]:
        return reward

    PartialState()  # its log asks for it
    worker = SimpleNamespace(
        reward_funcs=[score], reward_func_names=["score"], _env_reward_types=[], _provides_rollout_reward=False
    )
    tasks: dict[str, dict[str, list[JSON]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rollouts.rows("trl")):
        tasks[row["group_id"]][row["rollout_id"] if counts_rollouts else str(number)].append(row)
    rollout_ids, advantages = [], []
    for number, conversations in enumerate(tasks.values()):
        given = list(conversations.values())
        every = [row for rows in given for row in rows]
        blank: list[Any] = [[]] * len(given)
        group = RolloutGroup(
            prompts=blank,
            reward_kwargs={"reward": [rows[0]["reward"] for rows in given]},
            completions=blank,
            completions_ids=blank,
            completions_sequences=[
                [
                    TrainingSequence([*row["prompt_ids"], *row["completion_ids"]], [], [], row["rollout_id"])
                    for row in rows
                ]
                for rows in given
            ],
            tool_call_counts=[0] * len(given),
            tool_failure_counts=[0] * len(given),
            model_version=0,
            group_id=number,
            env_rewards=[None] * len(given),
            rollout_rewards=[None] * len(given),
        )
        rollout_ids += [row["rollout_id"] for row in every]
        advantages += [one.advantage for one in asyncio.run(_AsyncRolloutLoop._score_group(worker, group))]
    return rollout_ids, advantages


def atropos(rollouts: Rollouts, *, counts_rollouts: bool) -> Advantages:
    """Its trainer normalises the scores of an item's sequences; the score of a single one it takes as it is."""
    from atroposlib.api.server import ScoredData, _scored_data_to_dict
    from example_trainer.data import pad_data_to_good_offset

    names = ("tokens", "masks", "inference_logprobs", "overrides")
    groups = rollouts.rows("atropos", advantage="grpo")
    items = groups
    if counts_rollouts:
        items = [
            {**{name: [group[name][at]] for name in names}, "scores": [score]}
            for group in groups
            for at, score in enumerate(group["rollout_advantages"])
        ]
    batch = [_scored_data_to_dict(ScoredData.model_validate(item)) for item in items]
    advantages = pad_data_to_good_offset({"batch": batch}, 64)[2]
    return [one for group in groups for one in group["rollout_ids"]], [
        one for part in advantages for one in part.flatten().tolist()
    ]


TRAINERS = {
    "verl.trainer.ppo.v1.utils": (verl, 0.86602, (-0.7303, 1.09544)),
    "trl.experimental.async_grpo.async_rollout_worker": (trl, 1.0, (-0.8165, 1.22474)),
    "example_trainer.data": (atropos, 0.86602, (-0.8165, 1.22474)),
}
"""By the module: an advantage of its own, and those of the first task if it counts rows."""


@pytest.mark.parametrize("module", TRAINERS)
def test_a_trainers_own_advantages_are_equal_with_and_without_splits(
    module: str, whole: Rollouts, split: Rollouts
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
        make, own, (low, high) = TRAINERS[module]
        unsplit = whole.by_rollout(*make(whole, counts_rollouts=True))
        several = split.by_rollout(*make(split, counts_rollouts=True))
        by_rows = split.by_rollout(*make(split, counts_rollouts=False))
    for name, found in (("8 rows", unsplit), ("11 rows", several), ("11, each counted", by_rows)):
        print(f"{make.__name__:8}{name:17}", *(f"{value:6.2f}" for value in found.values()))
    assert unsplit == several == {place: own if REWARDS[place[1]] else -own for place in split.places.values()}
    assert {by_rows[0, attempt] for attempt in range(4)} == {low, high}
