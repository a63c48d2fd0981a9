"""The web page: its static files, the read-only routes under `/ui/api`, and the readers of its views.

It reads the log, the heads and what the process has in memory. Nothing of it touches a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.gates import Paused
    from app.features.page.metadata_columns import MetadataColumns
    from app.features.page.overview import Overviews
    from app.features.page.preview import Previews
    from app.features.page.rollout_view import Rollouts
    from app.features.page.summaries import Summaries
    from app.features.page.token_view import TokenViews
    from app.features.page.turn_view import TurnViews
    from app.features.page.watch import Watch
    from app.services import Services
    from app.sessions.conversation import Conversations


class Page(NamedTuple):
    """The readers of the page's views. They never write."""

    listed: MetadataColumns
    overviews: Overviews
    watch: Watch
    conversations: Conversations
    turns: TurnViews
    tokens: TokenViews
    rollouts: Rollouts
    previews: Previews
    summaries: Summaries


def entries() -> list[Route]:
    from app.features.page import files, live, routes

    return [*routes.route.entries, *live.route.entries, *files.entries()]


def add_to(services: Services) -> Page:
    from app.features.page.metadata_columns import MetadataColumns
    from app.features.page.overview import Overviews
    from app.features.page.preview import Previews
    from app.features.page.rollout_view import Rollouts
    from app.features.page.summaries import Summaries
    from app.features.page.token_view import TokenViews
    from app.features.page.turn_view import TurnViews
    from app.features.page.watch import Watch
    from app.sessions.conversation import Conversations

    database, sessions = services.database, services.session_list
    gates: Paused | None = services.features.get("gates")
    watch = Watch(database, sessions, services.log_end)
    services.waits.append(watch.stop)
    return Page(
        listed=MetadataColumns(database, sessions),
        overviews=Overviews(
            database,
            sessions,
            services.fleet,
            None if gates is None else gates.pauses,
            services.metrics.recent,
            services.registration,
            services.clock,
        ),
        watch=watch,
        conversations=Conversations(database),
        turns=TurnViews(database, services.turns.claimed, services.engines.engine_of),
        tokens=TokenViews(database, services.prompts),
        rollouts=Rollouts(database),
        previews=Previews(database, services.release),
        summaries=Summaries(database),
    )
