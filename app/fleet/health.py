"""Checks the engines' health and weight versions.

Each process checks for itself, every few seconds. What an engine is asked:

    SGLang   /model_info, which is cheap, and /health, which generates a token
    vLLM     /is_paused, /weight_info and once /server_info, which only its dev mode has, and /health, which is cheap

An engine that answers anything is alive. If /health times out, the engine is `busy`, or `paused` if Turnlog's gate is
shut or the engine says so: its cache still holds the sessions' prefixes. A 5xx from /health means that the engine
behind the server is gone or not ready.

Which distribution logprobs are of, vLLM says as `--logprobs-mode` in `/server_info`. SGLang's mode is an environment
variable (`SGLANG_RETURN_ORIGINAL_LOGPROB`) that no route of it tells.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from app.fleet.engines import Engines
from app.fleet.member import ROUTES, Member, weight_version
from app.process import cancelled
from app.upstream.client import EngineClient, EngineReply
from app.upstream.dialects import DialectChoice
from app.upstream.headers import to_control
from app.upstream.http import EngineError, NotSent, TimedOut
from app.upstream.streams import UNREADABLE
from workers.codec import describe
from workers.reply import LogprobsOf

SERVER_INFO = "/server_info?config_format=json"

ASK_S = 60.0
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


log = logging.getLogger("turnlog.engines")

CHECK_INTERVAL_S = 3.0
"""Interval between checks of one engine."""

RECHECK_S = 1.0
"""Interval while an engine's state is in doubt: after a failure, or while it recovers."""

TIMEOUT_S = 2.0
"""Timeout of a check. SGLang's /health takes one second when all is well."""


class _ModelInfo(msgspec.Struct):
    """Part of SGLang's /model_info. The version is a string, but may have been set as a number."""

    model_path: str
    weight_version: str | int | None = None


class _IsPaused(msgspec.Struct):
    is_paused: bool


Outcome = EngineReply | EngineError
Decoded = TypeVar("Decoded", _ModelInfo, _IsPaused, _ServerInfo)


class HealthWatch:
    """One task that starts each engine's checks when due. `is_paused` tells whether an engine of a run, or (None) of
    several, is told to pause."""

    def __init__(
        self,
        engines: Engines,
        client: EngineClient,
        *,
        dialect: DialectChoice,
        api_key: str | None,
        is_paused: Callable[[str | None], bool],
    ) -> None:
        self._engines = engines
        self._client = client
        self._dialect: Literal["sglang", "vllm"] | None = None if dialect == "auto" else dialect
        self._headers = to_control(api_key)
        self._is_paused = is_paused
        self._due: dict[str, float] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-health")

    async def stop(self) -> None:
        await cancelled(self._watching, *self._checking.values(), *self._asking)

    async def any_alive(self) -> bool:
        """Is any engine alive? Engines of unknown state are checked first."""
        unknown = [url for url, member in self._engines.members.items() if member.health == "unknown"]
        await asyncio.gather(*(asyncio.shield(self.check(url)) for url in unknown))
        return any(member.health not in ("unknown", "dead") for member in self._engines.members.values())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            self._engines.changed.clear()
            members = self._engines.members
            self._due = {url: due for url, due in self._due.items() if url in members}
            new = [url for url in members if url not in self._due]
            for index, url in enumerate(new):  # spread evenly over an interval
                self._due[url] = now + CHECK_INTERVAL_S * index / len(new)
            for url, member in members.items():
                if member.needs_check:  # it failed a turn
                    member.needs_check = False
                    self._due[url] = 0.0
            for url, due in self._due.items():
                if due <= now:
                    self.check(url)
            waits = [due - now for url, due in self._due.items() if url not in self._checking]
            try:
                async with asyncio.timeout(min(waits, default=CHECK_INTERVAL_S)):
                    await self._engines.changed.wait()
            except TimeoutError:
                continue

    def check(self, url: str) -> asyncio.Task[None]:
        """The check of this engine that is running, or a new one."""
        checking = self._checking.get(url)
        if checking is None:
            checking = self._checking[url] = asyncio.create_task(self._run_check(url), name="turnlog-health-check")
            checking.add_done_callback(lambda _: self._check_ended(url))
        return checking

    def _check_ended(self, url: str) -> None:
        self._checking.pop(url, None)
        self._engines.changed.set()

    async def _run_check(self, url: str) -> None:
        member = self._engines.members.get(url)
        if member is None:
            return
        self._due[url] = asyncio.get_running_loop().time() + CHECK_INTERVAL_S
        known, dialect = member.weight_version, member.dialect or self._dialect
        is_gate_shut = self._is_paused(member.run)
        info_reply, health = await asyncio.gather(
            self._ask(url + ("/is_paused" if dialect == "vllm" else "/model_info")),
            # A paused SGLang cannot generate a token, and /health would only time out.
            asyncio.sleep(0) if is_gate_shut and dialect != "vllm" else self._ask(url + "/health"),
        )
        if dialect is None and isinstance(info_reply, EngineReply) and info_reply.status == 404:
            info_reply = await self._ask(url + "/is_paused")
        if _read(info_reply, _IsPaused) is not None:
            version = await weight_version(self._client, url, self._headers, ROUTES["vllm"])
            self._engines.seen(url, version, known, "vllm")
        self._update(member, info_reply, health, is_gate_shut or self._is_paused(member.run), known)
        if member.dialect == "vllm" and not member.logprobs_asked:
            member.logprobs_asked = True
            asking = asyncio.create_task(self._ask_mode(member), name="turnlog-logprobs-mode")
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        if url in self._due and (member.failures or member.health == "dead"):
            self._due[url] = min(self._due[url], asyncio.get_running_loop().time() + RECHECK_S)

    def _update(
        self, member: Member, info_reply: Outcome, health: Outcome | None, is_gate_shut: bool, known: str | None
    ) -> None:
        if isinstance(info_reply, NotSent) and isinstance(health, NotSent | None):
            member.is_refusing = True
            member.failed(f"cannot connect ({info_reply})", time.time())
            return
        if not isinstance(info_reply, EngineReply) and not isinstance(health, EngineReply):
            if is_gate_shut and member.health != "dead":
                member.succeeded("paused", time.time())
            else:
                member.failed(f"no answer ({type(info_reply).__name__})", time.time())
            return
        info, paused = _read(info_reply, _ModelInfo), _read(info_reply, _IsPaused)
        if info is not None:
            version = None if info.weight_version is None else str(info.weight_version)
            self._engines.seen(member.url, version, known, "sglang")
        if is_gate_shut or (paused is not None and paused.is_paused):
            member.succeeded("paused", time.time())
        elif not isinstance(health, EngineReply):
            member.succeeded("busy", time.time())
        elif health.status >= 500:
            member.failed(f"/health answers {health.status}", time.time())
        else:
            member.succeeded("healthy", time.time())

    async def _ask_mode(self, member: Member) -> None:
        """Which distribution the engine's logprobs are of. It is asked once, in the background, and again after it was
        restarted or did not answer."""
        generation = member.generation
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self._client.get(member.url + SERVER_INFO, self._headers)
        except (EngineError, TimeoutError) as error:
            log.info("%s did not report its logprobs mode: %s", member.url, error)
            member.logprobs_asked = False
            return
        if member.generation == generation:
            info = _read(reply, _ServerInfo)  # None if it does not say; it may be in a mode that is not known here
            member.logprobs_of = None if info is None else MODES.get(info.vllm_config.model_config.logprobs_mode or "")
            if member.logprobs_of == "logits":
                log.warning(
                    "%s returns logits instead of logprobs (--logprobs-mode): its rows are marked so", member.url
                )

    async def _ask(self, url: str) -> Outcome:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._client.get(url, self._headers)
        except EngineError as error:
            return error
        except TimeoutError:
            return TimedOut(f"no answer in {TIMEOUT_S:g} s")


def _read(reply: Outcome, kind: type[Decoded]) -> Decoded | None:
    """The decoded answer; None for an answer of another kind."""
    if not isinstance(reply, EngineReply) or reply.status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body.joined(), type=kind)
    except UNREADABLE:
        return None
