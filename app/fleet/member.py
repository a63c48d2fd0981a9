"""An engine as one process sees it: its load, its health, and its weight version, which it is asked for.

One failure proves nothing, since a busy or paused engine answers slowly. An engine is dead after several failures
in a row, and back after several successful checks.

    any ──── 3 failures in a row ────▶ dead ──── 2 signs of life in a row ────▶ healthy, busy or paused
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from app.domain.events import is_number
from app.domain.request import IdsField
from app.domain.session import RID_CHARACTERS, RID_MARK
from app.fleet.state import FleetState
from app.upstream.body import Body
from app.upstream.client import EngineClient
from app.upstream.generate import ServerInfo
from app.upstream.headers import Headers, to_control
from app.upstream.http import EngineError
from app.upstream.inference import Offer
from app.upstream.streams import UNREADABLE
from workers.reply import MAX_VERSION, LogprobsOf

log = logging.getLogger("turnlog.engines")

_REPLY_ID = re.compile(rb'"id"\s*:\s*"(?:chatcmpl-|cmpl-)?(%b[0-9a-f]{%d})"' % (RID_MARK.encode(), RID_CHARACTERS))
_REPLY_ID_WITHIN = 512
"""An engine begins a reply with its id, which is made of the turn's `rid`; only the first bytes are searched."""

Alive = Literal["healthy", "busy", "paused"]
"""State of a live engine: `busy` answers, but not where it must generate; `paused` was told to wait."""

Health = Literal["unknown", "healthy", "busy", "paused", "dead"]

FAILURES = 3
"""Failures in a row after which an engine is dead."""

SIGNS = 2
"""Signs of life in a row after which a dead engine is back."""

SPACING_S = 0.5
"""Failures closer together count as one: a hundred turns may meet the same restart."""


class _Named(msgspec.Struct):
    """A completion's id, whatever that is."""

    id: Any = None


class Member(msgspec.Struct):
    """`run`: it serves this run alone; None: all that have no engines of their own. `in_flight` counts this process's
    generations there. `since` (seconds since the epoch) is when `health` changed.

    `generation` grows when the engine answers after it had refused connections: it was restarted, so `sessions` (has it
    the session routes?), `dialect`, `logprobs_of` and `token_ids` (the field of a chat that it takes a prompt's ids
    from), `server_info` (of SGLang, if it was asked), `offer` (vLLM's route for a prompt of ids) and `context` (the
    tokens of prompt and output together) are unknown again.

    `echoes_ids`: a reply of it had the id of its request.

    `has_aborted`: it aborted a generation that could not be continued; a warning was logged. `needs_check`: it failed a
    turn and was not checked since.

    `weight_version` is the newest known. While it is lower than one before, `fell_from` holds that one. `version_asked`
    are the closings of its gates (`Fleet.at_engine`) after which the engine was asked for it.

    `logprobs_of` is what it says its logprobs are of; `logprobs_asked`: it was asked.
    """

    url: str
    is_draining: bool = False
    run: str | None = None
    in_flight: int = 0
    health: Health = "unknown"
    since: float | None = None
    last_error: str | None = None
    dialect: Literal["sglang", "vllm"] | None = None
    sessions: bool | None = None
    token_ids: IdsField | Literal["none"] | None = None
    server_info: ServerInfo | None = None
    offer: Offer | Literal["none"] | None = None
    context: int | None = None
    logprobs_of: LogprobsOf | None = None
    logprobs_asked: bool = False
    generation: int = 0
    weight_version: str | None = None
    fell_from: str | None = None
    version_asked: int | None = None
    failures: int = 0
    signs: int = 0
    failed_at: float = 0.0
    is_refusing: bool = False
    needs_check: bool = False
    has_aborted: bool = False
    echoes_ids: bool = False

    def succeeded(self, alive: Alive, now: float) -> None:
        """It gave a sign of life at `now`, in seconds since the epoch."""
        self.answered()
        self.failures = 0
        self.signs += 1
        if self.health != "dead" or self.signs >= SIGNS:
            if self.health == "dead":
                log.warning("engine %s is back", self.url)
            self.last_error = None
            self._become(alive, now)

    def failed(self, error: str, now: float) -> None:
        """It gave no sign of life."""
        self.last_error = error
        self.signs = 0
        if self.failures and 0 <= now - self.failed_at < SPACING_S:
            return
        self.failures += 1
        self.failed_at = now
        if self.failures >= FAILURES and self.health != "dead":
            self._become("dead", now)
            log.warning("engine %s is dead: %s; its sessions move to other engines", self.url, error)

    def refused(self, error: str, now: float) -> None:
        """A connection to it was refused."""
        self.is_refusing = True
        self.failed(f"a connection was refused ({error})", now)

    def answered(self) -> None:
        """It answered a request, with whatever status."""
        if self.is_refusing:
            self.is_refusing = False
            self.generation += 1
            self.dialect = self.sessions = self.token_ids = self.logprobs_of = self.server_info = None
            self.version_asked = self.offer = self.context = None
            self.logprobs_asked = self.echoes_ids = False

    def rid_in(self, reply: Body) -> str | None:
        """The rid of the request that a completion names at its beginning; None if it names none there."""
        named = _REPLY_ID.search(reply.beginning(_REPLY_ID_WITHIN))
        self.echoes_ids = self.echoes_ids or named is not None
        return None if named is None else named[1].decode()

    def lacks_id(self, reply: Body) -> bool:
        """Has a valid completion no id, of an engine that gives ids? It may be that of another request."""
        return self.echoes_ids and not msgspec.json.decode(reply.joined(), type=_Named).id

    def _become(self, health: Health, now: float) -> None:
        if health != self.health:
            self.health, self.since = health, now

    def report_version(self, version: str, known: str | None) -> None:
        """The engine reported this version; `known` is the `weight_version` known when the request was sent.

        If the version has changed since, the report may be outdated: then it can only raise the version.
        """
        if version == self.weight_version:
            return
        rises = self.weight_version is not None and is_lower(self.weight_version, version)
        if known != self.weight_version and not rises:
            return
        if self.fell_from is None and self.weight_version is not None and is_lower(version, self.weight_version):
            self.fell_from = self.weight_version
        if self.fell_from is not None and not is_lower(version, self.fell_from):
            self.fell_from = None
        self.weight_version = version

    def forget_version(self) -> None:
        """Forget the version: the next report is accepted."""
        self.weight_version = self.fell_from = None


def is_lower(version: str, than: str) -> bool:
    """Are both numbers, and is the first lower? Names have no order."""
    return is_number(version) and is_number(than) and int(version) < int(than)


UNSET = "default"
"""What both engines report until somebody sets a version."""

VERSION_S = 2.0
"""How long a turn may wait for the answer, which is read from memory."""


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


ROUTES: Mapping[str, str] = {"vllm": "/weight_info", "sglang": "/model_info"}
"""By dialect, what tells an engine's version."""


async def weight_version(client: EngineClient, base_url: str, headers: Headers, route: str) -> str | None:
    """The version; None if the engine has no such route, does not answer, or has one that is too long for a reply."""
    try:
        async with asyncio.timeout(VERSION_S):
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
    """Which weight version a generation is sampled under, as known when it is sent.

    A reply that names its versions is believed. vLLM's chat and SGLang's stream name none, so the engine is asked: by
    each health check, and by the first such turn after a gate has opened, since trainers change weights behind a shut
    gate, once for all turns that wait. An engine that cannot say has the version that the trainer named when it resumed
    the turn's run, or the fleet.

    `GET /weight_info` is a route of vLLM's development mode, `GET /model_info` is SGLang's. A trainer sets the version
    with `POST /update_weight_version`.
    """

    def __init__(self, fleet: FleetState, client: EngineClient, api_key: str | None) -> None:
        self._fleet = fleet
        self._client = client
        self._headers = to_control(api_key)
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def at_dispatch(self, member: Member, run: str | None, seen: Seen, route: str | None) -> str | None:
        """The version of what a run sends to this engine now; None if nobody can say.

        `seen` records what the engine answers at `route`; without a route it is not asked.
        """
        while route is not None and member.version_asked != self._fleet.fleet.at_engine(member.run)[0]:
            asking = self._asking.get(member.url)
            if asking is None:
                asking = self._asking[member.url] = asyncio.create_task(
                    self._ask(member, seen, route), name="turnlog-version"
                )
                asking.add_done_callback(lambda _: self._asking.pop(member.url, None))
            # Other turns wait for it too: it goes on if this one is cancelled.
            await asyncio.shield(asking)
            if self._fleet.fleet.at_engine(member.run)[1]:
                break
        stated, reported = self._fleet.fleet.version_of(run), member.weight_version
        return stated if stated is not None and reported in (None, UNSET) else reported

    async def _ask(self, member: Member, seen: Seen, route: str) -> None:
        (closings, was_shut), known = self._fleet.fleet.at_engine(member.run), member.weight_version
        version = await weight_version(self._client, member.url, self._headers, route)
        if version is None:
            member.forget_version()
        else:
            seen(member.url, version, known)
        # Were they open all the time between? Behind a shut one, weights may have changed after the answer.
        if not was_shut and self._fleet.fleet.at_engine(member.run) == (closings, False):
            member.version_asked = closings
