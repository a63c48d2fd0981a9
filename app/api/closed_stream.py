"""A streamed reply that closes what it reads from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ClosedStream(StreamingResponse):
    """Closes its pieces when the response ends, also after a disconnect: they may hold files or reads."""

    def __init__(
        self, pieces: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)
