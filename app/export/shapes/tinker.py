"""Tinker's row: the tokens of a `Datum`'s model input, and its loss function's inputs (tinker 0.38).

All arrays are shifted already: position i of `model_input` predicts `target_tokens[i]`, to which `logprobs`,
`advantages` and `mask` belong. `mask` is 1.0 where the target was sampled; Tinker's cookbook carries it beside the
others and takes it out before a datum is sent, because the service's loss functions know no such input.
"""

from __future__ import annotations

import numpy as np

from app.export.row import Columns, Fields, Row, Unfit
from app.export.shapes import shared

COLUMNS: Columns = {
    "model_input": "[int32]",
    "target_tokens": "[int32]",
    "logprobs": "[float64]",
    "advantages": "[float64]",
    "mask": "[float32]",
    "reward": "float64",
    **shared.BESIDE,
}


def fields(row: Row) -> Fields:
    """T−1 positions. `advantages` is None where the export asks for none, 0.0 where not sampled.

    Raises Unfit without a sampled token; and where the first one was sampled: nothing predicts it, so that its logprob
    would be lost.
    """
    sample = row.with_response()
    if sample.prompt_length == 0:
        raise Unfit("no token predicts the first one, which was sampled")
    mask, given = sample.loss_mask[1:], shared.advantages(row)
    return {
        "model_input": sample.tokens[:-1],
        "target_tokens": sample.tokens[1:],
        "logprobs": sample.logprobs[1:],
        "advantages": None if given is None else given[1:],
        "mask": mask.astype(np.float32),
        "reward": row.reward,
        **shared.beside(row),
    }
