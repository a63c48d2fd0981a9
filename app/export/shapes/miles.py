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
from app.export.shapes import identity, images, routing, slime
from workers.codec import describe

COLUMNS: Columns = {**slime.COLUMNS, "rollout_indexer_topk": "[[[int32]]]", "adapter": "text"}

MASKS: Columns = {"rollout_sampling_mask": {"ids": "[int32]", "offsets": "[int64]"}}

META = "_samples_meta"
"""The tensor (uint8) with the JSON of what is no array."""


def fields(row: Row) -> Fields:
    """Raises Unfit."""
    row = _with_last_status(row)
    positions, missing = routing.whole(row, "indexer_topk")
    mask, mask_missing = _mask(row)
    return {
        **slime.shaped(row, {"indexer_topk_missing": missing, "sampling_mask_missing": mask_missing}),
        **({} if mask is None else {"rollout_sampling_mask": mask}),
        "rollout_indexer_topk": None if positions is None else positions.astype(np.int32),
        "adapter": row.adapter,
    }


def _mask(row: Row) -> tuple[dict[str, Array] | None, str | None]:
    """`RolloutSamplingMask`: the ids of each token of the response; miles wants none to be empty."""
    start = row.sample.prompt_length
    mask, missing = routing.whole_mask(row, start)
    if mask is None:
        return None, missing
    mask = mask.with_singletons(row.sample.tokens[start:])
    return {"ids": mask.ids, "offsets": mask.offsets}, None


def _with_last_status(row: Row) -> Row:
    """miles' merge of a session's turns keeps the status of the last one."""
    sample = row.sample
    return msgspec.structs.replace(row, sample=msgspec.structs.replace(sample, status=sample.last_status))


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


describe(_Message)


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
    sample's metadata has beside Turnlog's own.
    """
    with closing(TensorFile()) as file, closing(Spool()) as meta:
        samples = []
        for index, row in enumerate(map(_with_last_status, rows)):
            tensors, missing = _tensors(row)
            for name, array in tensors.items():
                if array is not None:
                    file.add(f"{name}.{index}", array)
            response = _text(row) if responses is None else responses[index]
            nulls = [name for name, array in tensors.items() if array is None]
            mask, mask_missing = _mask(row)
            for name, array in (mask or {}).items():
                file.add(f"rollout_sampling_mask.{name}.{index}", array)
            if mask is None and row.mask is not msgspec.UNSET:
                nulls.append("rollout_sampling_mask")
            missing = {**missing, "sampling_mask_missing": mask_missing}
            samples.append(_sample(row, response, nulls, missing, versions, {} if beside is None else beside[index]))
        body = {"samples": samples, "session_metadata": session_metadata, "empty_reason": empty_reason}
        meta.add(jsontext.encode(body))
        return b"".join(file.pieces(META, (meta,)))


def _tensors(row: Row) -> tuple[dict[str, Array | None], Fields]:
    """The sample's tensors, and why one of a payload's is None."""
    sample, start = row.sample, row.sample.prompt_length
    experts, experts_missing = routing.whole(row, "routed_experts")
    positions, positions_missing = routing.whole(row, "indexer_topk")
    return {
        "tokens": sample.tokens.astype(np.int64),
        "loss_mask": sample.loss_mask[start:],
        "rollout_log_probs": sample.logprobs[start:],
        "rollout_routed_experts": None if experts is None else experts.astype(np.int32),
        "rollout_indexer_topk": None if positions is None else positions.astype(np.int32),
    }, {"routed_experts_missing": experts_missing, "indexer_topk_missing": positions_missing}


def _sample(
    row: Row,
    response: str,
    nulls: Sequence[str],
    missing: Fields,
    versions: Literal["names", "spans"],
    beside: Mapping[str, Value],
) -> Fields:
    """The driver merges `metadata` into its own sample's, so ours is one key of it."""
    sample = row.sample
    ours = {
        **identity.fields(row),
        **missing,
        **identity.rollout(row),
        **identity.sampling(row),
        **images.left_out(row),
    }
    return {
        "response": response,
        "response_length": sample.response_length,
        "status": sample.status,
        "weight_versions": slime.weight_versions(sample) if versions == "names" else _version_calls(sample),
        "reward": row.reward,
        "spec_info": _speculative(sample),
        "prefix_cache_info": {
            "cached_tokens": sum(turn.event.cached_tokens or 0 for turn in row.turns),
            "total_prompt_tokens": sum(span.output_start for span in sample.turns),
        },
        "metadata": {**beside, "turnlog": {name: value for name, value in ours.items() if value is not None}},
        "nulls": nulls,
    }


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


def _text(row: Row) -> str:
    """A completion's answer is a text rather than a message."""
    answers = [msgspec.json.decode(turn.message, type=str | _Message) for turn in row.turns]
    return "\n".join(answer if isinstance(answer, str) else answer.content or "" for answer in answers)
