"""prime-rl's row: the fields of its `TrainingSample`, all of the full sequence's length.

prime-rl has a row of experts for each token; the last, which no forward pass has seen, it fills with zeros itself, so
the same is done here. Its packer joins samples' experts only where their types are equal: all are int16.
`trace_id` and `branch_index` are its own names for where a sample comes from.
"""

from __future__ import annotations

import msgspec
import numpy as np

from app.export.row import Columns, Fields, Row, Value
from app.export.shapes import shared
from workers.codec import describe

ENV_NAME = "turnlog"
"""For sessions whose metadata name no environment as `env_name`."""

COLUMNS: Columns = {
    "token_ids": "[int32]",
    "mask": "[bool]",
    "logprobs": "[float64]",
    "temperatures": "[float64]",
    "advantages": "[float64]",
    "env_name": "text",
    "routed_experts": {"data": "bytes", "shape": "[int64]", "dtype": "text"},
    "routed_experts_missing": "text",
    "trace_id": "text",
    "branch_index": "int64",
    "reward": "float64",
    **shared.BESIDE,
}


MASKS: Columns = {"sampling_mask": {"ids": "bytes", "counts": "bytes"}, "sampling_mask_missing": "text"}


class _Metadata(msgspec.Struct, frozen=True):
    env_name: object = None


describe(_Metadata)


def fields(row: Row) -> Fields:
    """`temperatures` are those of the turn that a token belongs to, prompt or output.

    `advantages` is None where the export asks for none, which prime-rl's packer refuses for a sample that has sampled
    tokens; 0.0 where not sampled. Raises Unfit.
    """
    sample = row.with_response()
    lengths = [span.end - span.start for span in sample.turns]
    experts, missing = shared.payload(row, "routed_experts", np.int16)
    data: Value = None
    if experts is not None:
        padded = np.zeros((len(sample.tokens), *experts.shape[1:]), np.int16)
        padded[:-1] = experts
        data = {"data": padded.tobytes(), "shape": list(padded.shape), "dtype": "int16"}
    named = msgspec.json.decode(row.metadata, type=_Metadata).env_name if row.metadata else None
    return {
        "token_ids": sample.tokens,
        "mask": sample.loss_mask.astype(bool),
        "logprobs": sample.logprobs,
        "temperatures": np.repeat(np.array(shared.temperatures(row)), lengths),
        "advantages": shared.advantages(row),
        "env_name": named if isinstance(named, str) and named else ENV_NAME,
        "routed_experts": data,
        "routed_experts_missing": missing,
        **_mask(row),
        "trace_id": row.session.session_id,
        "branch_index": sample.segment,
        "reward": row.reward,
        **shared.beside(row),
    }


def _mask(row: Row) -> Fields:
    """All ids and, for each token, how many of them are its own, as int32; 0: prime-rl has no mask there."""
    mask, missing = shared.sampling_mask(row, 0)
    if mask is None:
        return {} if missing is None else {"sampling_mask": None, "sampling_mask_missing": missing}
    ids, counts = (array.astype("<i4").tobytes() for array in (mask.ids, mask.lengths))
    return {"sampling_mask": {"ids": ids, "counts": counts}, "sampling_mask_missing": None}
