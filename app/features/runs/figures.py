"""The figures of runs: those of the list follow from heads, those of one run also from the events that end turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from app.domain.events import TurnCommitted, UnknownEvent, engine_error
from app.domain.groups import statistics
from app.domain.restore import in_effect
from app.features.runs import reads
from app.features.runs.reads import GroupCount, HeadCount, RunRow
from app.store.ports import Database
from app.store.sessions import EventRow, decode_events
from turnlog.replies import ListedRun, RunGroups, RunLimits, RunSessions, RunTokenCounts, RunVersions

AT_ONCE = 500
"""Sessions whose events are read in one transaction, with a query each."""

KEPT_SESSIONS = 200_000
"""Sessions whose counts are kept in memory; those of the runs that were asked for last."""


class Counts(msgspec.Struct, frozen=True):
    """Of a session up to event `version`: the tokens of its committed turns, discarded ones too, the smallest weight
    version that sampled one, and its engine errors by their reasons, but for those that a restore took back."""

    version: int = 0
    prompt: int = 0
    generated: int = 0
    errors: Mapping[str, int] = {}
    oldest: int | None = None


class Tally:
    """Counts the turns of runs. What was counted is kept, and only what came since is read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[str, dict[str, Counts]] = OrderedDict()

    async def of(self, run: str) -> Counts:
        """The sums of a run's sessions. Raises StoreUnavailable."""
        counted = await self.by_session(run)
        return await asyncio.to_thread(summed, counted.values())

    async def by_session(self, run: str) -> Mapping[str, Counts]:
        """Raises StoreUnavailable."""
        known = self._known.get(run, {})
        present = await self._database.read(partial(reads.versions, run=run))
        counted = {session_id: one for session_id in present if (one := known.get(session_id)) is not None}
        # A crash of PostgreSQL may have undone the last events: a log that is shorter now is counted anew.
        after = [
            (session_id, 0 if one is None or one.version > version else one.version)
            for session_id, version in present.items()
            if (one := counted.get(session_id)) is None or one.version != version
        ]
        for at in range(0, len(after), AT_ONCE):
            part = after[at : at + AT_ONCE]
            new = await self._database.read(partial(reads.turn_ends, after=part))
            before = {session_id: counted[session_id] if seq else Counts() for session_id, seq in part}
            counted |= await asyncio.to_thread(_counted, before, new, present, self._database.unreadable.warn)
        self._keep(run, counted)
        return counted

    def _keep(self, run: str, counted: dict[str, Counts]) -> None:
        self._known[run] = counted
        self._known.move_to_end(run)
        while len(self._known) > 1 and sum(map(len, self._known.values())) > KEPT_SESSIONS:
            self._known.popitem(last=False)


def _counted(
    before: Mapping[str, Counts],
    new: Mapping[str, Sequence[EventRow]],
    versions: Mapping[str, int],
    warn: Callable[[str, UnknownEvent], None],
) -> dict[str, Counts]:
    """An event that cannot be read counts nothing; `warn` is told of it and its session."""
    counted = {}
    for session_id, rows in new.items():
        one = Counts() if any(row.type == reads.RESTORED for row in rows) else before[session_id]
        prompt, generated, oldest = one.prompt, one.generated, one.oldest
        log = []
        for row in rows:
            try:
                log += decode_events([row])
            except UnknownEvent as error:
                warn(session_id, error)
                continue
            event = log[-1].event
            if isinstance(event, TurnCommitted) and event.fence != row.seq:  # else a fork's copy
                prompt += event.base_tokens + event.suffix_tokens
                generated += event.output_tokens
                oldest = min([*event.version_numbers, *([] if oldest is None else [oldest])], default=None)
        wrong = (engine_error(recorded.event) for recorded in in_effect(log))
        errors = Counter(one.errors) + Counter(reason for reason in wrong if reason is not None)
        upto = max(versions[session_id], rows[-1].seq if rows else 0)
        counted[session_id] = Counts(upto, prompt, generated, errors, oldest)
    return counted


def summed(counts: Iterable[Counts]) -> Counts:
    prompt, generated, errors = 0, 0, Counter[str]()
    for one in counts:
        prompt, generated = prompt + one.prompt, generated + one.generated
        errors.update(one.errors)
    return Counts(0, prompt, generated, dict(sorted(errors.items())))


# The list.


def listed(
    names: Sequence[str], rows: Mapping[str, RunRow], counts: Sequence[HeadCount], groups: Mapping[str, GroupCount]
) -> list[ListedRun]:
    """Those of the runs that are there: given something, or with a session."""
    heads: dict[str, list[HeadCount]] = {}
    for head in counts:
        heads.setdefault(head.run, []).append(head)
    return [
        _listed(name, rows.get(name), heads.get(name, []), groups.get(name))
        for name in names
        if name in heads or name in rows
    ]


def _listed(name: str, row: RunRow | None, heads: Sequence[HeadCount], groups: GroupCount | None) -> ListedRun:
    by_status, failed = Counter[str](), Counter[str]()
    for head in heads:
        by_status[head.status] += head.sessions
        if head.failed is not None:
            failed[head.failed] += head.sessions
    rewards = [head.reward for head in heads if head.reward is not None for _ in range(head.sessions)]
    newest = [head.newest for head in heads if head.newest is not None]
    oldest = [head.oldest for head in heads if head.oldest is not None and head.status == "open"]
    return ListedRun(
        run=name,
        status="open" if row is None else row.status,
        limits=RunLimits(live=None, tokens=None)
        if row is None
        else RunLimits(live=row.max_live, tokens=row.max_tokens),
        metadata=None if row is None or row.metadata is None else msgspec.json.decode(row.metadata),
        note=None if row is None or row.note is None else row.note.decode(),
        sessions=RunSessions(open=by_status["open"], closed=by_status["closed"], erased=by_status["erased"]),
        turns=sum(head.turns for head in heads),
        engine_errors=sum(head.engine_errors for head in heads),
        tool_errors=sum(head.tool_errors for head in heads),
        groups=RunGroups(complete=0, handed_out=0, acknowledged=0)
        if groups is None
        else RunGroups(complete=groups.complete, handed_out=groups.handed_out, acknowledged=groups.acknowledged),
        reward=msgspec.to_builtins(statistics(rewards)) if rewards else None,
        failed=dict(sorted(failed.items())),
        weight_versions=RunVersions(newest=max(newest, default=None), oldest_live=min(oldest, default=None)),
        first_at=min((head.first_at for head in heads), default=None),
        last_at=max((head.last_at for head in heads), default=None),
    )


def with_turns(one: ListedRun, counts: Counts) -> dict[str, Any]:
    """A run's own view."""
    tokens = RunTokenCounts(prompt=counts.prompt, generated=counts.generated)
    return {**one, "tokens": tokens, "errors": dict(counts.errors)}
