"""slime's row: the fields of its `Sample`, as `Sample.from_dict` takes them.

Masks and logprobs are those of the response, which begins with the first sampled token; where not sampled they are 0
and 0.0. `metadata` is the session's own, with `turnlog` in it: slime reads `raw_reward` and `round_number` there, so
that the names of ours stay out of its way.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from app.domain.samples import Sample
from app.export.row import Columns, Fields, Row, Value
from app.export.shapes import identity, images, routing

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

MASKS: Columns = {"rollout_top_p_token_ids": "[int32]", "rollout_top_p_token_offsets": "[int64]"}


def fields(row: Row) -> Fields:
    """`index`, slime's place of a sample in its own data source, is None: no log knows it.

    `reward` is None where none was assigned, which slime's reward functions fill in. Raises Unfit.
    """
    mask, missing = routing.whole_mask(row, row.sample.prompt_length)
    shaped_row = shaped(row, {"sampling_mask_missing": missing})
    if mask is None:
        return shaped_row
    named = {"rollout_top_p_token_ids": mask.ids.astype(np.int32), "rollout_top_p_token_offsets": mask.offsets}
    return {**shaped_row, **named}


def shaped(row: Row, beside: Fields) -> Fields:
    """`beside` stands in the metadata. Raises Unfit."""
    sample = row.with_response()
    experts, missing = routing.whole(row, "routed_experts")
    start = sample.prompt_length
    return {
        "group_index": group_index(row.group_id),
        "index": None,
        "rollout_id": rollout_number(row.rollout_id),
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "reward": row.reward,
        "loss_mask": sample.loss_mask[start:],
        "rollout_log_probs": sample.logprobs[start:],
        "rollout_routed_experts": None if experts is None else experts.astype(np.int32),
        "weight_versions": weight_versions(sample),
        "status": sample.status,
        "metadata": metadata(row, {"routed_experts_missing": missing, **beside}),
    }


def group_index(group_id: str | None) -> int | None:
    """The group's id where it is a decimal number of 64 bits; else None."""
    decimal = group_id is not None and group_id.isascii() and group_id.isdigit() and len(group_id) < 19
    return int(group_id) if group_id is not None and decimal else None


def rollout_number(name: str) -> int:
    """A number that only the rows of this rollout, or session, have: 53 bits of a hash, which JSON holds exactly.

    slime averages the loss over the rows of one rollout before it averages over rollouts; without a number each
    segment of a session would count as a rollout.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) >> 3


def weight_versions(sample: Sample) -> list[str]:
    """The engines' names, one a turn; a turn during which the weights changed gives each of them, in order."""
    return [span.version for span in sample.version_spans]


def metadata(row: Row, beside: Fields) -> Fields:
    own: dict[str, Value] = (
        {} if row.metadata is None else msgspec.json.decode(row.metadata, type=dict[str, msgspec.Raw])
    )
    ours = {
        **identity.fields(row),
        "advantage": row.advantage,
        **beside,
        **identity.rollout(row),
        **identity.sampling(row),
        **images.left_out(row),
    }
    return {**own, "turnlog": {name: value for name, value in ours.items() if value is not None}}
