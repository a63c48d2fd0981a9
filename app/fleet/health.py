"""Looking after the engines: which of them live, and which weights they have.

Each process looks for itself, every few seconds, beside its turns. What an engine is asked:

    SGLang   /model_info, which is cheap, and /health, which generates a token
    vLLM     /is_paused, which only its dev mode has, and /health, which is cheap

An engine that answers anything lives. One that does not answer /health in time is busy, or is paused where Turnlog's
gate is shut or it says so: it has sessions' prefixes in its cache and will go on. An error as an answer to /health says
that the engine behind the server is gone, or not there yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from app.fleet.engines import Engines
from app.fleet.member import Member
from app.tasks import cancelled
from app.upstream.client import EngineClient, EngineError, EngineReply, NotSent, TimedOut
from app.upstream.dialects import DialectChoice
from app.upstream.headers import to_control

log = logging.getLogger("turnlog.engines")

EVERY_S = 3.0
"""Between looks at one engine."""

AGAIN_S = 1.0
"""Between looks at one whose state is in doubt: it has failed, or is coming back."""

TIMEOUT_S = 2.0
"""For a look. SGLang's /health answers after a second where all is well."""


class _ModelInfo(msgspec.Struct):
    """Of SGLang's /model_info. Its version is a string, but whoever sets it may have sent a number."""

    model_path: str
    weight_version: str | int | None = None


class _IsPaused(msgspec.Struct):
    is_paused: bool


Asked = EngineReply | EngineError
Said = TypeVar("Said", _ModelInfo, _IsPaused)


class HealthWatch:
    """One task that starts a look at each engine when it is due. `is_paused` is the fleet's gate."""

    def __init__(
        self,
        engines: Engines,
        client: EngineClient,
        *,
        dialect: DialectChoice,
        api_key: str | None,
        is_paused: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._client = client
        self._dialect: Literal["sglang", "vllm"] | None = None if dialect == "auto" else dialect
        self._headers = to_control(api_key)
        self._is_paused = is_paused
        self._due: dict[str, float] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-health")

    async def stop(self) -> None:
        await cancelled(self._watching, *self._looking.values())

    async def any_lives(self) -> bool:
        """Does one of the engines live? Those of which nothing is known yet are asked."""
        unknown = [url for url, member in self._engines.members.items() if member.health == "unknown"]
        await asyncio.gather(*(asyncio.shield(self.look_at(url)) for url in unknown))
        return any(member.health not in ("unknown", "dead") for member in self._engines.members.values())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            self._engines.changed.clear()
            self._spread(now)
            self._hasten()
            for url, due in self._due.items():
                if due <= now:
                    self.look_at(url)
            waits = [due - now for url, due in self._due.items() if url not in self._looking]
            try:
                async with asyncio.timeout(min(waits, default=EVERY_S)):
                    await self._engines.changed.wait()
            except TimeoutError:
                continue

    def _spread(self, now: float) -> None:
        """Engines that are new are looked at one after the other, evenly over a period, and so from then on."""
        members = self._engines.members
        self._due = {url: due for url, due in self._due.items() if url in members}
        new = [url for url in members if url not in self._due]
        for place, url in enumerate(new):
            self._due[url] = now + EVERY_S * place / len(new)

    def _hasten(self) -> None:
        """Engines that turns have met in trouble are due at once."""
        for url, member in self._engines.members.items():
            if member.needs_check:
                member.needs_check = False
                self._due[url] = 0.0

    def look_at(self, url: str) -> asyncio.Task[None]:
        """A look at this engine: the one that is under way, or a new one."""
        looking = self._looking.get(url)
        if looking is None:
            looking = self._looking[url] = asyncio.create_task(self._look(url), name="turnlog-health-look")
            looking.add_done_callback(lambda _: self._looked(url))
        return looking

    def _looked(self, url: str) -> None:
        self._looking.pop(url, None)
        self._engines.changed.set()

    async def _look(self, url: str) -> None:
        member = self._engines.members.get(url)
        if member is None:
            return
        self._due[url] = asyncio.get_running_loop().time() + EVERY_S
        known, dialect = member.weight_version, member.dialect or self._dialect
        is_gated = self._is_paused()
        cheap, health = await asyncio.gather(
            self._ask(url + ("/is_paused" if dialect == "vllm" else "/model_info")),
            # A paused engine cannot generate a token, and would keep the request for as long as it is asked.
            _nothing() if is_gated and dialect != "vllm" else self._ask(url + "/health"),
        )
        if dialect is None and isinstance(cheap, EngineReply) and cheap.status == 404:
            cheap = await self._ask(url + "/is_paused")
        self._judge(member, cheap, health, is_gated or self._is_paused(), known)
        if url in self._due and (member.failures or member.health == "dead"):
            self._due[url] = min(self._due[url], asyncio.get_running_loop().time() + AGAIN_S)

    def _judge(self, member: Member, cheap: Asked, health: Asked | None, is_gated: bool, known: str | None) -> None:
        if isinstance(cheap, NotSent) and isinstance(health, NotSent | None):
            member.is_refusing = True
            member.failed(f"it cannot be connected to ({cheap})", time.time())
            return
        if not isinstance(cheap, EngineReply) and not isinstance(health, EngineReply):
            if is_gated and member.health != "dead":
                member.lives("paused", time.time())
            else:
                member.failed(f"it answers nothing ({type(cheap).__name__})", time.time())
            return
        info, paused = _read(cheap, _ModelInfo), _read(cheap, _IsPaused)
        if info is not None or paused is not None:
            version = None if info is None or info.weight_version is None else str(info.weight_version)
            self._engines.seen(member.url, version, known, "sglang" if paused is None else "vllm")
        if is_gated or (paused is not None and paused.is_paused):
            member.lives("paused", time.time())
        elif not isinstance(health, EngineReply):
            member.lives("busy", time.time())
        elif health.status >= 500:
            member.failed(f"/health answers {health.status}", time.time())
        else:
            member.lives("healthy", time.time())

    async def _ask(self, url: str) -> Asked:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._client.get(url, self._headers)
        except EngineError as error:
            return error
        except TimeoutError:
            return TimedOut(f"no answer in {TIMEOUT_S:g} s")


async def _nothing() -> None:
    """In place of a question that is not asked."""


def _read(reply: Asked, kind: type[Said]) -> Said | None:
    """What an engine says; None for an answer of another kind."""
    if not isinstance(reply, EngineReply) or reply.status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body.joined(), type=kind)
    except msgspec.DecodeError:
        return None
