"""The application, for `uvicorn app.main:app`: its routes, and the services that live from its start to its stop."""

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from app import logs
from app.api import (
    counting,
    events,
    exports,
    images,
    messages,
    models,
    names,
    responses,
    service,
    session_lists,
    sessions,
    signin,
    trees,
)
from app.api import engines as engine_routes
from app.api import metrics as metrics_route
from app.api.connection import bound_connections
from app.api.connection_limit import ConnectionLimit
from app.api.direct import by_head, serve_direct
from app.api.error_handlers import handle_faults
from app.api.head import Guard, Head, request_ids, with_single_slashes
from app.api.names import to_newest
from app.api.ng_rollout import PREFIX, without_prefix
from app.api.replies import error_parts
from app.api.tokens import Tokens
from app.api.turns import TurnRequest, send_reply
from app.errors import StartupError
from app.features import (
    annotations,
    archive,
    budgets,
    checkpoints,
    forks,
    gates,
    groups,
    live,
    objects,
    otel,
    page,
    resume,
    rllm,
    search,
    session_control,
    text,
    webhooks,
)
from app.logs import CURRENT
from app.process import on_stop_signal
from app.protocols.registry import ROUTES, protocol_at
from app.services import Services, running
from app.settings import Settings, load_settings

log = logging.getLogger("turnlog")

FEATURES = (
    gates,
    annotations,
    archive,
    budgets,
    checkpoints,
    forks,
    groups,
    live,
    objects,
    otel,
    page,
    resume,
    rllm,
    search,
    session_control,
    text,
    webhooks,
)
"""What the service is made of beside the kernel; `TURNLOG_FEATURES` names those that are on. Gates come
first: checkpoints and resume use them."""

SWITCH_S = 0.0005
"""Switch interval of threads: how long the event loop waits for the interpreter while another thread computes. It is a
tenth of Python's default, because the loop waits at each of its steps while a thread reads a large request."""


_DIRECT_ROUTES = (*sessions.DIRECT_ROUTES, *names.DIRECT_ROUTES, *service.DIRECT_ROUTES)
_DIRECT = by_head(_DIRECT_ROUTES)


class Turnlog(FastAPI):
    """FastAPI with a direct path for turns. A failed start-up gives one line instead of a traceback.

    The routes that generate bypass FastAPI's middleware and routing, which cost a tenth of a turn.
    """

    def __init__(self, settings: Settings, release: str) -> None:
        super().__init__(title="Turnlog", version=release, docs_url=None, redoc_url=None, openapi_url=None)
        self._settings = settings
        self._ids = request_ids()
        self._tokens = Tokens(settings.admin_token, settings.session_secret)
        self._connection_limit = ConnectionLimit(time.monotonic)
        self._guard = Guard(self._tokens, settings.trusted_networks)
        self._services: Services
        self.state.direct_routes = _DIRECT_ROUTES
        self.doors: list[Callable[[Scope], Scope]] = []  # features' own: paths that lead elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        if "//" in scope["path"]:
            scope = with_single_slashes(scope)
        if PREFIX in scope["path"]:
            scope = without_prefix(scope)
        for door in self.doors:
            scope = door(scope)
        head = Head(scope, self._ids)
        # The log looks here when it writes a line, also in the tasks that the request starts.
        CURRENT.set(head)
        try:
            refusal = self._guard.refusal(head)
            protocol = ROUTES.get(head.route)
            takes_turn = protocol is not None and head.method in protocol.methods
            if refusal is None and head.path_session is not None and not takes_turn:
                refusal = await to_newest(self._services, head)
            if refusal is not None:
                self._services.metrics.request_failed(refusal.code)
                parts = error_parts(refusal, protocol_at(head.path), head.request_id)
                await send_reply(head.hardening(send), *parts)
            elif protocol is not None and takes_turn:
                await TurnRequest(self._services, protocol, head, receive, send).run()
            elif endpoint := _DIRECT.get((head.method, head.path_session is not None, head.route)):
                await serve_direct(self._services, endpoint, head, receive, send)
            else:
                head.scope["app"] = self
                await self._routed(head.scope, receive, head.hardening(send))
        finally:
            head.has_ended = True

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette raises an unexpected exception again after its 500 was sent, and uvicorn would then close a
        connection on which the client may have sent its next request."""
        is_whole = False

        async def sending(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await super().__call__(scope, receive, sending)
        except Exception:
            if not is_whole:
                raise
            log.exception("an unexpected fault in %s %s", scope["method"], scope["path"])

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._connection_limit.open()
            bound_connections(receive, self._connection_limit, self._settings.max_request_bytes)
            await self._live(receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the ASGI lifespan from start-up to shutdown."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                limit, features = self._connection_limit, chosen(self._settings)
                started = running(self._settings, self.version, self._tokens, limit, features)
                self._services = self.state.services = await stack.enter_async_context(started)
                for feature in FEATURES:
                    if feature not in features.values() and hasattr(feature, "absent"):
                        await feature.absent(self.state.services)
                await stack.enter_async_context(metrics_route.published(self.state.services))
            except StartupError as error:
                await send({"type": "lifespan.startup.failed", "message": error.under("turnlog")})
                return
            except Exception:
                log.exception("an unexpected fault at start-up")
                await send({"type": "lifespan.startup.failed", "message": "turnlog: start-up failed"})
                return
            on_stop_signal(self.state.services.end_waits)
            _calm_collector()
            sys.setswitchinterval(SWITCH_S)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _calm_collector() -> None:
    """Reduce garbage collection: start-up's objects stay, and turns make few cycles. Full runs only cost latency."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def chosen(settings: Settings) -> dict[str, ModuleType]:
    """The features that are on, by their names, in the order in which they start."""
    named = {feature.__name__.rpartition(".")[2]: feature for feature in FEATURES}
    return {name: feature for name, feature in named.items() if name in settings.features}


def create_app(settings: Settings) -> Turnlog:
    """The application. Its services live from the start to the end of the ASGI lifespan."""
    app = Turnlog(settings, _release())
    own = chosen(settings).values()
    for routes in (
        *(router for feature in own for router in feature.routers()),  # first: `turns/{n}/{kind}` fits some of theirs
        session_lists.router,
        sessions.router,
        trees.router,
        messages.router,
        images.router,
        events.router,
        responses.router,
        models.router,
        counting.router,
        service.router,
        exports.router,
        metrics_route.router,
        engine_routes.router,
        signin.router,
    ):
        app.include_router(routes)
    handle_faults(app)
    app.doors += [feature.door(app) for feature in own if hasattr(feature, "door")]
    return app


def _release() -> str:
    try:
        return version("turnlog")
    except PackageNotFoundError:
        return "0+unknown"


def _from_environment() -> Turnlog:
    logs.configure("auto", "info")  # for errors in the settings
    try:
        settings = load_settings()
        logs.configure(settings.log_format, settings.log_level)
        return create_app(settings)
    except StartupError as error:
        sys.exit(error.under("turnlog"))


app = _from_environment()
