"""The drills that need no storm: in some schedules one of them, at the end, where nothing fails any more."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from app.settings import Settings
from tests.tools.simulation import emptied, forking
from tests.tools.simulation.aborted import AbortedClient
from tests.tools.simulation.annotated import AnnotatingClient
from tests.tools.simulation.conditions import Habits, Theme
from tests.tools.simulation.damaged import DamagedClient
from tests.tools.simulation.emptied import EmptiedClient
from tests.tools.simulation.feed import GroupingClient
from tests.tools.simulation.forking import ForkingClient
from tests.tools.simulation.keeper import Keeper
from tests.tools.simulation.spending import SpendingClient
from tests.tools.simulation.world import World

EVERY = 3
"""Schedules of which one has such a drill, each time another kind."""

NAME = "quiet"

Kind = type[
    AbortedClient | AnnotatingClient | DamagedClient | EmptiedClient | ForkingClient | GroupingClient | SpendingClient
]

KINDS: Mapping[Kind, Sequence[Theme]] = {
    SpendingClient: ("features",),
    AnnotatingClient: ("features", "fights", "streams"),
    ForkingClient: ("features",),
    AbortedClient: ("streams", "features", "fights"),
    GroupingClient: ("features",),
    EmptiedClient: ("fights", "features"),
    DamagedClient: ("fights", "features", "streams"),
}
"""In schedules of which themes they are: the search for an order of calls knows no limits, and streams have no
payloads."""

NEEDS: Mapping[Kind, Mapping[str, Any]] = {ForkingClient: forking.NEEDS, EmptiedClient: emptied.NEEDS}
"""Settings without which a drill has nothing to see."""


def draw(seed: int, theme: Theme) -> Kind | None:
    """Evenly among the schedules, for there are few of each kind: the next kind in turn that fits the theme."""
    turn, left = divmod(seed, EVERY)
    kinds = list(KINDS)
    place = turn % len(kinds)
    fitting = (kind for kind in (*kinds[place:], *kinds[:place]) if theme in KINDS[kind])
    return None if left else next(fitting)


def with_needs(settings: Settings, kind: Kind | None) -> Settings:
    return settings if kind is None else settings.model_copy(update=NEEDS.get(kind, {}))


def drill(kind: Kind, world: World, keeper: Keeper) -> Coroutine[Any, Any, None]:
    """Raises SessionClosed, SessionNotFound, GaveUp."""
    arguments = (world, NAME, NAME, Habits(loyalty=1.0))
    return (ForkingClient(keeper, *arguments) if issubclass(kind, ForkingClient) else kind(*arguments)).drill()
