"""The training feed: complete groups, leased to a consumer until it acknowledges them.

complete ──▶ leased to a consumer ──ack──▶ consumed, for good
    ▲               │
    └── lease ends ─┘   (or a session was created in the group, which is then incomplete)

A group is a run's, and so are leases and acknowledgements: two runs may have groups of one id. It is complete when all
of its attempts have arrived and each of its rollouts is closed and rewarded, or has failed (`rules`). A rollout is a
root session with the sessions of its agents and children; they are handed out together. Groups of evaluations are
handed out to who asks for them. Leases and acknowledgements are on disk before the reply leaves. So groups that a
consumer did not acknowledge are handed out again, and only those:

- A consumer that asks again, also after a crash, first gets its unacknowledged groups, then new ones, oldest
  completion first. With `new_only` it gets only groups that are not leased, also not to itself: to prefetch, or to
  share one name among several clients.
- When a lease ends, the next consumer that asks gets the group. The earlier consumer may acknowledge until then.
- An acknowledgement is final: later sessions and rewards do not bring the group back.
- A session created in a leased group ends the lease. The group is handed out again when it is complete, unless it was
  acknowledged meanwhile; `handed_out` counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import ConfigDict, Field

from app.domain.events import DEFAULT_RUN
from app.domain.groups import (
    REPLACED,
    UNKNOWN_STALENESS,
    Current,
    GroupKey,
    Outcome,
    Statistics,
    oldest_version,
    staleness,
    statistics,
    too_stale,
)
from app.domain.patterns import ALL_RUNS, ID, RUN_OR_ALL
from app.domain.restore import in_effect
from app.domain.selection import Selection
from app.errors import CheckpointBusy, InvalidRequest, NotFound
from app.export import formats
from app.export.exporter import Exporter
from app.export.faults import instead, told
from app.export.lost import sampled_in
from app.export.parts import EVALUATION
from app.export.query import ExportQuery, RowQuery
from app.export.row import Fields
from app.features.groups import reads as group_reads
from app.features.groups.groups import GroupList, missing_attempts, settle_groups
from app.features.groups.operations import Acknowledge, Acknowledged, Lease, Leased, Measure
from app.features.groups.reads import Candidate, TurnEvents, Waiting
from app.features.groups.rules import Attempt, of_one_kind, outcome
from app.store.damage import Unreadable, of_readable
from app.store.ports import Database, Writer
from app.store.selection import GroupFilter
from app.store.sessions import EventRow, decode_events, newest_readable_versions
from turnlog import replies as reply_types

ACKS_AT_ONCE = 200
"""Groups acknowledged in one transaction."""

GROUPS_AT_ONCE = 16
"""Groups whose logs are read together to find their age."""

SESSIONS_AT_ONCE = 16
"""Sessions of a group whose rows are read together."""

PAGE = 500
"""Waiting groups listed in one query."""

LOOKED_AT = 10_000
"""The most groups that one request looks at, of its own and of free ones; that matters with a filter by metadata."""
RUNS_NAMED = 10
"""Runs that an error names."""

UNFINISHED = "open, or neither rewarded nor failed"
"""Why a rollout is not given, or holds its group up."""
MAX_SIZE = 1000
MAX_LEASE_S = 86_400


class FeedQuery(Selection, RowQuery):
    """A request for groups: of which run, how many, for which consumer and lease, and the export parameters of their
    rows.

    `max_staleness`: only groups whose oldest sampled token is at most so many weight versions behind. `metadata`: only
    groups of which a rollout's root has it.
    """

    model_config = ConfigDict(extra="forbid")

    consumer: str = Field(
        pattern=ID,
        description="The consumer's name. Groups that it has leased and not acknowledged are given to it again.",
    )
    run: str | None = Field(
        default=DEFAULT_RUN, pattern=RUN_OR_ALL, description="Only groups of this run; `*`: of all runs."
    )
    size: int = Field(default=1, ge=1, le=MAX_SIZE, description="Maximum number of groups.")
    lease_s: float = Field(default=600, ge=1, le=MAX_LEASE_S, description="Duration of the lease in seconds.")
    attempts: int = Field(default=1, ge=1, le=2**31 - 1, description="Only groups with at least this many attempts.")
    new_only: bool = Field(default=False, description="Only groups without a lease.")
    explain: bool = Field(default=False, description="Also say what was left out, and why.")

    def of_rows(self) -> ExportQuery:
        """What is asked of the rows of a group; how old it may be is asked of the group as a whole."""
        of_group = {"max_staleness", "weight_version"} if self.stale == "drop" else set[str]()
        shared = self.model_dump(include=set(RowQuery.model_fields) - of_group)
        return ExportQuery(**shared, explain=True, advantage="grpo")

    @property
    def of_groups(self) -> GroupFilter:
        return GroupFilter(**self.run_and_group | ({"run": None} if self.run == ALL_RUNS else {}))

    def oldest(self, current: Current, run: str) -> int | None:
        """The oldest weight version of a group of the run that is handed out; None: any."""
        most, now = self.max_group_staleness, current.of(run)
        return None if most is None or now is None else now - most

    @property
    def max_group_staleness(self) -> int | None:
        """Of a group that is handed out; None: any."""
        return self.max_staleness if self.stale == "drop" else None


G = TypeVar("G", Candidate, Waiting)


class _LeasedGroup(msgspec.Struct, frozen=True):
    group: Candidate
    lease: Leased


class _Line(msgspec.Struct, frozen=True):
    """A group that is handed out, without its rows and exclusions.

    `staleness` is null if no weight version of the group, or of the run, is a number; `staleness_unknown` is then
    true.
    """

    run: str
    group_id: str
    attempts: list[Any]
    lease_until: float
    handed_out: int
    statistics: Statistics | None
    staleness: int | None
    staleness_unknown: str | None


class Feed:
    """`exporter` gives the rows of the sessions that are handed out."""

    def __init__(self, database: Database, writer: Writer, exporter: Exporter) -> None:
        self._database = database
        self._writer = writer
        self._exporter = exporter
        self._leasing = asyncio.Lock()

    async def hand_out(self, query: FeedQuery) -> AsyncIterator[bytes]:
        """Lease groups, then give a line of JSON for each. Raises InvalidRequest for an unknown shape."""
        wanted = query.of_rows()
        formats.require(wanted)
        # Concurrent requests in one process would only compete for the same groups.
        async with self._leasing:
            await settle_groups(self._database, self._writer)
            current = Current(query.weight_version)
            if current.given is None:
                versions = partial(newest_readable_versions, run=query.of_groups.run, evaluation=query.evaluation)
                newest = await self._database.read(versions)
                current = Current(None, newest)
            given = await self._lease(query, current)
        return self._lines(query, wanted, current, given)

    async def group(self, group_id: str, run: str | None) -> reply_types.Group:
        """A group as it is now. Without a run: the default run's, else that of the only run that has one.

        Raises NotFound if no session has the id, InvalidRequest if several runs have such a group.
        """
        key = GroupKey(DEFAULT_RUN if run is None else run, group_id)
        every = await self._attempts(key)
        if not every and run is None:
            others = await self._database.read(partial(group_reads.runs_of, group_id=group_id, limit=RUNS_NAMED + 1))
            if len(others) > 1:
                raise InvalidRequest(f"run is missing: {_named(others)} have a group with this id")
            key = GroupKey(others[0], group_id) if others else key
            every = await self._attempts(key)
        if not every:
            raise NotFound("no session has this group_id")
        group = outcome(every)
        return {
            "run": key.run,
            "group_id": group_id,
            "group_size": group.size,
            "arrived": group.arrived,
            "attempts": msgspec.to_builtins(every),
            "missing_attempts": missing_attempts([one.attempt for one in every if one.attempt is not None], group.size),
            "statistics": msgspec.to_builtins(group.statistics),
            "complete": group.complete,
            "evaluation": group.evaluation,
        }

    async def _attempts(self, key: GroupKey) -> list[Attempt]:
        return (await self._database.read(partial(group_reads.attempts, keys=[key])))[key]

    async def acknowledge(self, consumer: str, run: str, group_ids: Sequence[str]) -> Acknowledged:
        """Acknowledge groups of a run. Idempotent. Raises CheckpointBusy."""
        every = Acknowledged([], [], [], [])
        distinct = sorted(set(group_ids))
        for at in range(0, len(distinct), ACKS_AT_ONCE):
            part = await self._writer.submit(Acknowledge(consumer, run, distinct[at : at + ACKS_AT_ONCE]))
            if part is None:
                busy = "the run, or the store, is being restored to a checkpoint: acknowledge again after that"
                raise CheckpointBusy(busy)
            every.acknowledged.extend(part.acknowledged)
            every.already.extend(part.already)
            every.not_leased.extend(part.not_leased)
            every.unknown.extend(part.unknown)
        return every

    async def _lease(self, query: FeedQuery, current: Current) -> list[_LeasedGroup]:
        run = query.of_groups.run
        oldest = None if run is None else query.oldest(current, run)
        given: list[_LeasedGroup] = []
        for held_by in (None,) if query.new_only else (query.consumer, None):
            after, looked_at = (-1.0, "", ""), 0
            while len(given) < query.size and looked_at < LOOKED_AT:
                page = await self._database.read(
                    partial(
                        group_reads.candidates,
                        held_by=held_by,
                        attempts=query.attempts,
                        oldest=oldest,
                        evaluation=query.evaluation,
                        after=after,
                        limit=PAGE if query.metadata else query.size - len(given),
                        wanted=query.of_groups,
                    )
                )
                if not page:
                    break
                after, looked_at = page[-1].place, looked_at + len(page)
                left = await self._fitting(query, page)
                while left and (more := query.size - len(given)):
                    given += await self._take(query, left[:more], current)
                    left = left[more:]
        return given

    async def _take(self, query: FeedQuery, page: Sequence[Candidate], current: Current) -> list[_LeasedGroup]:
        """The groups of a page that are recent enough and were not leased meanwhile."""
        young: list[Candidate] = []
        stale: list[Candidate] = []
        for one in await self._measured(await self._readable(page)):
            age, oldest = one.oldest_version, query.oldest(current, one.run)
            (stale if oldest is not None and age is not None and age < oldest else young).append(one)
        if stale:
            await self._writer.submit(Measure(stale))
        if not young:
            return []
        leased = await self._writer.submit(Lease(query.consumer, query.lease_s, not query.new_only, young))
        by_key = {lease.key: lease for lease in leased}
        return [_LeasedGroup(group, by_key[group.key]) for group in young if group.key in by_key]

    async def _fitting(self, query: FeedQuery, page: Sequence[G]) -> Sequence[G]:
        """Those of the groups that have the metadata."""
        if not query.metadata:
            return page
        keys = [group.key for group in page]
        fitting = await self._database.read(partial(group_reads.with_metadata, keys=keys, wanted=query.metadata))
        return [group for group in page if group.key in fitting]

    async def _readable(self, page: Sequence[Candidate]) -> list[Candidate]:
        """Without the groups that have a head on a damaged page: nobody knows all of their rewards."""
        keys = [group.key for group in page]
        attempts = await self._database.read(lambda connection: of_readable(connection, keys, group_reads.attempts))
        for key in keys:
            if key not in attempts:
                self._database.unreadable.warn_of_group(key, "a page of it is damaged")
        return [group for group in page if group.key in attempts]

    async def _measured(self, page: Sequence[Candidate]) -> list[Candidate]:
        """The groups with the oldest version among their sessions, which are closed, so that it is final; without those
        of which an agent's head is on a damaged page."""
        unknown = [one.key for one in page if not one.measured]
        ages: dict[GroupKey, int | None] = {}
        for at in range(0, len(unknown), GROUPS_AT_ONCE):
            part = unknown[at : at + GROUPS_AT_ONCE]
            logs = await self._database.read(partial(group_reads.turn_events, keys=part))
            ages |= await asyncio.to_thread(_ages, logs, self._database.unreadable)
        for key in unknown:
            if key not in ages:
                self._database.unreadable.warn_of_group(key, "a page of it is damaged")
        return [
            one if one.measured else msgspec.structs.replace(one, measured=True, oldest_version=ages[one.key])
            for one in page
            if one.measured or one.key in ages
        ]

    async def _lines(
        self, query: FeedQuery, wanted: ExportQuery, current: Current, given: Sequence[_LeasedGroup]
    ) -> AsyncIterator[bytes]:
        for one in given:
            async for piece in self._line(query, wanted, current, one):
                yield piece
        if query.explain:
            async for line in self._left_out(query, current, {one.group.key for one in given}):
                yield line

    async def _line(
        self, query: FeedQuery, wanted: ExportQuery, current: Current, given: _LeasedGroup
    ) -> AsyncIterator[bytes]:
        """A group's line in pieces: its rows, as `wanted`, are made a few sessions at a time."""
        key = given.group.key
        every = await self._attempts(key)
        finished = {one.session_id: one for one in of_one_kind(every) if one.finished and one.counts}
        outcomes = {one.session_id: Outcome(one.reward, one.failed) for one in finished.values()}
        counted = (one.counted(query.failed) for one in outcomes.values())
        rewards = [reward for reward in counted if reward is not None]
        roots = list(finished)
        of_agents = await self._database.read(partial(group_reads.of_agents, root_ids=roots))
        now = current.of(key.run)
        wanted = wanted.model_copy(update={"weight_version": now})
        behind = staleness(now, given.group.oldest_version)
        line = _Line(
            run=key.run,
            group_id=key.group_id,
            attempts=[_attempt(one) for one in finished.values()],
            lease_until=given.lease.lease_until,
            handed_out=given.lease.handed_out,
            statistics=statistics(rewards) if rewards else None,
            staleness=behind,
            staleness_unknown=UNKNOWN_STALENESS if behind is None else None,
        )
        without = {one.session_id: _why_without(one, given.group) for one in every if one.session_id not in finished}
        rollouts = await self._rollouts([name for name, reason in without.items() if reason != "erased"])
        lost = {name: await self._sampled_in(names) for name, names in rollouts.items() if query.explain}
        excluded: list[dict[str, Any]] = [
            {"session_id": name, "reason": reason, "lost_tokens": lost.get(name)} for name, reason in without.items()
        ]
        told = {*without, *(name for of_rollout in rollouts.values() for name in of_rollout)}
        yield msgspec.json.encode(line)[:-1] + b',"rows":['
        separator = b""
        all_sessions = [session_id for root_id in roots for session_id in (root_id, *of_agents.get(root_id, ()))]
        for part in _parts(all_sessions, query.shape):
            rows = await self._exporter.rows(part, wanted, outcomes)
            made, left_out = await asyncio.to_thread(_encoded, rows, wanted)
            for row in made:
                yield separator + row
                separator = b","
            # A trainer does not miss a turn that was rolled back.
            of_rows = [one for one in left_out if query.explain or "turn" not in one]
            excluded += [one for one in of_rows if one["session_id"] not in told]
        yield b'],"excluded":' + msgspec.json.encode(excluded) + b"}\n"

    async def _rollouts(self, root_ids: Sequence[str]) -> dict[str, list[str]]:
        """The sessions of rollouts that are not erased, by root."""
        if not root_ids:
            return {}
        read = partial(group_reads.of_agents, root_ids=root_ids, status=("open", "closed"))
        of_agents = await self._database.read(read)
        return {root_id: [root_id, *of_agents.get(root_id, ())] for root_id in root_ids}

    async def _sampled_in(self, session_ids: Sequence[str]) -> int | None:
        """The sampled tokens of the sessions whose logs can be read; None if none can."""
        read = group_reads.turn_events_of
        logs = await self._database.read(lambda connection: of_readable(connection, session_ids, read))
        sampled = await asyncio.to_thread(_sampled, logs, self._database.unreadable)
        return sum(sampled.values()) if sampled else None

    async def _left_out(self, query: FeedQuery, current: Current, given: set[GroupKey]) -> AsyncIterator[bytes]:
        """For each other unacknowledged group, why it was not handed out; of one that is too old, or an evaluation, its
        sampled tokens, which so are lost."""
        after = GroupKey("", "")
        waiting = partial(group_reads.waiting, wanted=query.of_groups, limit=PAGE)
        while page := await self._database.read(partial(waiting, after=after)):
            for group in await self._fitting(query, page):
                if group.key not in given:
                    why, is_lost = _why_not(group, query, current)
                    line: dict[str, Any] = {**group.key._asdict(), "excluded": why}
                    if is_lost:
                        read = partial(of_readable, ids=[group.key], read=group_reads.attempts)
                        for every in (await self._database.read(read)).values():  # none if a head is damaged
                            rollouts = await self._rollouts([one.session_id for one in every if one.status != "erased"])
                            names = [name for of_rollout in rollouts.values() for name in of_rollout]
                            line["lost_tokens"] = await self._sampled_in(names)
                    yield msgspec.json.encode(line) + b"\n"
            after = page[-1].key


def _ages(logs: TurnEvents, unreadable: Unreadable) -> dict[GroupKey, int | None]:
    """Each group's oldest version, without the sessions that cannot be read. Runs on a thread."""
    return {key: min(_oldest_versions(of_group, unreadable), default=None) for key, of_group in logs.items()}


def _oldest_versions(logs: Mapping[str, Sequence[EventRow]], unreadable: Unreadable) -> Iterator[int]:
    for session_id, rows in logs.items():
        try:
            version = oldest_version(one.event for one in in_effect(decode_events(rows)))
        except Exception as error:  # noqa: BLE001 - a session's fault, whatever it is, holds up no group
            unreadable.warn(session_id, told(error))
            continue
        if version is not None:
            yield version


def _sampled(logs: Mapping[str, Sequence[EventRow]], unreadable: Unreadable) -> dict[str, int]:
    """By session, the sampled tokens of those that can be read. Runs on a thread."""
    tokens: dict[str, int] = {}
    for session_id, rows in logs.items():
        try:
            tokens[session_id] = sampled_in(recorded.event for recorded in decode_events(rows))
        except Exception as error:  # noqa: BLE001 - as in `_oldest_versions`
            unreadable.warn(session_id, told(error))
    return tokens


def _named(runs: Sequence[str]) -> str:
    return f"runs {', '.join(runs[:RUNS_NAMED])}{' and others' if len(runs) > RUNS_NAMED else ''}"


def _why_without(one: Attempt, group: Candidate) -> str:
    """Why a rollout of a group has no rows."""
    if one.status == "erased":
        return "erased"
    if one.evaluation and not group.evaluation:
        return EVALUATION
    return REPLACED if one.replaced else UNFINISHED


def _attempt(one: Attempt) -> dict[str, Any]:
    return {"session_id": one.session_id, "attempt": one.attempt, "reward": one.reward, "failed": one.failed}


def _parts(session_ids: Sequence[str], shape: str) -> list[Sequence[str]]:
    """The sessions in parts that may be in memory together; a shape of whole groups needs only the first of each."""
    if formats.takes_groups(shape):
        return [session_ids[:1]]
    return [session_ids[at : at + SESSIONS_AT_ONCE] for at in range(0, len(session_ids), SESSIONS_AT_ONCE)]


def _encoded(rows: Sequence[Fields], query: ExportQuery) -> tuple[list[bytes], list[dict[str, Any]]]:
    """Each row's JSON, and why others are left out. Runs on a thread."""
    left_out: list[dict[str, Any]] = []

    def leave_out(row: Fields) -> None:
        named = {name: row[name] for name in ("session_id", "segment", "turn") if row.get(name) is not None}
        left_out.append({**named, "reason": row[formats.EXCLUDED], "lost_tokens": row["lost_tokens"]})

    def not_written(row: Fields, error: Exception) -> None:
        leave_out(instead(row, error))

    made: list[bytes] = []
    with contextlib.closing(formats.open_writer(query, not_written)) as writer:
        for row in rows:
            if formats.EXCLUDED in row:
                leave_out(row)
            else:
                made += [line.rstrip(b"\n") for line in writer.write([row])]
    return made, left_out


def _why_not(group: Waiting, query: FeedQuery, current: Current) -> tuple[str, bool]:
    """Why a group is not handed out, and whether no later request of this kind gets it."""
    if group.evaluation and not query.evaluation:
        return EVALUATION, True
    if group.completed_at is None:
        if not group.sessions:
            none = "all of its sessions are erased" if group.erased else "it has no rollout: its sessions are children"
            return none, False
        if group.unfinished:
            return f"incomplete: {group.unfinished} of {group.sessions} sessions are {UNFINISHED}", False
    if group.arrived < (wanted := max(query.attempts, group.size or 0)):
        return f"incomplete: {group.arrived} of {wanted} attempts", False
    if group.is_leased and (query.new_only or group.consumer != query.consumer):
        return f"leased to {group.consumer}", False
    behind = staleness(current.of(group.run), group.oldest_version) if group.measured else None
    most = query.max_group_staleness
    stale = None if behind is None or most is None else too_stale(behind, most)
    return stale or f"beyond size: {query.size} groups were given", stale is not None


class Groups(NamedTuple):
    """What the feature has made: its lists, and the training feed."""

    listed: GroupList
    feed: Feed
