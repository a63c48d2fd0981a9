"""OpenEnv's row: the `TrainingTurn`s of a `TrainingTrace` (openenv 0.10).

A trace is the session's: the `turns` of all its rows together, in each of which another has its own. A turn has its
whole prompt, and a mask of prompt and completion.
"""

from __future__ import annotations

import msgspec

from app.export.row import Columns, Fields, Row
from app.export.shapes import shared
from app.export.shapes.shared import Generation

COLUMNS: Columns = {
    "schema_version": "int64",
    "turns": "json",
    "reward": "float64",
    "advantage": "float64",
    **shared.BESIDE,
}

SCHEMA_VERSION = 1


def fields(row: Row) -> Fields:
    """`turns` has the generations that this row has in its loss: none for a row that has none."""
    sampling = {one.turn: msgspec.structs.asdict(one) for one in row.sampling}
    return {
        "schema_version": SCHEMA_VERSION,
        "turns": [_turn(row, one, sampling[one.span.turn]) for one in shared.trained(row)],
        "reward": row.reward,
        "advantage": row.advantage,
        **shared.beside_messages(row),
    }


def _turn(row: Row, one: Generation, sampling: Fields) -> Fields:
    sample, event = row.sample, one.turn.event
    start, end = one.span.output_start, one.span.end
    mask = sample.loss_mask[:end].copy()
    mask[:start] = 0
    tools = one.turn.tools
    return {
        "node_id": one.name,
        "prompt_token_ids": sample.tokens[:start],
        "completion_token_ids": sample.tokens[start:end],
        "per_token_logps": sample.logprobs[start:end],
        "loss_mask": mask,
        "request": {
            "messages": list(map(msgspec.Raw, one.messages)),
            "tools": None if tools is None else msgspec.Raw(tools),
        },
        "response": {"choices": [{"message": msgspec.Raw(one.turn.message), "finish_reason": event.finish_reason}]},
        "metadata": {
            "turn": event.turn,
            "parent": one.parent,
            "model": shared.model_of(one.turn.params),
            "sampling_params": sampling,
            "weight_versions": [span.version for span in event.weight_versions],
        },
    }
