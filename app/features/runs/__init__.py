"""Runs: what they are given, what became of them, their limits and their end.

    routes               `/runs`, `/runs/{run}`
    creating a session   is refused in a run that is closed, and past its limits   (`StorePoints.creating`)
    a turn               is refused past its run's limit on tokens                 (`TurnPoints.held_runs`)
    a turn's end         is counted for the metrics of its run                     (`TurnPoints.ended`)
    in the background    one process counts the tokens of runs with a limit, and ends what was begun to be ended

The kernel knows to which run a session belongs (`sessions.run`). The table `runs` has what was given to a run, or that
it has ended; a run needs no row. Figures come from the log and the sessions' heads. Without this feature runs have no
routes, and nobody counts their tokens; creations are held to what the table says in every process of the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.features.runs import schema as schema
from app.features.runs.counters import METRICS as METRICS

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.runs.runs import Runs
    from app.services import Services


def entries() -> list[Route]:
    from app.features.runs import page_view, routes

    return [*routes.route.entries, *page_view.route.entries]


def add_to(services: Services) -> Runs:
    from app.features.runs.runs import Runs

    runs = Runs(services)

    async def open_paths() -> None:
        for path in services.turns.paths.values():  # that of sessions of text too
            path.points.ended.append(runs.counters.ended)

    services.opens.append(open_paths)
    services.refreshes.append(runs.counters.publish)
    services.registered_calls.append(runs.start)
    services.ends.append(runs.stop)
    return runs
