"""Which engine serves a session, and what its failures mean to a client."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from app.domain.events import Protocol
from app.domain.fleet import EngineListed
from app.errors import NoUpstream, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable
from app.upstream.client import EngineClient, EngineError, EngineReply, Grow, Lost, NotSent, TimedOut, TooLarge
from app.upstream.headers import Headers

log = logging.getLogger("turnlog.engines")

PATHS: Mapping[Protocol, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""The routes that generate."""

MODELS = "/v1/models"
PROBE_TIMEOUT_S = 2.0


class Answer(msgspec.Struct, frozen=True):
    """An engine's answer; `dispatched` is the weight version that it was known to have when it was asked."""

    engine: str
    reply: EngineReply
    dispatched: str | None = None


class Member(msgspec.Struct):
    """An engine as this process sees it. `in_flight` counts this process's generations there."""

    url: str
    is_draining: bool = False
    in_flight: int = 0
    weight_version: str | None = None


class Engines:
    """The engines there are, and which of them a turn should try.

    `placement`: a session without an engine gets the one with the least to do here (`least_loaded`), or one by its own
    name alone (`hash`); equally loaded ones are in the latter order as well.
    """

    def __init__(self, client: EngineClient, placement: Literal["least_loaded", "hash"] = "least_loaded") -> None:
        self.members: dict[str, Member] = {}
        self._client = client
        self._placement = placement

    def serve(self, listed: Iterable[EngineListed]) -> None:
        """These are the engines from now on; what is known of those that stay is kept."""
        before = self.members
        self.members = {one.url: before.get(one.url) or Member(one.url) for one in listed}
        for one in listed:
            self.members[one.url].is_draining = one.state == "draining"

    def require_some(self) -> None:
        """Raises NoUpstream."""
        if not self.members:
            raise NoUpstream("there is no engine: set TURNLOG_UPSTREAMS, or POST /engines")

    def why_not(self, url: str) -> Literal["listed", "draining", "dead"] | None:
        """Why no turn should go to this engine; None where one may."""
        member = self.members.get(url)
        if member is None:
            return "listed"
        return "draining" if member.is_draining else None

    def order(self, session_id: str, near: str | None = None) -> list[str]:
        """The engines in the order in which a turn tries them; `near` first, where it can take turns.

        Those that should get none come last: they are better than no answer. Raises NoUpstream.
        """
        self.require_some()
        if near is not None and self.why_not(near) is None:
            if len(self.members) == 1:
                return [near]
            return [near, *(url for url in self._ranked(session_id) if url != near)]
        return self._ranked(session_id)

    def _ranked(self, session_id: str) -> list[str]:
        """By fitness, then load, then rendezvous hashing, by which all processes agree."""
        if len(self.members) == 1:
            return list(self.members)
        by_load = self._placement == "least_loaded"

        def rank(member: Member) -> tuple[bool, int, bytes]:
            name = hashlib.sha256(f"{member.url} {session_id}".encode()).digest()
            return self.why_not(member.url) is not None, member.in_flight if by_load else 0, name

        return [member.url for member in sorted(self.members.values(), key=rank)]

    async def generate(
        self, order: Sequence[str], protocol: Protocol, body: bytes, headers: Headers, grow: Grow
    ) -> Answer:
        """The first engine of these that can be connected to, and its answer, whatever its status.

        `grow` makes room for its bytes. Raises as `_first_reached`, and UpstreamInvalid for a compressed reply or a
        redirect.
        """
        answer = await self._first_reached(
            order, lambda url: self._client.post(url + PATHS[protocol], body, headers, grow)
        )
        _require_plain(answer.engine, answer.reply)
        return answer

    async def models(self, session_id: str, headers: Headers) -> EngineReply:
        """GET /v1/models. Raises as `generate`."""
        answer = await self._first_reached(self.order(session_id), lambda url: self._client.get(url + MODELS, headers))
        _require_plain(answer.engine, answer.reply)
        return answer.reply

    async def _first_reached(self, order: Sequence[str], ask: Callable[[str], Awaitable[EngineReply]]) -> Answer:
        """Raises UpstreamUnreachable, UpstreamTimeout, UpstreamInvalid (too large)."""
        for base_url in order:
            member = self.members.get(base_url) or Member(base_url)
            dispatched = member.weight_version
            member.in_flight += 1
            try:
                return Answer(base_url, await ask(base_url), dispatched)
            except NotSent:
                continue
            except Lost as error:
                raise UpstreamUnreachable(f"{base_url} ended the connection ({error})") from error
            except TimedOut as error:
                raise UpstreamTimeout(f"{base_url} did not answer in time") from error
            except TooLarge as error:
                raise UpstreamInvalid(f"the reply of {base_url} is too large: {error}") from error
            finally:
                member.in_flight -= 1
        raise UpstreamUnreachable(f"none of {len(order)} engines can be connected to")

    async def abort(self, rid: str) -> None:
        """Ask the engines that may have the generation to end it.

        Which one has it is not known while it works; an engine that cannot be told notices the closed connection.
        """
        body = msgspec.json.encode({"rid": rid, "abort_all": False})
        await asyncio.gather(*(self._abort(base_url, body) for base_url in self.members))

    async def _abort(self, base_url: str, body: bytes) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._client.post(base_url + "/abort_request", body, [("content-type", "application/json")])
        except (EngineError, TimeoutError) as error:
            log.info("%s could not be asked to abort a generation: %s", base_url, error)

    async def any_healthy(self) -> bool:
        """Does an engine answer /health at all? A paused one answers badly, but is not gone."""
        results = await asyncio.gather(*(self._answers(url) for url in self.members))
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
