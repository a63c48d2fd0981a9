"""The application, for `uvicorn app.main:app`: its routes, and the services that live from its start to its stop."""

# ruff: noqa: E402

import gc

gc.disable()  # to the end of this file: imports leave hardly any garbage, but much to look through

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from functools import cached_property

import msgspec
from starlette.types import Receive, Scope, Send

from app import logs
from app.api import creation, exports, models, responses, service, sessions, turns
from app.api import engines as engine_routes
from app.api import metrics as metrics_route
from app.api.connection import bound_connections
from app.api.head import Guard, Head, request_ids, with_single_slashes
from app.api.header_sessions import ROLLOUTS, without_prefix
from app.api.of_run import admit
from app.api.openapi import document
from app.api.replies import answer, send_error
from app.api.routes import Table
from app.api.turns import TurnRequest
from app.composition import FEATURES, chosen, store_points
from app.errors import StartupError
from app.extras import release
from app.logs import CURRENT
from app.process import ConnectionLimit, on_stop_signal
from app.services import Services, running
from app.settings import Settings, load_settings
from app.tokens import Tokens

log = logging.getLogger("turnlog")

KERNEL = (
    creation.route,
    sessions.route,
    models.route,
    responses.route,
    exports.route,
    exports.event_route,
    engine_routes.route,
    metrics_route.route,
    service.route,
    service.page_route,
)
"""Routes beside those of turns. Features' come first: `turns/{n}/{kind}` fits some of theirs."""

SWITCH_S = 0.0005
"""Switch interval of threads: how long the event loop waits for the interpreter while another thread computes. It is a
tenth of Python's default, because the loop waits at each of its steps while a thread reads a large request."""


class Turnlog:
    """The ASGI application. A failed start-up gives one line instead of a traceback."""

    def __init__(self, settings: Settings, release: str) -> None:
        own = chosen(settings).values()
        self.table = Table(
            [
                *(route for feature in own if hasattr(feature, "entries") for route in feature.entries()),
                *turns.entries(),
                *(route for routes in KERNEL for route in routes.entries),
            ]
        )
        self.release = release
        self.services: Services
        self.settings = settings
        self._ids = request_ids()
        self._tokens = Tokens(settings.admin_token, settings.session_secret)
        self._connection_limit = ConnectionLimit(time.monotonic)
        self._guard = Guard(self._tokens, settings.trusted_networks)
        # Features' own: paths that lead elsewhere.
        self._doors: list[Callable[[Scope], Scope]] = [
            feature.door(self.table) for feature in own if hasattr(feature, "door")
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        if "//" in scope["path"]:
            scope = with_single_slashes(scope)
        if ROLLOUTS in scope["path"]:
            scope = without_prefix(scope)
        for door in self._doors:
            scope = door(scope)
        head = Head(scope, self._ids)
        # The log looks here when it writes a line, also in the tasks that the request starts.
        CURRENT.set(head)
        try:
            # Turns' routes and most others are here; `find` has the rest, and the errors.
            plain = self.table.plain.get((head.method, head.path_session is not None, head.route))
            route = plain or self.table.find(head)
            refusal = self._guard.refusal(head, route.who)
            if refusal is None and head.run_token is not None:
                refusal = await admit(self.services, head, head.run_token, route)
            if refusal is not None:
                await send_error(self.services, head, refusal, send)
            elif route.protocol is not None:
                await TurnRequest(self.services, route.protocol, head, receive, send).run()
            else:
                head.scope["app"] = self
                await answer(self.services, route, head, receive, send)
        finally:
            head.has_ended = True

    @cached_property
    def document(self) -> bytes:
        """The OpenAPI document. It is made at the first request for it, which takes a second."""
        return msgspec.json.encode(document(self.table, self.release))

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._connection_limit.open()
            bound_connections(receive, self._connection_limit, self.settings.max_request_bytes)
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the ASGI lifespan from start-up to shutdown."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                limit, features = self._connection_limit, chosen(self.settings)
                started = running(self.settings, self.release, self._tokens, limit, features, store_points())
                self.services = await stack.enter_async_context(started)
                for feature in FEATURES:
                    if feature not in features.values() and hasattr(feature, "absent"):
                        await feature.absent(self.services)
                await stack.enter_async_context(metrics_route.published(self.services))
            except StartupError as error:
                await send({"type": "lifespan.startup.failed", "message": error.under("turnlog")})
                return
            except Exception:
                log.exception("unexpected error at start-up")
                await send({"type": "lifespan.startup.failed", "message": "turnlog: start-up failed"})
                return
            on_stop_signal(self.services.end_waits)
            _calm_collector()
            sys.setswitchinterval(SWITCH_S)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _calm_collector() -> None:
    """Reduce garbage collection: start-up's objects stay, and turns make few cycles. Full runs only cost latency."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def create_app(settings: Settings) -> Turnlog:
    return Turnlog(settings, release())


def _from_environment() -> Turnlog:
    logs.configure("auto", "info")  # for errors in the settings
    try:
        settings = load_settings()
        logs.configure(settings.log_format, settings.log_level)
        return create_app(settings)
    except StartupError as error:
        sys.exit(error.under("turnlog"))


app = _from_environment()
gc.freeze()
gc.enable()
