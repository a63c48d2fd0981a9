"""The readers of the page's views. They never write."""

from __future__ import annotations

import time
from typing import NamedTuple

from app.api.page.conversation import Conversations
from app.api.page.group_list import GroupList
from app.api.page.overview import Overviews
from app.api.page.session_view import SessionViews
from app.api.page.token_view import TokenViews
from app.api.page.watch import Watch
from app.export.preview import Previews
from app.fleet.engines import Engines
from app.fleet.pauses import Pauses
from app.sessions.registration import Registration
from app.sessions.session_list import SessionList
from app.store.engine import Database
from app.turn.stages import RecentTurnStats
from app.turn.token_in import TokenIn
from app.turn.turns import Turns


class Page(NamedTuple):
    sessions: SessionList
    overviews: Overviews
    watch: Watch
    views: SessionViews
    conversations: Conversations
    tokens: TokenViews
    groups: GroupList
    previews: Previews


def page_of(
    *,
    database: Database,
    turns: Turns,
    engines: Engines,
    pauses: Pauses,
    token_in: TokenIn,
    recent: RecentTurnStats,
    registration: Registration,
    release: str,
) -> Page:
    """Build the readers. `release` is Turnlog's version."""
    sessions = SessionList(database, turns.held, engines, time.time)
    return Page(
        sessions=sessions,
        overviews=Overviews(database, sessions, pauses, recent, registration, time.time),
        watch=Watch(database, sessions),
        views=SessionViews(database, turns.held),
        conversations=Conversations(database),
        tokens=TokenViews(database, token_in.prompts),
        groups=GroupList(database),
        previews=Previews(database, release),
    )
