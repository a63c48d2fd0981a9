"""slime's row: the fields of its `Sample`, as `Sample.from_dict` takes them.

Masks and logprobs are those of the response, which begins with the first sampled token; where not sampled they are 0
and 0.0. `metadata` is the session's own, with `turnlog` in it: slime reads `raw_reward` and `round_number` there, so
that the names of ours stay out of its way.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from app.export.row import Columns, Fields, Row, Value
from app.export.shapes import shared

COLUMNS: Columns = {
    "group_index": "int64",
    "index": "int64",
    "rollout_id": "int64",
    "tokens": "[int32]",
    "response_length": "int64",
    "reward": "float64",
    "loss_mask": "[uint8]",
    "rollout_log_probs": "[float64]",
    "rollout_routed_experts": "[[[int32]]]",
    "weight_versions": "[text]",
    "status": "text",
    "metadata": "json",
}

FAILED = "failed"
"""slime's and miles' status of a rollout that failed; Turnlog's own rows say it in a field of its own."""

MASKS: Columns = {"rollout_top_p_token_ids": "[int32]", "rollout_top_p_token_offsets": "[int64]"}


def fields(row: Row) -> Fields:
    """`index`, slime's place of a sample in its own data source, is None: no log knows it.

    `reward` is None where none was assigned, which slime's reward functions fill in. Raises Unfit.
    """
    mask, missing = shared.sampling_mask(row, row.sample.prompt_length)
    shaped_row = shaped(row, {"sampling_mask_missing": missing})
    if mask is None:
        return shaped_row
    named = {"rollout_top_p_token_ids": mask.ids.astype(np.int32), "rollout_top_p_token_offsets": mask.offsets}
    return {**shaped_row, **named}


def shaped(row: Row, beside: Fields) -> Fields:
    """`beside` stands in the metadata. Raises Unfit."""
    sample = row.with_response()
    experts, missing = shared.payload(row, "routed_experts")
    start = sample.prompt_length
    own = {} if row.metadata is None else msgspec.json.decode(row.metadata, type=dict[str, msgspec.Raw])
    return {
        "group_index": group_index(row.group_id),
        "index": None,
        "rollout_id": shared.rollout_number(row.rollout_id),
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "reward": row.reward,
        "loss_mask": sample.loss_mask[start:],
        "rollout_log_probs": sample.logprobs[start:],
        "rollout_routed_experts": experts,
        "weight_versions": shared.weight_versions(row),
        "status": sample.status if row.failed is None else FAILED,
        "metadata": metadata(row, own, {"advantage": row.advantage, "routed_experts_missing": missing, **beside}),
    }


def group_index(group_id: str | None) -> int | None:
    """The group's id where it is a decimal number of 64 bits; else None."""
    if group_id is None or not (group_id.isascii() and group_id.isdigit() and len(group_id) < 19):
        return None
    return int(group_id)


def metadata(row: Row, own: Mapping[str, Value], more: Fields) -> Fields:
    """`own` with Turnlog's, to which `more` belongs, as one key of it."""
    ours = {**shared.identity(row), **more, **shared.rollout(row), **shared.sampling(row), **shared.left_out(row)}
    return {**own, "turnlog": {name: value for name, value in ours.items() if value is not None}}
