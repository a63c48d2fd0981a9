"""Exported rows in the trainers' own code, where it is a package that can be installed."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from shape_rows import TWO_SEGMENTS, TWO_TURNS, experts, rows

from app.domain.session import AssignedReward
from app.export import formats
from app.export.query import ExportQuery
from app.export.row import Row

JSON = dict[str, Any]

NO_VERL = "verl is not installed: see 'Trainers' packages' in CONTRIBUTING.md"
NO_SKYRL = "skyrl is not installed (it needs Python 3.12): see 'Trainers' packages' in CONTRIBUTING.md"


def exported(format: str, shape: str, given: Sequence[Row], **more: Any) -> list[JSON]:
    """Through the file: what a trainer's script reads."""
    query = ExportQuery(format=format, shape=shape, **more)
    writer = formats.open_writer(query)
    try:
        pieces = [*writer.write([formats.of_row(format, shape, row) for row in given]), *writer.finish()]
    finally:
        writer.close()
    data = b"".join(pieces)
    if format == "ndjson":
        return [json.loads(line) for line in data.splitlines()]
    found: list[JSON] = pq.read_table(BytesIO(data)).to_pylist()
    columns = formats.columns_of(query)
    for row in found:
        row.update({name: json.loads(value) for name, value in row.items() if columns[name] == "json" and value})
    return found


def of_turns(row: Row) -> Row:
    """Its first turn earned a quarter."""
    session = msgspec.structs.replace(row.session, turn_rewards={1: AssignedReward(0.25, {})})
    return msgspec.structs.replace(row, session=session, by_turn=True)


@pytest.mark.parametrize("format", ["ndjson", "parquet"])
class TestVerl:
    @pytest.fixture(autouse=True)
    def _verl(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason=NO_VERL, exc_type=ImportError)

    def test_an_agent_loops_output(self, format: str) -> None:
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        [row] = exported(format, "verl", rows(TWO_TURNS, routing=experts(5), reward=0.5))
        row["routed_experts"] = np.array(row["routed_experts"], np.int16)
        output = AgentLoopOutput(**row).as_dict()
        assert output["prompts"].tolist() == [1, 2]
        assert output["responses"].tolist() == [3, 5, 6]
        assert output["response_mask"].tolist() == [1, 0, 1]
        assert output["rollout_log_probs"].tolist() == [-0.5, 0.0, -0.125]
        assert output["rm_scores"].tolist() == [0.0, 0.0, 0.5]
        assert output["num_turns"] == 4
        given = experts(5)["routed_experts"]
        assert given is not None
        assert output["routed_experts"][:4].tolist() == given.ids.tolist()
        assert output["routed_experts"][4].sum() == 0
        assert output["extra_fields"]["cursor"] == "after-s-0"

    def test_rewards_of_turns_are_the_same_sum_for_grpo_and_earlier_returns_for_gae(self, format: str) -> None:
        import torch
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage

        from turnlog.integrations.transfer_queue import columns
        from turnlog.integrations.verl import TurnlogOutput

        both = [rows(TWO_TURNS, session_id=name, reward=reward)[0] for name, reward in [("s", 1.0), ("t", 0.0)]]
        found = exported(format, "verl", list(map(of_turns, both)), rewards="turn")
        scores = torch.stack([TurnlogOutput(**row).as_dict()["rm_scores"] for row in found])
        assert scores.tolist() == [[0.25, 0.0, 0.75], [0.25, 0.0, -0.25]]
        assert [columns(row)["rm_scores"].tolist() for row in found] == scores.tolist()
        assert [row["extra_fields"]["turn_scores"] for row in found] == [[0.25, 0.0]] * 2
        at_the_end = torch.stack([TurnlogOutput(**{**row, "rm_scores": None}).as_dict()["rm_scores"] for row in found])
        assert at_the_end.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        mask, uid = (
            torch.tensor([row["response_mask"] for row in found]),
            np.array([row["uid"] for row in found], object),
        )
        both = [compute_grpo_outcome_advantage(one, mask, uid)[0].tolist() for one in (scores, at_the_end)]
        assert both[0] == both[1]
        _, returns = compute_gae_advantage_return(scores, torch.zeros(2, 3), mask, torch.tensor(1.0), torch.tensor(1.0))
        assert returns.tolist() == [[1.0, 0.75, 0.75], [0.0, -0.25, -0.25]]


@pytest.mark.parametrize("format", ["ndjson", "parquet"])
class TestSkyrl:
    @pytest.fixture(autouse=True)
    def _skyrl(self) -> None:
        if sys.version_info < (3, 12):
            pytest.skip(NO_SKYRL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("skyrl.train.utils.trainer_utils", reason=NO_SKYRL, exc_type=ImportError)

    def output(self, found: Sequence[JSON]) -> JSON:
        """The columns, as `GeneratorOutput` has them."""
        from skyrl.train.generators.base import TrajectoryID

        columns: JSON = {name: [row.get(name) for row in found] for name in formats.SHAPES["skyrl"].columns}
        columns["trajectory_ids"] = [TrajectoryID(**one) for one in columns["trajectory_ids"]]
        routed = columns["rollout_expert_indices"]
        columns["rollout_expert_indices"] = None if None in routed else [np.array(one, np.uint8) for one in routed]
        return columns

    def test_it_validates(self, format: str) -> None:
        from skyrl.train.utils.trainer_utils import validate_generator_output

        given = [*rows(TWO_TURNS, session_id="t", routing=experts(5)), *rows(TWO_TURNS, attempt=1, routing=experts(5))]
        validate_generator_output(2, self.output(exported(format, "skyrl", given)), routes_expected=True)

    def test_rewards_of_turns(self, format: str) -> None:
        from skyrl.train.generators.utils import get_rollout_metrics
        from skyrl.train.utils.trainer_utils import validate_generator_output

        given = [of_turns(rows(TWO_TURNS, attempt=attempt)[0]) for attempt in range(2)]
        output = self.output(exported(format, "skyrl", given, rewards="turn"))
        validate_generator_output(2, output)
        assert output["rewards"] == [[0.25, 0.0, 0.75]] * 2
        metrics = get_rollout_metrics(output["response_ids"], output["rewards"])
        assert metrics["generate/avg_tokens_non_zero_rewards"] == 3

    def test_segments_are_steps(self, format: str) -> None:
        from skyrl.train.utils.trainer_utils import validate_generator_output

        given = [*rows(TWO_SEGMENTS, session_id="t"), *rows(TWO_TURNS, attempt=1)]
        output = self.output(exported(format, "skyrl", given))
        validate_generator_output(2, output, step_wise=True)
        output["is_last_step"] = [True, True, True]
        with pytest.raises(AssertionError):
            validate_generator_output(2, output, step_wise=True)

    def test_tensors(self, format: str) -> None:
        """SkyRL's own collation: responses aligned to the right, the log's values where the model sampled."""
        from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

        output = self.output(exported(format, "skyrl", rows(TWO_TURNS, routing=experts(5))))
        converted = convert_prompts_responses_to_batch_tensors(
            0,
            output["prompt_token_ids"],
            output["response_ids"],
            [[0.0, 0.0, output["rewards"][0]]],
            output["loss_masks"],
            output["rollout_logprobs"],
            output["rollout_expert_indices"],
        )
        sequences, _, _, rewards, masks, logprobs, routed = converted[:7]
        assert sequences.tolist() == [[1, 2, 3, 5, 6]]
        assert (masks.tolist(), rewards.tolist()) == ([[1.0, 0.0, 1.0]], [[0.0, 0.0, 1.0]])
        assert logprobs.tolist() == [[-0.5, 0.0, -0.125]]
        given = experts(5)["routed_experts"]
        assert given is not None
        assert routed.values[:4].tolist() == given.ids.tolist()
