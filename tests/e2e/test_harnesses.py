"""Real agent harnesses, each with its own way of sending a history back: no turn is taken for a divergence."""

from __future__ import annotations

import pytest
from integration.stand import Talk

from e2e.harnesses import HARNESSES, TASKS

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

OTHERS = ("smolagents", "mini-swe-agent")
"""They have tools of their own, and rewrite or leave out what they got."""


@pytest.mark.parametrize("harness", [name for name in HARNESSES if name not in OTHERS])
def test_one_row(base_url: str, talk: Talk, harness: str) -> None:
    """Several turns with tool calls, all on one live path and in one segment."""
    HARNESSES[harness].run(base_url)
    committed = talk.committed()
    assert len(committed) > len(TASKS)
    assert set(talk.types()) == {"SessionCreated", "TurnOpened", "AffinityBound", "TurnCommitted"}
    [row] = talk.rows()
    assert [span["turn"] for span in row["turns"]] == list(range(1, len(committed) + 1))
    assert [span["finish_reason"] for span in row["turns"]].count("tool_calls") >= len(TASKS)
    assert sum(message["role"] == "tool" for message in row["messages"]) >= len(TASKS)
