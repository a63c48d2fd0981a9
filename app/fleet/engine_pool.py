"""The pool of engines, from the settings and from operators, as all processes agree on it."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import msgspec

from app.domain.events import is_number
from app.domain.fleet import EngineListed, Fleet, FleetEvent, Regression, VersionRegressed
from app.domain.patterns import base_url_fault, plain_base_url
from app.errors import AppError, InvalidRequest, NotFound
from app.fleet.engines import Engines
from app.fleet.member import Member, is_lower
from app.fleet.state import FleetState
from app.process import cancelled

log = logging.getLogger("turnlog.fleet")


class ListedEngine(msgspec.Struct, frozen=True):
    """An engine as an operator sees it: the state shared by all processes, and this process's view."""

    member: Member
    source: Literal["settings", "admin"]
    regressed: Regression | None


class EnginePool:
    """Keeps `engines` in step with the fleet's log, and writes to it when an engine's weight version falls."""

    def __init__(self, fleet: FleetState, engines: Engines, upstreams: tuple[str, ...]) -> None:
        self._fleet = fleet
        self._engines = engines
        self._upstreams = upstreams
        self._reporting: asyncio.Task[None] | None = None
        engines.serve(fleet.fleet.members(upstreams))
        fleet.listen(self._changed)

    def start(self) -> None:
        self._reporting = asyncio.create_task(self._report_regressions(), name="turnlog-regressions")

    async def stop(self) -> None:
        await cancelled(self._reporting)

    def listed(self) -> list[ListedEngine]:
        return [self._listed(member) for member in self._engines.members.values()]

    def _listed(self, member: Member) -> ListedEngine:
        """A regression is over if the version is as high as before, or has become a name."""
        regression = self._fleet.fleet.regressed.get(member.url)
        version = member.weight_version
        is_over = regression is None or (version is not None and not is_lower(version, regression.before))
        source: Literal["settings", "admin"] = "settings" if member.url in self._upstreams else "admin"
        return ListedEngine(member, source, None if is_over else regression)

    async def put(self, url: str, state: Literal["serving", "draining"]) -> ListedEngine:
        """Add the engine, bring it back or drain it. Raises InvalidRequest, StoreUnavailable, StoreFull."""
        url = _require_base_url(url)
        wanted = EngineListed(url, state)

        def decide(fleet: Fleet) -> FleetEvent | None:
            known = fleet.engines.get(url) == wanted and url not in fleet.regressed
            return None if known else wanted

        await self._fleet.refresh()
        await self._fleet.append(decide)
        member = self._engines.members.get(url)
        if member is None:
            raise NotFound(f"engine {url} was removed at the same time")
        return self._listed(member)

    async def remove(self, url: str) -> None:
        """Turns in flight there still end. Raises InvalidRequest, NotFound, StoreUnavailable, StoreFull."""
        url = _require_base_url(url)

        def decide(fleet: Fleet) -> FleetEvent:
            if all(engine.url != url for engine in fleet.members(self._upstreams)):
                raise NotFound(f"there is no engine {url}")
            return EngineListed(url, "removed")

        await self._fleet.refresh()
        await self._fleet.append(decide)

    def _changed(self, before: Fleet, now: Fleet) -> None:
        if now.engines is not before.engines:
            self._engines.serve(now.members(self._upstreams))
        for url in before.regressed.keys() - now.regressed.keys():
            if url in self._engines.members:
                self._engines.members[url].forget_version()

    async def _report_regressions(self) -> None:
        """A failed write does not matter: the engine's next answer with a lower version reports it again."""
        while True:
            await self._engines.regression.wait()
            self._engines.regression.clear()
            for member in list(self._engines.members.values()):
                before, after = member.fell_from, member.weight_version
                if before is not None and after is not None:
                    await self._report(VersionRegressed(member.url, before, after))

    async def _report(self, event: VersionRegressed) -> None:
        if not _is_new_regression(self._fleet.fleet, event):
            return
        try:
            written = await self._fleet.append(lambda fleet: event if _is_new_regression(fleet, event) else None)
        except AppError as error:
            log.warning("the fallen weight version of %s could not be written yet: %s", event.engine, error)
            return
        except Exception:
            log.exception("an unexpected fault in reporting that the weights of %s fell back", event.engine)
            return
        if written is not None:
            log.warning("the weight version of %s went back from %s to %s", event.engine, event.before, event.after)


def _is_new_regression(fleet: Fleet, event: VersionRegressed) -> bool:
    """Has the version risen above the last regression since? If not, this is still the same one."""
    last = fleet.regressed.get(event.engine)
    return last is None or not is_number(last.before) or is_lower(last.before, event.before)


def _require_base_url(text: str) -> str:
    """The normalised base URL. Raises InvalidRequest if it is none."""
    url = plain_base_url(text)
    wrong = base_url_fault(url)
    if wrong is not None:
        raise InvalidRequest(f"url: a base URL {wrong}")
    return url
