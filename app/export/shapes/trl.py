"""TRL's row: what a `rollout_func` of `GRPOTrainer` returns for one prompt (trl 1.16).

`env_mask` is 1 where the model sampled. TRL hands every column it does not know to the reward functions as a keyword
argument, so `reward`, `advantage` and the identity reach them under these names.
"""

from __future__ import annotations

from app.export.row import Columns, Fields, Row
from app.export.shapes import shared

COLUMNS: Columns = {
    "prompt_ids": "[int32]",
    "completion_ids": "[int32]",
    "logprobs": "[float64]",
    "env_mask": "[uint8]",
    "reward": "float64",
    "advantage": "float64",
    **shared.IDENTITY,
    **shared.ROLLOUT,
    **shared.SAMPLING,
    "images": "json",
    **shared.LEFT_OUT,
}


def fields(row: Row) -> Fields:
    """The completion begins with the first sampled token; later prompts stand in it with `env_mask` 0, logprob 0.0.

    Raises Unfit without a sampled token: TRL looks at a completion's last one.
    """
    sample = row.with_response()
    start = sample.prompt_length
    return {
        "prompt_ids": sample.tokens[:start],
        "completion_ids": sample.tokens[start:],
        "logprobs": sample.logprobs[start:],
        "env_mask": sample.loss_mask[start:],
        "reward": row.reward,
        "advantage": row.advantage,
        **shared.identity(row),
        **shared.rollout(row),
        **shared.sampling(row),
        **shared.placed_images(row, lambda shown: {"images": shown}),
    }
