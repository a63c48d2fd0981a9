"""What must hold of exported rows: they have what the clients of their turns were told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tests.tools.simulation.history import History

Row = Mapping[str, Any]
"""A row of the shape `turnlog`, decoded."""


def problems(rows: Iterable[Row], history: History) -> Iterator[str]:
    """Each turn of the rows that was acknowledged has the ids and logprobs of its reply."""
    for row in rows:
        told = {turn.turn: turn.body for turn in history.turns_of(row["session_id"])}
        for span in row["turns"]:
            body = told.get(span["turn"])
            if body is None:
                continue
            [choice] = msgspec.json.decode(body)["choices"]
            sampled = [(token, logprob) for logprob, token, _ in choice["meta_info"]["output_token_logprobs"]]
            part = slice(span["output_start"], span["end"])
            if list(zip(row["tokens"][part], row["logprobs"][part], strict=True)) != sampled:
                yield f"a row of {row['session_id']} has other tokens than the reply of its turn {span['turn']}"
