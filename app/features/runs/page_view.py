"""The page's first view of a run: is it healthy?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from sqlalchemy import Connection

from app.api.parameters import RunName
from app.api.requests import Request
from app.api.routes import Routes
from app.domain.groups import GroupKey
from app.features.groups.groups import rows_of
from app.features.runs import reads
from app.features.runs.figures import Counts
from app.features.runs.reads import VersionCount
from turnlog.replies import ListedGroup

if TYPE_CHECKING:
    from app.features.gates.pauses import Pauses
    from app.features.runs.runs import Runs
    from app.services import Services

route = Routes("Page")

MAX_VERSIONS = 100

NEWEST_GROUPS = 500
"""Among so many groups, those that were begun last, the worst are looked for."""

SHOWN_GROUPS = 5

CANDIDATES = 50
"""Groups that may be stuck: of some of them an attempt was replaced, and they wait for nothing."""


class VersionFigures(msgspec.Struct, frozen=True):
    """The sessions whose newest weights are of a version. `turns` are committed ones; `failed` and `rewarded` count
    rollouts. `staleness`: by how many versions a session's oldest weights are behind, the mean."""

    version: int
    sessions: int
    open: int
    turns: int
    engine_errors: int
    tool_errors: int
    rewarded: int
    mean_reward: float | None
    failed: int
    staleness: float | None


class RunGroupFigures(msgspec.Struct, frozen=True):
    """Of the newest groups that have rewards: how many, how many of them have several and all equal, the first of
    those, and those with the lowest means. `stuck`: of all groups, those that have waited longest, `since` when the
    first session was created."""

    rewarded: int
    flat: int
    lowest: Sequence[ListedGroup]
    zero_variance: Sequence[ListedGroup]
    stuck: Sequence[Mapping[str, Any]]


class ShutGate(msgspec.Struct, frozen=True):
    """A gate at which turns of the run wait; `held` of them in this process."""

    of: Literal["server", "run"]
    adapter: str | None
    reason: str
    since: float | None
    held: int


class RunView(msgspec.Struct, frozen=True):
    """`run` as `GET /runs/{run}` has it. Evaluations count in none of the others."""

    run: Mapping[str, Any]
    versions: Sequence[VersionFigures]
    failed: Mapping[str, int]
    groups: RunGroupFigures
    gates: Sequence[ShutGate]


@route.for_the_page("/runs/{run}", of_run="path")
async def run_view(request: Request, run: RunName) -> object:
    """Whether a run is healthy: its figures by weight version, its worst and its stuck groups, its gates."""
    runs: Runs = request.services.features["runs"]
    read = request.services.database.read
    figures, counts = await runs.get_with_sessions(run)

    def look(connection: Connection) -> tuple[list[VersionCount], dict[str, int], dict[str, int], RunGroupFigures]:
        versions = reads.version_counts(connection, run, MAX_VERSIONS)
        weights = reads.newest_weights(connection, run, versions[-1].version) if versions else {}
        return versions, weights, reads.failures(connection, run), _groups(connection, run)

    versions, weights, failed, groups = await read(look)
    by_version = await asyncio.to_thread(partial(_by_version, versions, weights, counts))
    return RunView(figures, by_version, failed, groups, _gates(request.services, run))


def _by_version(
    versions: Sequence[VersionCount], weights: Mapping[str, int], counts: Mapping[str, Counts]
) -> list[VersionFigures]:
    behind = defaultdict[int, list[int]](list)
    for session_id, version in weights.items():
        one = counts.get(session_id, Counts())
        if one.oldest is not None:
            behind[version].append(version - one.oldest)
    return [
        VersionFigures(
            **one._asdict(),
            staleness=sum(behind[one.version]) / len(behind[one.version]) if behind[one.version] else None,
        )
        for one in versions
    ]


def _groups(connection: Connection, run: str) -> RunGroupFigures:
    rewarded = [one for one in reads.group_sums(connection, run, NEWEST_GROUPS, stuck=False) if one.rewarded]
    flat = [one for one in rewarded if one.is_flat]
    lowest = sorted(rewarded, key=lambda one: one.mean or 0.0)
    since = {one.group_id: one.since for one in reads.group_sums(connection, run, CANDIDATES, stuck=True)}
    shown = [
        rows_of(connection, [GroupKey(run, name) for name in names])
        for names in (*([one.group_id for one in found[:SHOWN_GROUPS]] for found in (lowest, flat)), since)
    ]
    stuck = [{**row, "since": since[row["group_id"]]} for row in shown[2] if row["state"] == "open"]
    return RunGroupFigures(len(rewarded), len(flat), shown[0], shown[1], stuck[:SHOWN_GROUPS])


def _gates(services: Services, run: str) -> list[ShutGate]:
    """Of the server's gates of adapters only those at which turns of the run wait: another may be another run's."""
    pauses: Pauses | None = services.features.get("gates")
    if pauses is None:
        return []
    fleet = services.fleet.fleet
    held = {adapter: count for (of, adapter), count in pauses.gates.held().items() if of == run}
    waiting = sum(held.values())
    found = [
        ShutGate("server" if one.run is None else "run", None, one.reason, None, waiting) for one in fleet.holding(run)
    ]
    whose: tuple[Literal["server", "run"], ...] = ("server", "run")
    for of, gates in zip(whose, (fleet.gates, fleet.gates_of(run)), strict=True):
        if gates.fleet.is_shut:
            found.append(ShutGate(of, None, gates.fleet.mode or "pause", gates.fleet.since, waiting))
        for name, gate in gates.adapters.items():
            if gate.is_shut and (of == "run" or held.get(name)):
                found.append(ShutGate(of, name, "pause", gate.since, held.get(name, 0)))
    return found
