"""Turnlog's own rows, one a segment: `turnlog`, everything the log knows of it, and `messages`, a conversation, for
supervised fine-tuning and for reading."""

from __future__ import annotations

import msgspec

from app.domain.request import as_raw
from app.domain.samples import TurnSpan
from app.export import jsontext
from app.export.row import Columns, Fields, MaskRows, Routing, Row, Value
from app.export.shapes import shared
from workers.sampling_masks import KIND as MASK

COLUMNS: Columns = {
    "session_id": "text",
    "segment": "int64",
    "run": "text",
    "group_id": "text",
    "attempt": "int64",
    "parent_session_id": "text",
    "adapter": "text",
    "status": "text",
    "failed": "json",
    "final": "bool",
    "as_of_seq": "int64",
    "reward": "float64",
    "reward_components": "json",
    "turn_rewards": "json",
    "advantage": "float64",
    "prompt_length": "int64",
    "response_length": "int64",
    "tokens": "[int32]",
    "loss_mask": "[uint8]",
    "sampled_mask": "[uint8]",
    "logprobs": "[float64]",
    "weight_versions": "[int64]",
    "weight_version_names": "[text]",
    "weight_version_regressed": "bool",
    "turns": "json",
    "routed_experts": "bytes",
    "row_start": "int64",
    "rows": "int64",
    "dtype": "text",
    "shape": "[int64]",
    "indexer_topk": {"data": "bytes", "row_start": "int64", "rows": "int64", "dtype": "text", "shape": "[int64]"},
    "tombstoned": "[text]",
    "segment_cause": "text",
    "messages": "json",
    "metadata": "json",
    "provenance": "json",
    "cursor": "text",
    **shared.ROLLOUT,
    "branch": "int64",
    "branch_cause": "text",
    "parent_branch": "int64",
    "fork_turn": "int64",
    "agent_id": "text",
    "pinned": "json",
    **shared.SAMPLING,
    "replay_urls": "json",
    "note": "text",
    "tags": "[text]",
    "images": "json",
    "limit": "text",
    "annotations": "json",
    "name": "text",
    "generation": "int64",
}

MASKS: Columns = {
    "sampling_mask": {"data": "bytes", "row_start": "int64", "rows": "int64", "dtype": "text", "offsets": "[int64]"}
}

TOP_COLUMNS: Columns = {
    "top_ids": "[[int32]]",
    "top_logprobs": "[[float32]]",
    "prompt_logprobs": "[float32]",
    "prompt_logprobs_mask": "[uint8]",
}
"""Where the export asks for the most likely tokens (`top_k`)."""


def fields(row: Row) -> Fields:
    """`limit` is there only where one ended the row, `advantage` where the export asks for one, the payloads' fields
    where there are any."""
    session, sample = row.session, row.sample
    config, pinned = session.config, None
    if config.model or config.params:  # as text, which holds any number
        pinned = as_raw({"model": config.model, "params": config.params})
    return {
        "session_id": session.session_id,
        "segment": sample.segment,
        "run": config.of_run,
        "group_id": row.group_id,
        "attempt": config.attempt,
        "parent_session_id": config.parent,
        "adapter": row.adapter,
        "status": sample.status,
        "failed": row.failed,
        "final": row.final,
        "as_of_seq": row.as_of_seq or session.version,
        "reward": row.reward,
        "reward_components": row.reward_components,
        "turn_rewards": {
            str(number): {"reward": given.reward, "components": given.components}
            for number, given in session.turn_rewards.items()
            if not session.is_tree or number in sample.in_loss
        },
        "advantage": row.advantage,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "sampled_mask": sample.sampled_mask,
        "logprobs": sample.logprobs,
        "weight_versions": sample.weight_versions,
        "weight_version_names": sample.weight_version_names,
        "weight_version_regressed": sample.regressed,
        "turns": [_turn(span) for span in sample.turns],
        **(_payloads(row) if row.replay or row.routing else {}),
        "segment_cause": sample.cause,
        "messages": jsontext.array(row.messages),
        "metadata": msgspec.Raw(row.metadata or b"{}"),
        "provenance": msgspec.structs.asdict(row.source),
        "cursor": row.cursor,
        **shared.rollout(row),
        "branch": sample.branch,
        "branch_cause": sample.place.cause,
        "parent_branch": sample.place.parent_branch,
        "fork_turn": sample.place.fork_turn,
        "agent_id": sample.agent_id,
        "pinned": pinned,
        **shared.sampling(row),
        **({} if row.links is None else {"replay_urls": row.links}),
        "note": session.note,
        "tags": list(session.tags),
        "name": session.name,
        "generation": session.generation,
        **({} if row.images is None else {"images": row.images}),
        **({} if sample.limit is None else {"limit": sample.limit}),
        **({} if row.annotations is None else {"annotations": row.annotations}),
        **({} if row.top is None else msgspec.structs.asdict(row.top)),
    }


def _turn(span: TurnSpan) -> Fields:
    fields = msgspec.structs.asdict(span)
    if span.parts:
        fields["parts"] = [msgspec.structs.asdict(part) for part in span.parts]
    if span.speculative is not None:
        fields["speculative"] = msgspec.structs.asdict(span.speculative)
    return fields


def _payloads(row: Row) -> dict[str, Value]:
    """`routed_experts` beside its own fields, any other kind as an object."""
    experts = row.routing.get("routed_experts")
    fields: dict[str, Value] = {"routed_experts": None, "row_start": None, "rows": 0, "dtype": None, "shape": []}
    if experts is not None:
        fields = {"routed_experts" if name == "data" else name: value for name, value in _payload(experts).items()}
    others: dict[str, Value] = {
        kind: None if payload is None else _payload(payload)
        for kind, payload in row.routing.items()
        if kind != "routed_experts"
    }
    tombstoned = [kind for kind, payload in row.routing.items() if payload is None]
    if row.mask is not msgspec.UNSET:
        others[MASK] = None if row.mask is None else _payload(row.mask)
        tombstoned += [MASK] if row.mask is None else []
    return {**fields, **others, "tombstoned": tombstoned}


def _payload(stored: Routing | MaskRows) -> dict[str, Value]:
    """Rows [row_start, row_start + rows) as little-endian ids; `shape` is of all of them. Of a sampling mask row r has
    the ids [offsets[r], offsets[r + 1])."""
    masks = stored.masks if isinstance(stored, MaskRows) else None
    ids = stored.ids if isinstance(stored, Routing) else stored.masks.ids
    return {
        "data": ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes(),
        "row_start": stored.row_start,
        "rows": len(ids) if masks is None else len(masks),
        "dtype": ids.dtype.name,
        **({"shape": list(ids.shape)} if masks is None else {"offsets": masks.offsets}),
    }


MESSAGES_COLUMNS: Columns = {
    "messages": "json",
    "tools": "json",
    "metadata": "json",
    "reward": "float64",
    "reward_components": "json",
    **shared.IDENTITY,
    **shared.ROLLOUT,
}


def messages(row: Row) -> Fields:
    """`messages` as sent and answered, from the session's beginning to the segment's end; `tools` of the last turn.

    A completion's prompt and answer have no role: each is a text.
    """
    tools = row.turns[-1].tools
    return {
        "messages": jsontext.array(row.messages),
        "tools": None if tools is None else msgspec.Raw(tools),
        "metadata": msgspec.Raw(row.metadata or b"{}"),
        "reward": row.reward,
        "reward_components": row.reward_components,
        **shared.identity(row),
        **shared.rollout(row),
    }
