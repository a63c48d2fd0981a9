"""miles' row, which is slime's with `indexer_topk` and the adapter, and the body of `POST /sessions/{id}/samples`.

The latter is safetensors: tensors are `<field>.<i>` for sample i; the rest is JSON in `_samples_meta`. miles' driver
(`decode_samples_and_merge_input_sample`) refuses another dtype, a tensor that no sample names, and a sample without
`nulls`: the tensor fields that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Literal

import msgspec
import numpy as np

from app.domain.samples import Array, Sample
from app.export import jsontext
from app.export.containers.safetensors import Spool, TensorFile
from app.export.row import Columns, Fields, Row, Value
from app.export.shapes import shared, slime

COLUMNS: Columns = {**slime.COLUMNS, "rollout_indexer_topk": "[[[int32]]]", "adapter": "text"}

MASKS: Columns = {"rollout_sampling_mask": {"ids": "[int32]", "offsets": "[int64]"}}

META = "_samples_meta"
"""The tensor (uint8) with the JSON of what is no array."""


def fields(row: Row) -> Fields:
    """Raises Unfit."""
    row = _with_last_status(row)
    positions, missing = shared.payload(row, "indexer_topk")
    mask, mask_missing = _mask(row)
    return {
        **slime.shaped(row, {"indexer_topk_missing": missing, "sampling_mask_missing": mask_missing}),
        **({} if mask is None else {"rollout_sampling_mask": mask}),
        "rollout_indexer_topk": positions,
        "adapter": row.adapter,
    }


def _mask(row: Row) -> tuple[dict[str, Array] | None, str | None]:
    """`RolloutSamplingMask`: the ids of each token of the response; miles wants none to be empty."""
    start = row.sample.prompt_length
    mask, missing = shared.sampling_mask(row, start)
    if mask is None:
        return None, missing
    mask = mask.with_singletons(row.sample.tokens[start:])
    return {"ids": mask.ids, "offsets": mask.offsets}, None


def _with_last_status(row: Row) -> Row:
    """miles' merge of a session's turns keeps the status of the last one."""
    sample = row.sample
    return msgspec.structs.replace(row, sample=msgspec.structs.replace(sample, status=sample.last_status))


def samples_body(
    rows: Sequence[Row],
    session_metadata: Mapping[str, Value],
    empty_reason: str | None,
    responses: Sequence[str] | None = None,
    versions: Literal["names", "spans"] = "names",
    beside: Sequence[Mapping[str, Value]] | None = None,
) -> bytes:
    """`empty_reason`, where there are no rows: `no_records`, `all_truncated` or `text_only`; else None.

    `responses` are the decoded responses. Without a tokenizer there are none: the text of the assistant's messages, a
    line after the other, stands in their place, without what came between them. `versions`: weight versions as names,
    or by call with the positions of their tokens in the sample, as later drivers read them. `beside` is what each
    sample's metadata has beside Turnlog's own, which is one key of it: the driver merges it into its own sample's.
    """
    with closing(TensorFile()) as file, closing(Spool()) as meta:
        samples: list[Fields] = []
        for index, row in enumerate(map(_with_last_status, rows)):
            sample, start = row.sample, row.sample.prompt_length
            experts, experts_missing = shared.payload(row, "routed_experts")
            positions, positions_missing = shared.payload(row, "indexer_topk")
            mask, mask_missing = _mask(row)
            tensors: dict[str, Array | None] = {
                "tokens": sample.tokens.astype(np.int64),
                "loss_mask": sample.loss_mask[start:],
                "rollout_log_probs": sample.logprobs[start:],
                "rollout_routed_experts": experts,
                "rollout_indexer_topk": positions,
            }
            nulls = [name for name, array in tensors.items() if array is None]
            if mask is not None:
                tensors |= {f"rollout_sampling_mask.{name}": array for name, array in mask.items()}
            elif row.mask is not msgspec.UNSET:
                nulls.append("rollout_sampling_mask")
            for name, array in tensors.items():
                if array is not None:
                    file.add(f"{name}.{index}", array)
            missing = {
                "routed_experts_missing": experts_missing,
                "indexer_topk_missing": positions_missing,
                "sampling_mask_missing": mask_missing,
            }
            samples.append(
                {
                    "response": shared.replies(row) if responses is None else responses[index],
                    "response_length": sample.response_length,
                    "status": sample.status,
                    "weight_versions": shared.weight_versions(row) if versions == "names" else _version_calls(sample),
                    "reward": row.reward,
                    "spec_info": _speculative(sample),
                    "prefix_cache_info": {
                        "cached_tokens": sum(turn.event.cached_tokens or 0 for turn in row.turns),
                        "total_prompt_tokens": sum(span.output_start for span in sample.turns),
                    },
                    "metadata": slime.metadata(row, {} if beside is None else beside[index], missing),
                    "nulls": nulls,
                }
            )
        body = {"samples": samples, "session_metadata": session_metadata, "empty_reason": empty_reason}
        meta.add(jsontext.encode(body))
        return b"".join(file.pieces(META, (meta,)))


def _speculative(sample: Sample) -> Fields:
    """The sums of what the engines said; empty where none did."""
    spans = [(span.speculative, span.end - span.output_start) for span in sample.turns]
    counted = [(counts, sampled) for counts, sampled in spans if counts is not None]
    if not counted:
        return {}
    return {
        "spec_accept_token_num": sum(counts.accepted_tokens for counts, _ in counted),
        "spec_draft_token_num": sum(counts.draft_tokens for counts, _ in counted),
        "spec_verify_ct": sum(counts.verify_steps for counts, _ in counted),
        "completion_token_num": sum(sampled for _, sampled in counted),
    }


def _version_calls(sample: Sample) -> list[list[Fields]]:
    """For each turn the spans of its output that one weight version sampled."""
    spans = sample.version_spans
    return [
        [
            {"version": span.version, "abs_start": span.start, "abs_end": span.end}
            for span in spans
            if turn.output_start <= span.start < turn.end
        ]
        for turn in sample.turns
    ]
