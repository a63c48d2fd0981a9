"""Asks vLLM engines which distribution their logprobs are of.

vLLM says it as `--logprobs-mode` in `/server_info`, which only its dev mode has. SGLang's mode is an environment
variable (`SGLANG_RETURN_ORIGINAL_LOGPROB`) that no route of it tells.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from app.domain.events import LogprobsOf
from app.fleet.member import Member
from app.tasks import cancelled
from app.upstream.client import EngineClient, EngineError, EngineReply
from app.upstream.headers import Headers
from workers.codec import describe

log = logging.getLogger("turnlog.engines")

SERVER_INFO = "/server_info?config_format=json"

TIMEOUT_S = 60.0
"""vLLM's first answer looks through the machine's packages and drivers."""

MODES: Mapping[str, LogprobsOf] = {
    "raw_logprobs": "raw",
    "processed_logprobs": "processed",
    "raw_logits": "logits",
    "processed_logits": "logits",
}


class _ModelConfig(msgspec.Struct, frozen=True):
    logprobs_mode: str | None = None


class _VllmConfig(msgspec.Struct, frozen=True):
    model_config: _ModelConfig


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _VllmConfig


describe(_ServerInfo)


class LogprobsModes:
    """Each engine is asked once, and again after it was restarted or did not answer."""

    def __init__(self, client: EngineClient, headers: Headers) -> None:
        self._client = client
        self._headers = headers
        self._asking: set[asyncio.Task[None]] = set()

    def ask_if_new(self, member: Member) -> None:
        """Ask in the background."""
        if member.dialect != "vllm" or member.logprobs_asked:
            return
        member.logprobs_asked = True
        asking = asyncio.create_task(self._ask(member), name="turnlog-logprobs-mode")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def stop(self) -> None:
        await cancelled(*self._asking)

    async def _ask(self, member: Member) -> None:
        generation = member.generation
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await self._client.get(member.url + SERVER_INFO, self._headers)
        except (EngineError, TimeoutError) as error:
            log.info("%s did not say what its logprobs are of: %s", member.url, error)
            member.logprobs_asked = False
            return
        if member.generation == generation:
            member.logprobs_of = _mode(reply)
            if member.logprobs_of == "logits":
                log.warning("%s returns logits instead of logprobs (--logprobs-mode): its rows say so", member.url)


def _mode(reply: EngineReply) -> LogprobsOf | None:
    """None if it does not say, or in a mode that is not known here."""
    if reply.status != 200:
        return None
    try:
        info = msgspec.json.decode(reply.body.joined(), type=_ServerInfo)
    except msgspec.DecodeError:
        return None
    return MODES.get(info.vllm_config.model_config.logprobs_mode or "")
