"""What one API process is made of, built once by `app.main`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app.api.connection_limit import ConnectionLimit
from app.api.limits import RequestMemory
from app.api.page.checkpoint_view import CheckpointViews
from app.api.page.conversation import Conversations
from app.api.page.metadata_columns import MetadataColumns
from app.api.page.overview import Overviews
from app.api.page.page import PageReaders
from app.api.page.rollout_view import Rollouts
from app.api.page.session_view import SessionViews
from app.api.page.token_view import TokenViews
from app.api.page.watch import Watch
from app.api.tokens import Tokens
from app.assembly import Assembly
from app.errors import AppError, SessionNotFound
from app.event_loop_lag import LoopLag
from app.export.exporter import Exporter, ExportMetrics, load_picker
from app.export.feed import Feed
from app.export.helpers import MOST_HELPERS, Helpers
from app.export.preview import Previews
from app.export.session_samples import SessionSamples
from app.fleet.health import HealthWatch
from app.metrics import Metrics
from app.sessions.all_events import AllEvents
from app.sessions.groups import GroupList
from app.sessions.log_end import LogEnd
from app.sessions.recovery import Registration
from app.sessions.session_list import SessionList
from app.settings import Settings
from app.store.engine import Database
from app.store.figures import CachedFigures
from app.upstream.client import EngineClient
from workers.pool import Pool

if TYPE_CHECKING:
    from app.tito.prompts import Prompts


class Services(Assembly):
    """The components of turns (`Assembly`), and those that only routes need."""

    def __init__(
        self,
        settings: Settings,
        release: str,
        database: Database,
        client: EngineClient,
        registration: Registration,
        prompts: Prompts | None,
        metrics: Metrics,
        tokens: Tokens,
        connection_limit: ConnectionLimit,
    ) -> None:
        self.pool = Pool(
            settings.workers, deadline_s=settings.worker_deadline_s, memory_bytes=settings.worker_memory_bytes
        )
        super().__init__(
            database=database,
            client=client,
            pool=self.pool,
            settings=settings,
            clock=time.time,
            incarnation=registration.incarnation,
            prompts=prompts,
        )
        self.settings = settings
        self.database = database
        self.registration = registration
        self.metrics = metrics
        self.tokens = tokens
        self.connection_limit = connection_limit
        self.release = release
        self.instance_id = uuid.uuid4().hex
        self.exported = ExportMetrics()
        self.picker = load_picker(settings.picker)
        self.exporter = Exporter(
            database, release, exported=self.exported, picker=self.picker, helpers=_helpers(settings)
        )
        self.feed = Feed(database, self.writer, self.exporter)
        self.samples = SessionSamples(self.cache, self.token_in, release, settings.samples_versions)
        self.health = HealthWatch(
            self.engines,
            client,
            dialect=settings.upstream_dialect,
            api_key=settings.upstream_api_key,
            is_paused=lambda: self.fleet.fleet.gate.is_shut,
        )
        self.inflight = RequestMemory(settings.inflight_bytes, settings.max_request_bytes)
        self.counted = CachedFigures(database, time.monotonic)
        self.log_end = LogEnd(database)
        self.all_events = AllEvents(database, self.log_end)
        self.session_list = SessionList(database, self.turns.held, self.engines, time.time)
        self.group_list = GroupList(database)
        self.lag = LoopLag(time.monotonic)
        self.explain: list[Callable[[str], Awaitable[AppError | None]]] = []
        """Ask where a session is that does not exist here."""
        self.page = PageReaders(
            sessions=self.session_list,
            listed=MetadataColumns(database, self.session_list),
            overviews=Overviews(database, self.session_list, self.pauses, metrics.recent, registration, time.time),
            watch=Watch(database, self.session_list, self.log_end),
            views=SessionViews(database, self.turns.held),
            conversations=Conversations(database),
            tokens=TokenViews(database, prompts),
            rollouts=Rollouts(database),
            previews=Previews(database, release),
            checkpoints=CheckpointViews(database),
        )

    async def explained(self, error: AppError) -> AppError:
        """The error to answer, where another says more. Raises AppError."""
        session_id = error.session_id if isinstance(error, SessionNotFound) else None
        asked = [] if session_id is None else [await ask(session_id) for ask in self.explain]
        return next(filter(None, asked), error)

    def end_waits(self) -> None:
        """The server stops: end open streams and waits at gates, which could keep requests open for long."""
        self.followers.stop()
        self.all_events.stop()
        self.gates.stop()
        self.page.watch.stop()


def _helpers(settings: Settings) -> Helpers | None:
    """Fewer cores gain little: docs/benchmarks.md."""
    if settings.workers <= 2:
        return None
    return Helpers(
        min(settings.workers - 2, MOST_HELPERS),
        deadline_s=settings.worker_deadline_s,
        memory_bytes=settings.worker_memory_bytes,
    )
