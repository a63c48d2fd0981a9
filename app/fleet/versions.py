"""Which weight version a generation is sampled under, as known when it is sent.

A reply that names its versions is believed. vLLM's chat and SGLang's stream name none, so the engine is asked: by each
health check, and by the first such turn after a gate has opened, since trainers change weights behind a shut gate. An
engine that cannot say has the version that the trainer named when it resumed the fleet.

`GET /weight_info` is a route of vLLM's development mode, `GET /model_info` is SGLang's. A trainer sets the version with
`POST /update_weight_version`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from app.fleet.member import Member
from app.fleet.state import FleetState
from app.upstream.client import EngineClient
from app.upstream.headers import Headers, to_control
from app.upstream.http import EngineError
from app.upstream.streams import UNREADABLE
from workers.parse_parts import MAX_VERSION

UNSET = "default"
"""What both engines report until somebody sets a version."""

TIMEOUT_S = 2.0
"""A turn may wait for the answer, which is read from memory."""


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


ROUTES: Mapping[str, str] = {"vllm": "/weight_info", "sglang": "/model_info"}
"""By dialect, what tells an engine's version."""


async def weight_version(client: EngineClient, base_url: str, headers: Headers, route: str) -> str | None:
    """The version; None if the engine has no such route, does not answer, or has one that is too long for a reply."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reply = await client.get(base_url + route, headers)
        if reply.status != 200:
            return None
        version = msgspec.json.decode(reply.body.joined(), type=_WeightInfo).weight_version
    except (EngineError, TimeoutError, *UNREADABLE):
        return None
    return None if version is None or len(str(version)) > MAX_VERSION else str(version)


Seen = Callable[[str, str | None, str | None], None]
"""Takes an engine's base URL, its weight version, and the one known when it was asked."""


class WeightVersions:
    """Asks each engine once for all turns that wait."""

    def __init__(self, fleet: FleetState, client: EngineClient, api_key: str | None) -> None:
        self._fleet = fleet
        self._client = client
        self._headers = to_control(api_key)
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def at_dispatch(self, member: Member, seen: Seen, route: str | None) -> str | None:
        """The version of what is sent to this engine now; None if nobody can say.

        `seen` records what the engine answers at `route`; without a route it is not asked.
        """
        while route is not None and member.version_asked != self._fleet.fleet.gate.closings:
            asking = self._asking.get(member.url)
            if asking is None:
                asking = self._asking[member.url] = asyncio.create_task(
                    self._ask(member, seen, route), name="turnlog-version"
                )
                asking.add_done_callback(lambda _: self._asking.pop(member.url, None))
            # Other turns wait for it too: it goes on if this one is cancelled.
            await asyncio.shield(asking)
            if self._fleet.fleet.gate.is_shut:
                break
        stated, reported = self._fleet.fleet.gate.version, member.weight_version
        return stated if stated is not None and reported in (None, UNSET) else reported

    async def _ask(self, member: Member, seen: Seen, route: str) -> None:
        gate, known = self._fleet.fleet.gate, member.weight_version
        version = await weight_version(self._client, member.url, self._headers, route)
        if version is None:
            member.forget_version()
        else:
            seen(member.url, version, known)
        now = self._fleet.fleet.gate
        # Was it open all the time between? Behind a shut one, weights may have changed after the answer.
        if not gate.is_shut and not now.is_shut and gate.closings == now.closings:
            member.version_asked = gate.closings
