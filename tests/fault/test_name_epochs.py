"""Names that come again in each epoch, while servers are killed."""

from __future__ import annotations

import asyncio

import pytest

from tests.tools import name_epochs

pytestmark = pytest.mark.long


@pytest.mark.parametrize("processes", [1, 2], ids=["sqlite", "two-on-postgresql"])
def test_no_turn_is_in_the_session_of_another_epoch(processes: int) -> None:
    with name_epochs.serving(processes) as servers:
        result = asyncio.run(name_epochs.run(servers, epochs=6, seed=processes))
    assert result.faults == 0, str(result)
    assert result.kills > 0
