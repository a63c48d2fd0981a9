"""xtuner's row: what its agents fill in of a `RolloutState` (xtuner v1), to be trained by ids and labels.

xtuner has two forms. The other, `prompt_ids` with `response_ids` and `response_mask`, gives all states of a group the
first one's prompt, so it cannot hold an agent's rows. In this one a rollout may have several states: copies of one, so
that they have its `rollout_id`, with a row each; its advantage is computed once. As of xtuner's own agents,
`response_ids` are the tokens in the loss alone.
"""

from __future__ import annotations

import numpy as np

from app.export.row import Columns, Fields, Row
from app.export.shapes import shared

COLUMNS: Columns = {
    "prompt_ids": "[int32]",
    "input_ids": "[int32]",
    "labels": "[int32]",
    "logprobs": "[float64]",
    "response_ids": "[int32]",
    "response_model_steps": "[int64]",
    "routed_experts": "[[[int32]]]",
    "response": "text",
    "finish_reason": "text",
    "reward": "json",
    "status": "text",
    "error_msg": "text",
    "extra_fields": "json",
}

MASKED = -100
"""The label of a token that is not in the loss."""


def fields(row: Row) -> Fields:
    """`input_ids`, `labels` and `logprobs` have T entries, `routed_experts` T−1, as xtuner shifts them itself.

    `response_model_steps` are the weight versions of `response_ids`, by which xtuner judges staleness; None where one
    is no number: xtuner then takes its own step. `reward` is None without one, else `score` and the components.
    `status` is `failed` where the rollout failed, `aborted` where a turn was, else `completed`. Raises Unfit.
    """
    sample = row.with_response()
    experts, missing = shared.payload(row, "routed_experts")
    in_loss = sample.loss_mask == 1
    failed = row.failed
    return {
        "prompt_ids": sample.tokens[: sample.prompt_length],
        "input_ids": sample.tokens,
        "labels": np.where(in_loss, sample.tokens, MASKED),
        "logprobs": sample.logprobs,
        "response_ids": sample.tokens[in_loss],
        "response_model_steps": None if sample.weight_version_names else sample.weight_versions[in_loss],
        "routed_experts": experts,
        "response": shared.replies(row),
        "finish_reason": sample.turns[-1].finish_reason,
        "reward": None if row.reward is None else {**row.reward_components, "score": row.reward},
        "status": "failed" if failed is not None else "aborted" if sample.status == "aborted" else "completed",
        "error_msg": None if failed is None else ": ".join(filter(None, (failed["kind"], failed.get("message")))),
        "extra_fields": {
            "advantage": row.advantage,
            "routed_experts_missing": missing,
            **shared.beside(row),
        },
    }
