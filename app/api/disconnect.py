"""What a request does about a client that goes away before it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from app.errors import ClientGone
from app.tasks import cancelled

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return once the client has disconnected. The rest of its body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled if the client disconnects first; then ClientGone is raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client went away before it was answered")
        return working.result()
    finally:
        await cancelled(working, watching)
