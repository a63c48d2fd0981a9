"""What all parts of a schedule share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.settings import Settings
from tests.tools.simulation.conditions import Theme, Weather
from tests.tools.simulation.engine import Engines
from tests.tools.simulation.history import History
from tests.tools.simulation.loop import SimulatedLoop
from tests.tools.simulation.spelling import Spelling
from tests.tools.simulation.store import Store

if TYPE_CHECKING:
    from tests.tools.simulation.process import Process


@dataclass
class World:
    """`pick` gives a process to ask, or None where none serves; `note` is told what happens.

    `files` are those of archives. `theme`: see `conditions`.
    """

    loop: SimulatedLoop
    rng: random.Random
    weather: Weather
    history: History
    store: Store
    theme: Theme
    engines: Engines
    spelling: Spelling
    settings: Settings
    pick: Callable[[], Process | None]
    note: Callable[[str], None]
    files: dict[str, bytes] = field(default_factory=dict)

    def happens(self, probability: float) -> bool:
        """Only while the weather is bad."""
        return self.weather.is_bad and self.rng.random() < probability

    def must(self, good: bool, what: str) -> None:
        """What does not hold is a problem of the schedule."""
        if not good:
            self.history.problem(what)
