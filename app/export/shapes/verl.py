"""verl's row: the fields of its `AgentLoopOutput` (0.9), and `uid`, by which verl groups rollouts.

`AgentLoopOutput` ignores a field that it does not know, so `uid` can stand beside its own; what else we know of the row
stands in `extra_fields`, which verl hands on as columns of its batch.
"""

from __future__ import annotations

import numpy as np

from app.export.row import Columns, Fields, Row
from app.export.shapes import shared

COLUMNS: Columns = {
    "uid": "text",
    "prompt_ids": "[int32]",
    "response_ids": "[int32]",
    "response_mask": "[uint8]",
    "response_logprobs": "[float32]",
    "routed_experts": "[[[int16]]]",
    "reward_score": "float64",
    "num_turns": "int64",
    "metrics": "json",
    "extra_fields": "json",
    "multi_modal_data": "json",
    **shared.LEFT_OUT,
}

OF_TURNS: Columns = {"rm_scores": "[float32]"}
"""verl's batch has a reward for each token of the response under this name, which an agent loop makes of
`reward_score`. Beside it stands `turn_scores` in `extra_fields`, where verl's own loops have a number a turn."""


def fields(row: Row) -> Fields:
    """`num_turns` counts what went in and what came out of each turn, as verl's own loops do.

    `routed_experts` has a row for each token but the last, from the prompt's first: verl fills up its batch's tail
    itself, in int16. `metrics` are empty: verl's defaults. `reward_score` is None without a reward, and so are
    `rm_scores`. Raises Unfit.
    """
    sample = row.with_response()
    experts, missing = shared.payload(row, "routed_experts", np.int16)
    start = sample.prompt_length
    group_id = row.group_id
    scores = shared.token_rewards(row) if row.by_turn else None
    return {
        "uid": row.session.session_id if group_id is None else group_id,
        "prompt_ids": sample.tokens[:start],
        "response_ids": sample.tokens[start:],
        "response_mask": sample.loss_mask[start:],
        "response_logprobs": sample.logprobs[start:].astype(np.float32),
        "routed_experts": experts,
        "reward_score": row.reward,
        "num_turns": 2 * len(sample.turns),
        "metrics": {},
        "extra_fields": {
            **shared.identity(row),
            "weight_versions": shared.weight_versions(row),
            "advantage": row.advantage,
            "routed_experts_missing": missing,
            "reward_extra_info": {},
            **({"turn_scores": shared.turn_rewards(row)} if row.by_turn else {}),
            **shared.rollout(row),
            **shared.sampling(row),
        },
        **({} if scores is None else {"rm_scores": scores[start:].astype(np.float32)}),
        **shared.placed_images(row, lambda shown: {"multi_modal_data": {"images": shown}}),
    }
