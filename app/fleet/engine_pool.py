"""The pool of engines, from the settings and from operators, as all processes agree on it."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import msgspec

from app.domain.events import is_number
from app.domain.fleet import EngineListed, Fleet, FleetEvent, Regression, VersionRegressed
from app.domain.patterns import base_url_fault, plain_base_url
from app.errors import AppError, InvalidRequest, NotFound, RunMismatch
from app.fleet.engines import Engines
from app.fleet.member import Member, is_lower
from app.fleet.state import POLL_S, STALE_S, FleetState
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
        engines.serve(fleet.fleet.members(upstreams), fleet.fleet.owners)
        fleet.listen(self._changed)

    def start(self) -> None:
        self._reporting = asyncio.create_task(self._report_regressions(), name="turnlog-regressions")

    async def stop(self) -> None:
        await cancelled(self._reporting)

    def listed(self, run: str | None = None) -> list[ListedEngine]:
        """All engines, or those that serve a run."""
        return [self._listed(member) for member in self._engines.serving(run)]

    def _listed(self, member: Member) -> ListedEngine:
        """A regression is over if the version is as high as before, or has become a name."""
        regression = self._fleet.fleet.regressed.get(member.url)
        version = member.weight_version
        is_over = regression is None or (version is not None and not is_lower(version, regression.before))
        source: Literal["settings", "admin"] = "settings" if member.url in self._upstreams else "admin"
        return ListedEngine(member, source, None if is_over else regression)

    async def put(
        self, url: str, state: Literal["serving", "draining"], run: str | msgspec.UnsetType | None = msgspec.UNSET
    ) -> ListedEngine:
        """Add the engine, bring it back or drain it. `run` is the run that it serves alone, None: it serves several;
        where it is not given, that stays as it is. Raises InvalidRequest, RunMismatch for an engine that is in the pool
        for another run, StoreUnavailable, StoreFull."""
        url = require_base_url(url)

        def decide(fleet: Fleet) -> FleetEvent | None:
            wanted = self._wanted(fleet, url, state, run)
            return None if fleet.engines.get(url) == wanted and url not in fleet.regressed else wanted

        known = (await self._fleet.refresh()).engines.get(url)
        wanted = self._wanted(self._fleet.fleet, url, state, run)
        if known is not None and known.run != wanted.run and not self._fleet.is_alone:
            # Until no process sends it a turn of the run that it served before it was removed.
            await asyncio.sleep(max(STALE_S + 2 * POLL_S, 2 * self._fleet.stale_s))
        await self._fleet.append(decide)
        member = self._engines.members.get(url)
        if member is None:
            raise NotFound(f"engine {url} was removed by another request")
        return self._listed(member)

    def _wanted(
        self, fleet: Fleet, url: str, state: Literal["serving", "draining"], run: str | msgspec.UnsetType | None
    ) -> EngineListed:
        """Raises RunMismatch."""
        listed, known = self._member(fleet, url), fleet.engines.get(url)
        if listed is not None and run is not msgspec.UNSET and listed.run != run:
            whose = "several runs" if listed.run is None else f"run {listed.run}"
            raise RunMismatch(f"engine {url} serves {whose}: remove it first, then add it again")
        kept = None if known is None else known.run
        return EngineListed(url, state, kept if run is msgspec.UNSET else run)

    def _member(self, fleet: Fleet, url: str) -> EngineListed | None:
        return next((engine for engine in fleet.members(self._upstreams) if engine.url == url), None)

    async def remove(self, url: str, run: str | None = None) -> None:
        """Turns in flight there still end. `run`: only an engine that serves this run alone. Raises InvalidRequest,
        NotFound, StoreUnavailable, StoreFull."""
        url = require_base_url(url)

        def decide(fleet: Fleet) -> FleetEvent:
            listed = self._member(fleet, url)
            if listed is None or run not in (None, listed.run):
                raise NotFound(f"engine {url} is not in the pool")
            return EngineListed(url, "removed", listed.run)

        await self._fleet.refresh()
        await self._fleet.append(decide)

    def _changed(self, before: Fleet, now: Fleet) -> None:
        if now.engines is not before.engines:
            self._engines.serve(now.members(self._upstreams), now.owners)
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
                    await self._report(VersionRegressed(member.url, before, after, member.run))

    async def _report(self, event: VersionRegressed) -> None:
        if not _is_new_regression(self._fleet.fleet, event):
            return
        try:
            written = await self._fleet.append(lambda fleet: event if _is_new_regression(fleet, event) else None)
        except AppError as error:
            log.warning("could not record yet that the weight version of %s fell back: %s", event.engine, error)
            return
        except Exception:
            log.exception("unexpected error while recording that the weight version of %s fell back", event.engine)
            return
        if written is not None:
            log.warning("the weight version of %s fell back from %s to %s", event.engine, event.before, event.after)


def _is_new_regression(fleet: Fleet, event: VersionRegressed) -> bool:
    """Has the version risen above the last regression since? If not, this is still the same one."""
    last = fleet.regressed.get(event.engine)
    return last is None or not is_number(last.before) or is_lower(last.before, event.before)


def require_base_url(text: str) -> str:
    """The normalised base URL. Raises InvalidRequest if it is none."""
    url = plain_base_url(text)
    wrong = base_url_fault(url)
    if wrong is not None:
        raise InvalidRequest(f"url: a base URL {wrong}")
    return url
