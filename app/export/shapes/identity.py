"""Which rollout a row is: the columns that trainers' shapes have beside their own, so that an export can be resumed."""

from __future__ import annotations

from typing import Any

import msgspec

from app.export.row import Columns, Fields, Row

COLUMNS: Columns = {
    "session_id": "text",
    "segment": "int64",
    "group_id": "text",
    "attempt": "int64",
    "status": "text",
    "final": "bool",
    "cursor": "text",
}

ROLLOUT: Columns = {
    "rollout_id": "text",
    "rollout_rows": "int64",
    "rollout_weight": "float64",
}
"""Columns of each shape, for trainers that count rollouts instead of rows."""

SAMPLING: Columns = {"sampling": "json"}
"""The last column of each shape: which distribution each turn's logprobs are of."""

ROUTED: Columns = {"routing": "text", "routing_differs": "int64"}
"""Columns beside it in an export of sampled rows of replay payloads."""


def fields(row: Row) -> Fields:
    """`cursor` gives what comes after the row."""
    return {
        "session_id": row.session.session_id,
        "segment": row.sample.segment,
        "group_id": row.group_id,
        "attempt": row.session.config.attempt,
        "status": row.sample.status,
        "final": row.final,
        "cursor": row.cursor,
    }


def of(shaped: Fields) -> Fields:
    """The identity that a shaped row has; of a session's row without a segment, of a group's that of its last session.

    Raises KeyError for a row without one.
    """
    fields: Any = shaped
    if "session_ids" in fields:
        return {"session_id": fields["session_ids"][-1], "segment": None, "cursor": fields["cursor"]}
    if "leaves" in fields:
        return {"session_id": fields["session_id"], "segment": None, "cursor": fields["cursor"]}
    if "cursor" not in fields:
        fields = fields.get("extra_fields") or fields.get("extra") or fields["metadata"]["turnlog"]
    return {name: fields[name] for name in ("session_id", "segment", "cursor")}


def rollout(row: Row) -> Fields:
    return {
        "rollout_id": row.rollout_id,
        "rollout_rows": row.rollout_rows,
        "rollout_weight": row.rollout_weight,
    }


def sampling(row: Row) -> Fields:
    sampling = {"sampling": [msgspec.structs.asdict(turn) for turn in row.sampling]}
    if row.routing_differs is None:
        return sampling
    return {**sampling, "routing": "sampled", "routing_differs": row.routing_differs}
