"""The readers of the page's views. They never write."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from app.api.page.checkpoint_view import CheckpointViews
from app.api.page.conversation import Conversations
from app.api.page.metadata_columns import MetadataColumns
from app.api.page.overview import Overviews
from app.api.page.rollout_view import Rollouts
from app.api.page.session_view import SessionViews
from app.api.page.token_view import TokenViews
from app.api.page.watch import Watch
from app.export.preview import Previews
from app.sessions.session_list import SessionList

if TYPE_CHECKING:
    from app.api.state import Services


class PageReaders(NamedTuple):
    sessions: SessionList
    listed: MetadataColumns
    overviews: Overviews
    watch: Watch
    views: SessionViews
    conversations: Conversations
    tokens: TokenViews
    rollouts: Rollouts
    previews: Previews
    checkpoints: CheckpointViews


def page_of(app: Services) -> PageReaders:
    database, held = app.database, app.turns.held
    sessions = app.session_list
    return PageReaders(
        sessions=sessions,
        listed=MetadataColumns(database, sessions),
        overviews=Overviews(database, sessions, app.pauses, app.metrics.recent, app.registration, time.time),
        watch=Watch(database, sessions, app.log_end),
        views=SessionViews(database, held),
        conversations=Conversations(database),
        tokens=TokenViews(database, app.token_in.prompts),
        rollouts=Rollouts(database),
        previews=Previews(database, app.release),
        checkpoints=CheckpointViews(database),
    )
