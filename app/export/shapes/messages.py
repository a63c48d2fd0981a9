"""The format `messages`: a segment as a conversation, for supervised fine-tuning and for reading."""

from __future__ import annotations

import msgspec

from app.export.row import Columns, Fields, Row
from app.export.shapes import identity

COLUMNS: Columns = {
    "messages": "json",
    "tools": "json",
    "metadata": "json",
    "reward": "float64",
    "reward_components": "json",
    **identity.COLUMNS,
    **identity.ROLLOUT,
}


def fields(row: Row) -> Fields:
    """`messages` as sent and answered, from the session's beginning to the segment's end; `tools` of the last turn.

    A completion's prompt and answer have no role: each is a text.
    """
    tools = row.turns[-1].tools
    given = row.session.reward
    return {
        "messages": msgspec.Raw(b"[" + b",".join(row.messages) + b"]"),
        "tools": None if tools is None else msgspec.Raw(tools),
        "metadata": msgspec.Raw(row.metadata or b"{}"),
        "reward": row.reward,
        "reward_components": {} if given is None else given.components,
        **identity.fields(row),
        **identity.rollout(row),
    }
