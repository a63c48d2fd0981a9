"""uvicorn's server, as the keeper's processes run it: it reports that it serves, and hands connections over."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from app.api.connection import BoundedProtocol
from turnlog.keeper.handover import Handover, HandoverProtocol
from turnlog.keeper.options import ServeOptions

log = logging.getLogger("turnlog.keeper")


class KeptServer(uvicorn.Server):
    """The server in `place` of its keeper's servers. `serving` is called once it accepts connections."""

    def __init__(self, config: uvicorn.Config, options: ServeOptions, place: int, serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._serving = serving
        self._adopting: set[asyncio.Task[None]] = set()
        self._handover: Handover | None = None
        self._options = options
        self._place = place

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._options.handover:
            self._start_handover()
        self._log_started_message(sockets or [])
        self._serving()

    def _start_handover(self) -> None:
        """The application has chosen the protocol class by now; uvicorn reads it for each new connection."""
        handover = Handover(self._options.handover, self._place, self._options.servers, self._adopt)
        try:
            handover.start()
        except OSError as error:
            log.warning("no connections are handed between the servers: %s", error)
            return
        bounded = self.config.http_protocol_class
        assert isinstance(bounded, type)
        assert issubclass(bounded, BoundedProtocol)
        self.config.http_protocol_class = type(
            "TurnlogProtocol", (HandoverProtocol,), {"limit": bounded.limit, "handover": handover}
        )
        self._handover = handover

    def _adopt(self, connection: socket.socket, first: bytes) -> None:
        task = asyncio.create_task(self._serve_adopted(connection, first))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _serve_adopted(self, connection: socket.socket, first: bytes) -> None:
        def protocol() -> HandoverProtocol:
            chosen = self.config.http_protocol_class
            assert isinstance(chosen, type)
            assert issubclass(chosen, HandoverProtocol)
            made = chosen(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            made.first = first
            return made

        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client has gone
            connection.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handover is not None:
            self._handover.close()
            if self._adopting:
                await asyncio.wait(self._adopting)
        await super().shutdown(sockets)
