"""The weight version that a vLLM engine reports of itself: no reply of its chat names one.

`GET /weight_info` is a route of its development mode. A trainer sets the version with `POST /update_weight_version`.
"""

from __future__ import annotations

import asyncio

import msgspec

from app.upstream.client import EngineClient, EngineError
from app.upstream.headers import Headers
from workers.parse_parts import MAX_VERSION

UNSET = "default"
"""What both engines report until somebody sets a version."""

TIMEOUT_S = 2.0
"""A turn may wait for the answer, which is read from memory."""


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


async def weight_version(client: EngineClient, base_url: str, headers: Headers) -> str | None:
    """The version; None if the engine has no such route, does not answer, or has one that is too long for a reply."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reply = await client.get(base_url + "/weight_info", headers)
        if reply.status != 200:
            return None
        version = msgspec.json.decode(reply.body.joined(), type=_WeightInfo).weight_version
    except (EngineError, TimeoutError, msgspec.DecodeError):
        return None
    return None if version is None or len(str(version)) > MAX_VERSION else str(version)
