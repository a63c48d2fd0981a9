"""AReaL's row: a trajectory of batch size one, as its workflows return it (areal 1.0).

`versions` are the policy versions by which AReaL judges staleness, −1 where not sampled. An engine's version that is no
number gets an index into `weight_version_names`, as in the `turnlog` row: it tells the versions of this row apart, but
is not comparable with another row's. A row whose versions are numbers has no names there.
"""

from __future__ import annotations

import numpy as np

from app.domain.patterns import MAX_FLOAT32
from app.export.row import Columns, Fields, Row, Unfit
from app.export.shapes import shared

COLUMNS: Columns = {
    "input_ids": "[[int64]]",
    "loss_mask": "[[int64]]",
    "logprobs": "[[float32]]",
    "versions": "[[int64]]",
    "attention_mask": "[[bool]]",
    "rewards": "[float32]",
    "weight_version_names": "[text]",
    "advantage": "float64",
    **shared.BESIDE,
}


def fields(row: Row) -> Fields:
    """Arrays of shape [1, T], `rewards` of shape [1]; the full sequence, not shifted; masked logprob 0.0.

    Raises Unfit without a reward, for which AReaL needs a number of 32 bits, or a sampled token.
    """
    if row.reward is None:
        raise Unfit("no reward")
    sample = row.with_response()
    if abs(row.reward) > MAX_FLOAT32:
        raise Unfit("the reward is beyond a float32")
    return {
        "input_ids": sample.tokens.astype(np.int64)[None],
        "loss_mask": sample.loss_mask.astype(np.int64)[None],
        "logprobs": sample.logprobs.astype(np.float32)[None],
        "versions": sample.weight_versions[None],
        "attention_mask": np.ones((1, len(sample.tokens)), bool),
        "rewards": np.array([row.reward], np.float32),
        "weight_version_names": sample.weight_version_names,
        "advantage": row.advantage,
        **shared.beside(row),
    }
