"""SkyRL's row: an item of each column of its `GeneratorOutput` (0.4).

A session's rows follow one another, as step-wise training wants them; `is_last_step` ends them. SkyRL hands
columns that it does not know on as they are, so the rows' identity stands beside its own.
"""

from __future__ import annotations

import numpy as np

from app.domain.samples import Array
from app.export.row import Columns, Fields, Row, Unfit
from app.export.shapes import shared

COLUMNS: Columns = {
    "prompt_token_ids": "[int32]",
    "response_ids": "[int32]",
    "loss_masks": "[uint8]",
    "rollout_logprobs": "[float32]",
    "rewards": "float64",
    "stop_reasons": "text",
    "trajectory_ids": {"instance_id": "text", "repetition_id": "int64"},
    "is_last_step": "bool",
    "rollout_expert_indices": "[[[int32]]]",
    "rollout_expert_indices_missing": "text",
    "weight_versions": "[text]",
    "advantage": "float64",
    **shared.BESIDE,
}

OF_TURNS: Columns = {"rewards": "[float64]"}
"""`rewards` are numbers, or for all rows of a batch lists of the responses' lengths."""

MASKS: Columns = {
    "rollout_sample_support": {"ids": "[int32]", "offsets": "[int64]"},
    "rollout_sample_support_missing": "text",
}
"""SkyRL's own is dense, [R, top_k] and -1 beyond a token's ids; only the trainer knows its `top_k`."""

STOP_REASONS = {"truncated": "length", "aborted": "abort"}
"""Of a row's status, else "stop": SkyRL takes any other word for a response that was cut off, also "tool_calls"."""


def fields(row: Row) -> Fields:
    """A trajectory is a session: its group and attempt; without an attempt, a number of its own. Raises Unfit."""
    if row.reward is None:
        raise Unfit("no reward")
    session, sample = row.session, row.with_response()
    experts, missing = shared.payload(row, "routed_experts")
    start = sample.prompt_length
    scores = shared.token_rewards(row) if row.by_turn else None
    group_id, attempt = row.group_id, session.config.attempt
    return {
        "prompt_token_ids": sample.tokens[:start],
        "response_ids": sample.tokens[start:],
        "loss_masks": sample.loss_mask[start:],
        "rollout_logprobs": sample.logprobs[start:].astype(np.float32),
        "rewards": row.reward if scores is None else scores[start:],
        "stop_reasons": STOP_REASONS.get(sample.status, "stop"),
        "trajectory_ids": {
            "instance_id": session.session_id if group_id is None else group_id,
            "repetition_id": shared.rollout_number(session.session_id) if attempt is None else attempt,
        },
        "is_last_step": row.is_last,
        "rollout_expert_indices": None if experts is None else _compact(experts),
        "rollout_expert_indices_missing": missing,
        **_support(row),
        "weight_versions": shared.weight_versions(row),
        "advantage": row.advantage,
        **shared.beside(row),
    }


def _compact(ids: Array) -> Array:
    """SkyRL takes uint8, int16 and int32, the smallest that holds the ids."""
    largest = int(ids.max(initial=0))
    if largest <= np.iinfo(np.uint8).max:
        return ids.astype(np.uint8, copy=False)
    return ids.astype(np.int16 if largest <= np.iinfo(np.int16).max else np.int32, copy=False)


def _support(row: Row) -> Fields:
    """For each token of the response the ids that it was drawn from; none where it was not sampled."""
    mask, missing = shared.sampling_mask(row, row.sample.prompt_length)
    if mask is None:
        return {} if missing is None else {"rollout_sample_support": None, "rollout_sample_support_missing": missing}
    support = {"ids": mask.ids.astype(np.int32), "offsets": mask.offsets}
    return {"rollout_sample_support": support, "rollout_sample_support_missing": None}
