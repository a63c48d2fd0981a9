"""The row of TRL's asynchronous GRPO: the fields of its `RolloutSample` (trl 1.16).

`completion_mask` is 1 where the model sampled, of prompt and completion. `group_id` is a number there, so what we know
of the row stands in `extra_fields`, as in verl's row.
"""

from __future__ import annotations

import numpy as np

from app.domain.samples import Sample
from app.export import jsontext
from app.export.row import Columns, Fields, Row
from app.export.shapes import shared

COLUMNS: Columns = {
    "prompt": "json",
    "completion": "json",
    "input_ids": "[int64]",
    "completion_mask": "[int64]",
    "old_log_probs": "[float32]",
    "advantage": "float64",
    "model_version": "int64",
    "group_id": "int64",
    "metrics": "json",
    "extra_fields": "json",
}


def fields(row: Row) -> Fields:
    """`prompt` are the messages before the first sampled reply, `completion` those from it on.

    `advantage` is None where the export asks for none, `model_version` where a version is no number. `group_id` is a
    number that only the rows of this group have. Raises Unfit.
    """
    sample = row.with_response()
    told = list(shared.generations(row))
    first = next(place for place, one in enumerate(told) if one.span.end > one.span.output_start)
    completion = [message for one in told[first + 1 :] for message in (*one.turn.messages, one.turn.message)]
    counted_in = row.counted_in
    return {
        "prompt": jsontext.array(told[first].messages),
        "completion": jsontext.array([told[first].turn.message, *completion]),
        "input_ids": sample.tokens.astype(np.int64),
        "completion_mask": sample.loss_mask.astype(np.int64),
        "old_log_probs": sample.logprobs.astype(np.float32),
        "advantage": row.advantage,
        "model_version": _oldest(sample),
        "group_id": shared.rollout_number(row.rollout_id if counted_in is None else counted_in),
        "metrics": {"turns": len(sample.turns), **({} if row.reward is None else {"reward": row.reward})},
        "extra_fields": {
            "reward": row.reward,
            "weight_versions": shared.weight_versions(row),
            **shared.beside_messages(row),
        },
    }


def _oldest(sample: Sample) -> int | None:
    """By which TRL judges staleness: of the tokens in the loss."""
    versions = sample.weight_versions[sample.loss_mask == 1]
    return None if sample.weight_version_names or not versions.size else int(versions.min())
