"""Atropos' row: a whole group as one `ScoredDataGroup`, the body of `POST /scored_data` (atroposlib 0.4).

`masks` are labels: the token's id where it was sampled, else −100. A masked logprob is 1.0, which no real one is.
`overrides` holds a map for each sequence, where Atropos' trainer looks for the temperature. Atropos drops columns that
it does not know, so the rows' identity stands in columns beside its own, a list each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.export.row import Columns, Fields, Row, Unfit
from app.export.shapes import shared

MASKED = -100
"""The label that cross entropy ignores in PyTorch."""

COLUMNS: Columns = {
    "tokens": "[[int32]]",
    "masks": "[[int32]]",
    "inference_logprobs": "[[float64]]",
    "scores": "[float64]",
    "advantages": "[[float64]]",
    "overrides": "json",
    "group_id": "text",
    "session_ids": "[text]",
    "segments": "[int64]",
    "attempts": "json",
    "statuses": "[text]",
    "cursor": "text",
    "rollout_ids": "[text]",
    "rollout_rows": "[int64]",
    "rollout_weights": "[float64]",
    "rollout_advantages": "[float64]",
    **shared.SAMPLING,
    "images_left_out": "[int64]",
}


def group_fields(rows: Sequence[Row]) -> Fields:
    """All rows of a group, in order. A session of several segments has a sequence, with its score, for each;
    one without a sampled token stays, because its score counts.

    Atropos' own trainer makes advantages from `scores`, in which a rollout of several sequences counts several times.
    The score of a group of one sequence it takes as it is: a sequence can be sent alone, its rollout's advantage as
    its score. `advantages` and `rollout_advantages` are None where the export asks for none.
    Raises Unfit where one of the rows has no reward: a group is normalised as a whole.
    """
    scores = [row.reward for row in rows if row.reward is not None]
    if len(scores) < len(rows):
        raise Unfit(f"no reward for {len(rows) - len(scores)} of the group's {len(rows)} rows")
    advantages = [np.where(row.sample.loss_mask, row.advantage, 0.0) for row in rows if row.advantage is not None]
    has_advantages = len(advantages) == len(rows)
    return {
        "tokens": [row.sample.tokens for row in rows],
        "masks": [np.where(row.sample.loss_mask, row.sample.tokens, MASKED) for row in rows],
        "inference_logprobs": [np.where(row.sample.loss_mask, row.sample.logprobs, 1.0) for row in rows],
        "scores": np.array(scores),
        "advantages": advantages if has_advantages else None,
        # Atropos has one temperature a sequence: the turns', where they agree.
        "overrides": [
            {"temperature": values.pop()} if len(values := set(shared.temperatures(row))) == 1 else {} for row in rows
        ],
        "group_id": rows[0].counted_in,
        "session_ids": [row.session.session_id for row in rows],
        "segments": [row.sample.segment for row in rows],
        "attempts": [row.session.config.attempt for row in rows],
        "statuses": [row.sample.status for row in rows],
        "cursor": rows[-1].cursor,
        "rollout_ids": [row.rollout_id for row in rows],
        "rollout_rows": [row.rollout_rows for row in rows],
        "rollout_weights": np.array([row.rollout_weight for row in rows]),
        "rollout_advantages": np.array([row.advantage for row in rows]) if has_advantages else None,
        "sampling": [shared.sampling(row)["sampling"] for row in rows],
        "images_left_out": [row.stored_images for row in rows],
    }
