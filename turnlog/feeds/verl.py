"""verl (0.9): rows of the shape `verl` as the columns that its trainer finds in TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

Columns = dict[str, Any]


def columns(row: Mapping[str, Any]) -> Columns:
    """A row as verl's agent loops put it: what `AgentLoopOutput.as_dict` gives, and what they add for a text model.

    prompts, responses, input_ids and position_ids are int64. response_mask and loss_mask are too, 1 where the model
    sampled. rollout_log_probs and rm_scores are float32, of the responses' length, the reward in the last place.
    routed_experts is int16, (tokens, layers, k), with zeros for what the engine did not say. Columns of your data set
    are yours to add.
    """
    prompts = torch.tensor(row["prompt_ids"], dtype=torch.int64)
    responses = torch.tensor(row["response_ids"], dtype=torch.int64)
    mask = torch.tensor(row["response_mask"], dtype=torch.int64)
    found: Columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(row["response_logprobs"], dtype=torch.float32),
        "num_turns": row["num_turns"],
        "metrics": row["metrics"],
        "multi_modal_inputs": {},
        "extra_fields": row["extra_fields"],
    }
    if row["reward_score"] is not None:
        found["rm_scores"] = torch.zeros(len(responses))
        found["rm_scores"][-1] = row["reward_score"]
    if row.get("routed_experts") is not None:
        given = torch.tensor(row["routed_experts"], dtype=torch.int16)
        found["routed_experts"] = given.new_zeros((len(prompts) + len(responses), *given.shape[1:]))
        found["routed_experts"][: len(given)] = given
    return found


def batch(rows: Sequence[Columns]) -> TensorDict:
    """Rows with equal columns as one batch: tensors of one shape stacked, of several jagged, other values as they are.

    Raises ValueError if a row has other columns than the first.
    """
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise ValueError("the rows of a group do not have the same columns")
    return TensorDict({name: _column([row[name] for row in rows]) for name in names}, batch_size=[len(rows)])


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)
