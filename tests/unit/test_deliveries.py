"""What a connection tells of a reply that was sent on it, by how it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.api.connection import BoundedProtocol

Step = Callable[[BoundedProtocol], None]


class Transport:
    """`unsent` are the bytes that the kernel has not taken."""

    def __init__(self, unsent: int) -> None:
        self.unsent = unsent
        self.is_aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        return

    def abort(self) -> None:
        self.is_aborted = True


def goes_on(connection: BoundedProtocol) -> None:
    connection.data_received(b"GET ")


def is_closed(connection: BoundedProtocol) -> None:
    connection.connection_lost(None)


def is_reset(connection: BoundedProtocol) -> None:
    connection.connection_lost(ConnectionResetError())


def is_reset_later(connection: BoundedProtocol) -> None:
    goes_on(connection)
    is_reset(connection)


def is_cut_off(connection: BoundedProtocol) -> None:
    """The client has left the reply unread for too long."""
    stall = connection._stall_timeout
    assert stall is not None
    stall._run()
    assert cast(Any, connection.transport).is_aborted
    connection.connection_lost(None)


def stays(connection: BoundedProtocol) -> None:
    return


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("unsent", "before", "ends", "told"),
    [
        (0, stays, goes_on, [True]),
        (0, stays, is_closed, [True]),
        (0, stays, is_reset, [True, None]),
        (0, stays, is_reset_later, [True]),
        (100, stays, goes_on, [True]),
        (100, stays, is_closed, [True]),
        (100, stays, is_reset, [True, None]),
        (1 << 20, stays, goes_on, [True]),
        (1 << 20, stays, is_reset, [False]),
        (1 << 20, stays, is_cut_off, [True, None]),
        (0, is_closed, stays, [False]),
        (0, is_reset, stays, [False]),
    ],
)
async def test_a_delivery_is_told(unsent: int, before: Step, ends: Step, told: list[bool | None]) -> None:
    """None: it cannot be told whether the reply was read."""
    heard: list[bool | None] = []
    config = uvicorn.Config(cast(Any, None), interface="asgi3")
    config.loaded, config.loaded_app, config.ws_protocol_class = True, cast(Any, None), None
    connection = BoundedProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    connection.connection_made(cast(Any, Transport(unsent)))
    if unsent > 1 << 16:
        connection.pause_writing()
    before(connection)
    connection.when_handed_over(lambda *, delivered: heard.append(delivered))
    ends(connection)
    connection._cancel_timeout()
    connection._cancel_stall_timeout()
    assert heard == told
