"""What the web page is made from: one reader a view. Nothing here writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from app.service.conversation import Conversations
from app.service.export_preview import Previews
from app.service.group_list import GroupList
from app.service.overview import Overviews
from app.service.pauses import Pauses
from app.service.session_list import SessionList
from app.service.session_view import SessionViews
from app.service.stages import RecentTurns
from app.service.token_in import TokenIn
from app.service.token_view import TokenViews
from app.service.turns import Turns
from app.service.watch import Watch
from app.store.engine import Database
from app.upstream.engines import Engines


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
    recent: Callable[[], RecentTurns],
    read_only: Callable[[], str | None],
    release: str,
) -> Page:
    """`recent` says what the last minute of turns was like, `read_only` why none is taken; `release` is this one."""

    def engine_versions() -> list[str | None]:
        return [member.weight_version for member in engines.members.values()]

    sessions = SessionList(database, turns.held, engine_versions, time.time)
    return Page(
        sessions=sessions,
        overviews=Overviews(database, sessions, pauses, recent, read_only, time.time),
        watch=Watch(database, sessions),
        views=SessionViews(database, turns.held),
        conversations=Conversations(database),
        tokens=TokenViews(database, token_in.prompts),
        groups=GroupList(database),
        previews=Previews(database, release),
    )
