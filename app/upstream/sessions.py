"""Sessions held by an engine: SGLang's `/open_session` and `/close_session`.

No request uses `session_params`: such a session appends each request, so that the whole history would be doubled.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from app.errors import SessionOpenFailed
from app.upstream.client import EngineClient, EngineReply
from app.upstream.headers import to_control
from app.upstream.http import EngineError, NotSent

log = logging.getLogger("turnlog.engine_sessions")

CAPACITY = 1 << 20
"""The session's capacity in characters; SGLang requires a number without an upper limit."""

GRACE_S = 30.0
"""An engine's own timeout of a session is longer than Turnlog's by this: Dynamo's contract."""

OPEN_S, CLOSE_S = 15.0, 10.0
"""Timeouts for opening a session, for which a turn waits, and for closing one, for which none does."""


class OpenUnknown(SessionOpenFailed):
    """The engine did not say whether it has opened the session."""


class EngineSessions:
    """Opens and closes engines' sessions."""

    def __init__(self, client: EngineClient, api_key: str | None) -> None:
        self._client = client
        self._headers = to_control(api_key)

    async def open(self, base_url: str, control_id: str, timeout_s: float) -> bool:
        """Open a session; False if the engine has no such sessions. Raises NotSent, SessionOpenFailed, OpenUnknown.

        A 400 may mean that a session with this id exists, perhaps left from an earlier time. So it is closed, and
        opening is tried once more.
        """
        status = await self._open(base_url, control_id, timeout_s)
        if status == 400:
            await self.close(base_url, control_id)
            status = await self._open(base_url, control_id, timeout_s)
        if status == 200:
            return True
        if status in (400, 404, 405, 501):
            return False
        raise SessionOpenFailed(f"{base_url} answered {status} when it was asked to open session {control_id}")

    async def _open(self, base_url: str, control_id: str, timeout_s: float) -> int:
        request = {"capacity_of_str_len": CAPACITY, "session_id": control_id, "timeout": timeout_s + GRACE_S}
        try:
            async with asyncio.timeout(OPEN_S):
                return (await self._post(base_url + "/open_session", request)).status
        except NotSent:
            raise
        except (EngineError, TimeoutError) as error:
            raise OpenUnknown(f"{base_url} did not say whether it opened session {control_id}") from error

    async def close(self, base_url: str, control_id: str) -> None:
        """Close a session, with one attempt; otherwise the engine's own timeout ends it."""
        try:
            async with asyncio.timeout(CLOSE_S):
                status = (await self._post(base_url + "/close_session", {"session_id": control_id})).status
        except (EngineError, TimeoutError) as error:
            log.info("%s could not be told to close session %s: %s", base_url, control_id, type(error).__name__)
            return
        if status != 200:
            log.info("%s answered %d when it was told to close session %s", base_url, status, control_id)

    async def _post(self, url: str, request: dict[str, object]) -> EngineReply:
        return await self._client.post(url, msgspec.json.encode(request), self._headers)
