"""prime-rl's row: the fields of its `TrainingSample`, all of the full sequence's length.

prime-rl has a row of experts for each token; the last, which no forward pass has seen, it fills with zeros itself, so
the same is done here. Its packer joins samples' experts only where their types are equal: all are int16.
`trace_id` and `branch_index` are its own names for where a sample comes from.
"""

from __future__ import annotations

import msgspec
import numpy as np

from app.export.row import Columns, Fields, Row, Value
from app.export.shapes import advantages, identity, images, routing
from app.export.shapes.temperature import temperatures
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
    **identity.COLUMNS,
    **identity.ROLLOUT,
    **identity.SAMPLING,
    **images.LEFT_OUT,
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
    experts, missing = _experts(row)
    return {
        "token_ids": sample.tokens,
        "mask": sample.loss_mask.astype(bool),
        "logprobs": sample.logprobs,
        "temperatures": np.repeat(np.array(temperatures(row)), lengths),
        "advantages": advantages.by_token(row),
        "env_name": _env_name(row.metadata),
        "routed_experts": experts,
        "routed_experts_missing": missing,
        **_mask(row),
        "trace_id": row.session.session_id,
        "branch_index": sample.segment,
        "reward": row.reward,
        **identity.fields(row),
        **identity.rollout(row),
        **identity.sampling(row),
        **images.left_out(row),
    }


def _mask(row: Row) -> Fields:
    """All ids and, for each token, how many of them are its own, as int32; 0: prime-rl has no mask there."""
    mask, missing = routing.whole_mask(row, 0)
    if mask is None:
        return {} if missing is None else {"sampling_mask": None, "sampling_mask_missing": missing}
    ids, counts = (array.astype("<i4").tobytes() for array in (mask.ids, mask.lengths))
    return {"sampling_mask": {"ids": ids, "counts": counts}, "sampling_mask_missing": None}


def _env_name(metadata: bytes | None) -> str:
    named = msgspec.json.decode(metadata, type=_Metadata).env_name if metadata else None
    return named if isinstance(named, str) and named else ENV_NAME


def _experts(row: Row) -> tuple[Value, str | None]:
    """Bytes of int16 [T, layers, top_k], or why there are none."""
    ids, missing = routing.whole(row, "routed_experts", np.iinfo(np.int16).max)
    if ids is None:
        return None, missing
    padded = np.zeros((len(row.sample.tokens), *ids.shape[1:]), np.int16)
    padded[:-1] = ids
    return {"data": padded.tobytes(), "shape": list(padded.shape), "dtype": "int16"}, None
