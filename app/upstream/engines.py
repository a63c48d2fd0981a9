"""Which engine serves a session, and what its failures mean to a client."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from app.domain.events import Protocol
from app.errors import NoUpstream, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable
from app.upstream.client import EngineClient, EngineError, EngineReply, Grow, Lost, NotSent, TimedOut, TooLarge
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.engines")

PATHS: Mapping[Protocol, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""The routes that generate."""

MODELS = "/v1/models"
PROBE_TIMEOUT_S = 2.0


class Engines:
    """The configured engines. A session keeps its place among them, so that its prefix stays in one cache."""

    def __init__(self, base_urls: Sequence[str], client: EngineClient) -> None:
        self.base_urls = tuple(base_urls)
        self._client = client

    def order(self, session_id: str) -> list[str]:
        """The engines in the order in which this session tries them (rendezvous hashing)."""
        if not self.base_urls:
            raise NoUpstream("no engine is configured: set TURNLOG_UPSTREAMS")
        if len(self.base_urls) == 1:
            return list(self.base_urls)
        return sorted(self.base_urls, key=lambda url: hashlib.sha256(f"{url} {session_id}".encode()).digest())

    async def generate(
        self, session_id: str, protocol: Protocol, body: bytes, headers: Headers, grow: Grow
    ) -> tuple[str, EngineReply]:
        """The engine's base URL and its answer, whatever its status; `grow` makes room for its bytes.

        Raises as `_first_reached`, and UpstreamInvalid for a compressed reply or a redirect.
        """
        base_url, reply = await self._first_reached(
            session_id, lambda url: self._client.post(url + PATHS[protocol], body, headers, grow)
        )
        _require_plain(base_url, reply)
        return base_url, reply

    async def models(self, session_id: str, headers: Headers) -> EngineReply:
        """GET /v1/models. Raises as `generate`."""
        base_url, reply = await self._first_reached(session_id, lambda url: self._client.get(url + MODELS, headers))
        _require_plain(base_url, reply)
        return reply

    async def _first_reached(
        self, session_id: str, ask: Callable[[str], Awaitable[EngineReply]]
    ) -> tuple[str, EngineReply]:
        """The first engine that can be connected to, and its answer.

        Raises NoUpstream, UpstreamUnreachable, UpstreamTimeout, UpstreamInvalid (too large).
        """
        for base_url in self.order(session_id):
            try:
                return base_url, await ask(base_url)
            except NotSent:
                continue
            except Lost as error:
                raise UpstreamUnreachable(f"{base_url} ended the connection ({error})") from error
            except TimedOut as error:
                raise UpstreamTimeout(f"{base_url} did not answer in time") from error
            except TooLarge as error:
                raise UpstreamInvalid(f"the reply of {base_url} is too large: {error}") from error
        raise UpstreamUnreachable(f"none of {len(self.base_urls)} engines can be connected to")

    async def abort(self, session_id: str, rid: str) -> None:
        """Ask the engines that may have the generation to end it.

        Which one has it is not known while it works; an engine that cannot be told notices the closed connection.
        """
        body = msgspec.json.encode({"rid": rid, "abort_all": False})
        await asyncio.gather(*(self._abort(base_url, body) for base_url in self.order(session_id)))

    async def _abort(self, base_url: str, body: bytes) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._client.post(base_url + "/abort_request", body, [("content-type", "application/json")])
        except (EngineError, TimeoutError) as error:
            log.info("%s could not be asked to abort a generation: %s", base_url, error)

    async def any_healthy(self) -> bool:
        """Does an engine answer /health at all? A paused one answers badly, but is not gone."""
        results = await asyncio.gather(*(self._answers(url) for url in self.base_urls))
        return any(results)

    async def _answers(self, base_url: str) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._client.get(base_url + "/health", [])
        except (EngineError, TimeoutError):
            return False
        return True


def _require_plain(base_url: str, reply: EngineReply) -> None:
    if not 200 <= reply.status < 600:
        raise UpstreamInvalid(f"{base_url} answered {reply.status}, which is no status of a reply")
    if 300 <= reply.status < 400:
        raise UpstreamInvalid(f"{base_url} answered with a redirect ({reply.status}), which is not followed")
    if 200 < reply.status < 300:
        raise UpstreamInvalid(f"{base_url} answered {reply.status}, which holds no completion")
    encoding = next((value for name, value in reply.headers if name.lower() == "content-encoding"), "identity")
    if encoding.lower() != "identity":
        raise UpstreamInvalid(f"{base_url} compressed its reply ({encoding}) though asked not to")
