"""The drill of staged tokens: a turn whose processes and engines die again and again is the one that nobody disturbs."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from app.domain.events import SessionConfig, TurnCommitted
from app.errors import AppError, SessionClosed, SessionNotFound
from app.store import reads
from tests.tools.simulation.client import Client
from tests.tools.simulation.engine import Message, digest
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.vllm import sampled, text_of
from tests.tools.simulation.world import World

SESSION_ID = "staged"
DEATHS = (1, 2, 3, 5)
GENERATION_S = 4.0
AGAIN_S, NEAR_S = 0.3, 0.01
WRITTEN_S = 0.1
"""More than it takes to write a row where nothing fails."""


class StagedDrill(Client):
    """Asks once, and again whenever it is told of an error."""

    def __init__(self, world: World, seed: int, *arguments: object) -> None:
        super().__init__(world, *arguments)  # type: ignore[arg-type]
        self._draws = random.Random(f"staged {seed}")
