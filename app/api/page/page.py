"""The readers of the page's views. They never write."""

from __future__ import annotations

from typing import NamedTuple

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
