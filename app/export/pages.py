"""Finds what an export reads next: sessions in the order of their last change, or whole groups of them.

A page is found before any content is read: the sessions of its rows, and their advantages.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TypeVar

import msgspec

from app.domain.branches import Branches, Picker, pick
from app.domain.events import EXPORTED
from app.domain.groups import REPLACED, GroupKey, Outcome, grpo, replaced
from app.domain.session import fold
from app.export import formats
from app.export.faults import told
from app.export.query import ExportQuery
from app.export.rows import Folded, Known
from app.store import rollouts
from app.store.content import (
    StoredSession,
    fetch_objects,
    matches,
    outcomes,
    read_content,
    read_logs,
    read_sessions,
)
from app.store.damage import SPAN, BrokenRow, PageDamaged, attempt
from app.store.feed import END, EventFilter, Position, changed_sessions, last_places
from app.store.ports import Connection, Database
from app.store.sessions import EventRow, ExportHead, decode_events, every_head, export_heads, group_members

T = TypeVar("T")

PAGE = 256
"""Positions read in one query."""

PART_BYTES = 8 << 20
"""About how many bytes of stored content are read together, if they belong to several pages: with few sessions at a
time most of a read is the cost of its statements."""

FIRST_TURN_BYTES = 64 << 10
"""What a turn is taken to have before the first is read."""

LARGE_SESSIONS = 2
"""Sessions read together with replay payloads or images, which are larger than all else."""

SIGNED_AT_ONCE = 32
"""URLs of objects that are asked for together."""

GROUPS_KEPT = 256
"""Groups kept in memory during an export: a group's sessions usually end close together."""


class ExportPage(msgspec.Struct, frozen=True):
    """A session's place in an export, or its group's: the sessions to read for it, with about so many turns.

    `left_out`: why sessions of failed and of replaced rollouts give no row.
    """

    session_id: str
    at: Position
    members: Sequence[str]
    turns: int
    is_group: bool
    advantages: Mapping[str, float]
    left_out: Mapping[str, str] = {}


class _Group(msgspec.Struct, frozen=True):
    """The position of each session's last exported event; sessions without one are left out.

    So are sessions without a turn whose rollout has turns elsewhere. `advantages` and `left_out` are by root;
    `rollouts` give each session's root. `matches`: one of the roots has the metadata that is asked for.
    """

    ends: Mapping[str, Position]
    last: Position
    turns: int
    advantages: Mapping[str, float]
    rollouts: Mapping[str, str]
    left_out: Mapping[str, str]
    matches: bool

    def of(self, session_ids: Iterable[str], by_root: Mapping[str, T]) -> dict[str, T]:
        """What a rollout has, which all its sessions share."""
        rollouts = ((member, self.rollouts.get(member, member)) for member in session_ids)
        return {member: by_root[root] for member, root in rollouts if root in by_root}


class ExportPages:
    """The pages up to `high`, of the sessions that `query` asks for, and their content.

    A group, where a row contains one, stands at the position of its last session, even if that session was erased
    since. `turn_bytes`: the stored bytes of a turn, on average, in what was read last.
    """

    def __init__(
        self,
        database: Database,
        high: Position,
        query: ExportQuery,
        branches: Branches | Picker,
        part_bytes: int = PART_BYTES,
        outcomes: Mapping[str, Outcome] | None = None,
    ) -> None:
        self._database = database
        self._part_bytes = part_bytes
        self._high = high
        self._query = query
        self._outcomes = outcomes
        types = (*EXPORTED, "SessionCreated") if query.explain else EXPORTED
        self._wanted = EventFilter(types, query.session_id, query.name, query.generation, **query.run_and_group)
        self._grouped = formats.takes_groups(query.shape)
        self._replay, self._images = bool(query.replay), query.images == "inline"
        self._rollout_rows = RolloutRows(database, high, branches, has_text=formats.takes_text(query.format))
        self._groups: OrderedDict[GroupKey, _Group] = OrderedDict()
        self._heads: dict[str, ExportHead] | None = None
        self._order: list[tuple[str, Position]] | None = None
        self.turn_bytes: int | None = None

    async def following(self, after: Position) -> tuple[Iterator[list[ExportPage]], Position | None]:
        """The next pages, in parts that may be in memory together, and the last position examined; None at the end.
        Around damage there may be sessions of other names.

        How large the turns of one part were decides how many turns the next one has.
        """

        def read(connection: Connection) -> tuple[list[ExportPage], Position | None]:
            if self._heads is not None:
                changed = self._changed_of_all(connection, self._heads, after)
            elif after > self._high:
                raise BrokenRow("a place behind all events: its session is on a damaged page")
            else:
                changed = changed_sessions(connection, self._wanted, after=after, upto=self._high, limit=PAGE)
                # Those of a damaged index may form a circle.
                if any(before >= at for before, at in pairwise([after, *(at for _, at in changed)])):
                    raise BrokenRow("places out of order")
            last = changed[-1][1] if changed else None
            heads = self._heads_of(connection, [changed_id for changed_id, _ in changed])
            if self._query.metadata:
                changed = self._of_metadata(connection, changed, heads)
            return self._places(connection, heads, changed, asked_for=self._query.session_id is not None), last

        places, last = await self._read(read)
        return self._parts(places), last

    def _of_metadata(
        self, connection: Connection, changed: Sequence[tuple[str, Position]], heads: Mapping[str, ExportHead]
    ) -> list[tuple[str, Position]]:
        """The sessions whose metadata match, and those that come with their group, which decides itself."""
        matching = matches(connection, [session_id for session_id, _ in changed], self._query.metadata)
        if self._grouped:
            matching |= {name: True for name, head in heads.items() if head.key is not None}
        return [one for one in changed if matching.get(one[0])]

    async def _read(self, read: Callable[[Connection], T]) -> T:
        """Read by the lists of sessions; where a damaged page is in their way, by the heads of all sessions, which are
        read once an export."""

        def by_lists_or_all(connection: Connection) -> T:
            if self._heads is None:
                try:
                    return attempt(connection, read)
                except PageDamaged:
                    self._heads = every_head(connection)
                    self._groups.clear()
            return read(connection)

        return await self._database.read(by_lists_or_all, one_moment=True)

    def _changed_of_all(
        self, connection: Connection, heads: Mapping[str, ExportHead], after: Position
    ) -> list[tuple[str, Position]]:
        """As `changed_sessions`, of sessions whose heads are given, by their own events."""
        if self._order is None:
            wanted = self._wanted
            ids = {head.session_id for head in heads.values() if _fits(head, wanted)}
            if wanted.session_id is not None:
                ids = {wanted.session_id} if wanted.run is None else ids & {wanted.session_id}
            places = last_places(connection, sorted(ids), self._high, wanted.types)
            self._order = sorted(places.items(), key=lambda place: place[1])
        at = bisect_right(self._order, after, key=lambda place: place[1])
        return self._order[at : at + PAGE]

    async def of(self, session_ids: Sequence[str]) -> list[ExportPage]:
        """The pages of these sessions, each with its group if rows contain groups."""

        def read(connection: Connection) -> list[ExportPage]:
            heads = self._heads_of(connection, session_ids)
            # Of a session without a head it is not known, around damage, whether it is there.
            changed = [(name, END) for name in session_ids if self._heads is not None or name in heads]
            return self._places(connection, heads, changed, asked_for=True)

        return await self._read(read)

    async def read(self, part: Sequence[ExportPage], plan: Plan) -> dict[str, Folded]:
        """These pages' sessions with the content that their rows need; a session whose head is lost gives nothing.

        Two reads: what the logs say decides what content is read, and to fold them would hold up an event loop.
        """
        every = sorted({member for place in part for member in place.members})

        def read(connection: Connection) -> tuple[dict[str, StoredSession], Members]:
            sessions = read_sessions(connection, every, self._high)
            return sessions, self._rollout_rows.members(connection, sessions, self._heads)

        sessions, members = await self._read(read)
        logs = {session_id: sessions.get(session_id) or StoredSession(session_id, "", None) for session_id in every}
        logs = await self._rollout_rows.counted(logs, members)

        def planned() -> dict[str, tuple[Known | None, Turns]]:
            return {member: plan(logs[member], place) for place in part for member in place.members}

        plans = await asyncio.to_thread(planned)
        turns = {session_id: needed for session_id, (_, needed) in plans.items() if needed is None or needed}
        columns = self._query.column_names
        content = partial(
            read_content, stored=logs, turns=turns, replay=self._replay, images=self._images, columns=columns
        )
        read_now = await self._database.read(content, one_moment=True) if turns else {}
        if self._query.replay == "urls":
            urls = await self._signed(read_now.values())
            read_now = {name: msgspec.structs.replace(stored, urls=urls) for name, stored in read_now.items()}
        else:
            await fetch_objects(self._database, read_now.values())
        if count := sum(len(one.frames) for one in read_now.values()):
            self.turn_bytes = max(sum(map(_stored_bytes, read_now.values())) // count, 1)
        folded: dict[str, Folded] = {}
        for session_id, (known, _) in plans.items():
            stored = logs[session_id] if session_id not in turns else read_now.get(session_id)
            stored = stored or StoredSession(session_id, "archived", None)
            # One that was erased, is archived or damaged since has a reason in place of its rows.
            is_known = stored.damage is None and stored.status == logs[session_id].status
            folded[session_id] = Folded(stored, known if is_known else None)
        return folded

    async def _signed(self, sessions: Collection[StoredSession]) -> dict[str, str]:
        """A URL for each object that these sessions' chunks are in. Raises PayloadsUnavailable."""
        bucket = self._database.bucket
        assert bucket is not None, "not required before"
        names = [name for stored in sessions for name in stored.objects.values()]
        urls: list[str] = []
        for at in range(0, len(names), SIGNED_AT_ONCE):
            part = names[at : at + SIGNED_AT_ONCE]
            urls += await asyncio.gather(*(bucket.url_of(name, self._query.url_s) for name in part))
        return dict(zip(names, urls, strict=True))

    def _places(
        self,
        connection: Connection,
        heads: Mapping[str, ExportHead],
        changed: Sequence[tuple[str, Position]],
        *,
        asked_for: bool,
    ) -> list[ExportPage]:
        known = ((heads.get(session_id, ExportHead(session_id, None, 0)), at) for session_id, at in changed)
        places = [self._place(connection, head, at, asked_for) for head, at in known]
        return [place for place in places if place is not None]

    def _heads_of(self, connection: Connection, session_ids: Sequence[str]) -> Mapping[str, ExportHead]:
        return export_heads(connection, session_ids) if self._heads is None else self._heads

    def _place(self, connection: Connection, head: ExportHead, at: Position, asked_for: bool) -> ExportPage | None:
        """None if the session's group comes later, or no root in it has the metadata. `asked_for`: the group is given
        here, whatever its last position."""
        alone = ExportPage(head.session_id, at, [head.session_id], head.turns, self._grouped, {})
        if head.key is None or not (self._grouped or self._query.advantage):
            return alone
        group = self._group(connection, head.key)
        if not self._grouped:
            own = [head.session_id]
            advantages, left_out = group.of(own, group.advantages), group.of(own, group.left_out)
            return msgspec.structs.replace(alone, advantages=advantages, left_out=left_out)
        if not group.matches:
            return None
        has_rows = any(group.rollouts[session_id] == head.rollout for session_id in group.ends)
        if head.session_id not in group.ends and not (asked_for and has_rows):
            return msgspec.structs.replace(alone, is_group=False)
        if group.last > at and not asked_for:
            return None
        members = sorted(group.ends)
        advantages, left_out = group.of(members, group.advantages), group.of(members, group.left_out)
        return ExportPage(head.session_id, at, members, group.turns, True, advantages, left_out)

    def _group(self, connection: Connection, key: GroupKey) -> _Group:
        if (found := self._groups.get(key)) is not None:
            return found
        if self._heads is None:
            heads = group_members(connection, key)
        else:
            heads = [head for head in self._heads.values() if head.key == key]
        query = self._query
        heads = [head for head in heads if query.evaluation or not head.evaluation]
        roots = {member.session_id: member.evaluation for member in heads if member.root_id is None}
        known = outcomes(connection, list(roots), self._high) if self._outcomes is None else self._outcomes
        taken = {member.rollout for member in heads if member.turns}
        members = [member for member in heads if member.turns or member.rollout not in taken]
        every = [member.session_id for member in members]
        ends: Mapping[str, Position] = {}
        if self._grouped:
            ends = last_places(connection, every, self._high, EXPORTED)
        if len(self._groups) == GROUPS_KEPT:
            self._groups.popitem(last=False)
        group = self._groups[key] = _Group(
            ends=ends,
            last=max(ends.values(), default=Position(0, 0)),
            turns=sum(member.turns for member in members),
            advantages=self._advantages(roots, known) if query.advantage else {},
            rollouts={member.session_id: member.rollout for member in heads},
            left_out=self._left_out(heads, ends, known),
            matches=not query.metadata or any(matches(connection, list(roots), query.metadata).values()),
        )
        return group

    def _left_out(
        self, heads: Iterable[ExportHead], ends: Collection[str], known: Mapping[str, Outcome]
    ) -> dict[str, str]:
        """By root, why its sessions give no row here."""
        reasons: dict[str, str] = {}
        if self._query.failed == "keep" or formats.needs_advantage(self._query):
            given = ((root, outcome.left_out(self._query.failed)) for root, outcome in known.items())
            reasons = {root: why for root, why in given if why is not None}
        gone = replaced(head.played for head in heads if head.root_id is None and head.session_id in ends)
        return {**reasons, **dict.fromkeys(gone, REPLACED)}

    def _advantages(self, roots: Mapping[str, bool], known: Mapping[str, Outcome]) -> dict[str, float]:
        """By root. `roots` say which of them are evaluations, which are compared with one another alone."""
        advantages: dict[str, float] = {}
        for evaluation in (False, True):
            rewards = {
                root: reward
                for root, outcome in known.items()
                if roots.get(root) == evaluation and (reward := outcome.counted(self._query.failed)) is not None
            }
            advantages |= grpo(rewards)
        return advantages

    def _parts(self, places: Sequence[ExportPage]) -> Iterator[list[ExportPage]]:
        part: list[ExportPage] = []
        turns = sessions = 0
        for place in places:
            turns, sessions = turns + place.turns, sessions + len(place.members)
            if part and (
                turns * (self.turn_bytes or FIRST_TURN_BYTES) > self._part_bytes
                or ((self._replay or self._images) and sessions > LARGE_SESSIONS)
            ):
                yield part
                part, turns, sessions = [], place.turns, len(place.members)
            part.append(place)
        if part:
            yield part


def _stored_bytes(stored: StoredSession) -> int:
    """Bytes of a session's log, frames, blobs and columns."""
    frames = (frame for both in stored.frames.values() for frame in both if frame is not None)
    shared = (blob or b"" for blob in stored.blobs.values())
    columns = (frame for written in stored.columns.values() for frame in written.values())
    return sum(len(row.data or b"") for row in stored.events) + sum(map(len, chain(frames, shared, columns)))


ROLLOUTS_KEPT = 1024
"""Rollouts whose counts are kept: the sessions of one mostly end close together."""

LOGS = 32
"""Logs in memory together."""

Stored = Mapping[str, StoredSession]

Turns = Collection[int] | None
"""The turns of a session whose content its rows need; None: all."""

Plan = Callable[[StoredSession, ExportPage], tuple[Known | None, Turns]]
"""A session's fold and the turns that its rows need, from its log; no fold where that is to be read for a reason."""

Members = Mapping[str, str]
"""Sessions of rollouts that have several, and the root of each."""


class RolloutRows:
    """How many rows a rollout has in an export, over all of its sessions, as of `high`. One of one session has as many
    as its own log says. For one of several, whose sessions lie on several pages, the logs of all of them are folded,
    without their content, once an export.

    `branches` are those that become rows, with
    `has_text` also of sessions without ids."""

    def __init__(self, database: Database, high: Position, branches: Branches | Picker, *, has_text: bool) -> None:
        self._branches = branches
        self._has_text = has_text
        self._database = database
        self._high = high
        self._counts: OrderedDict[str, int] = OrderedDict()

    def members(self, connection: Connection, stored: Stored, heads: Mapping[str, ExportHead] | None = None) -> Members:
        """All sessions of these sessions' rollouts that are not counted yet; of `heads`, those of all sessions, where
        the list of a rollout's sessions is damaged."""
        roots = sorted({member.rollout_id for member in stored.values()} - self._counts.keys())
        if heads is None:
            parts = (roots[at : at + SPAN] for at in range(0, len(roots), SPAN))
            states = ("open", "closed")
            below = [member for part in parts for member in rollouts.members(connection, part, status=states)]
        else:
            wanted = set(roots)
            below = [(head.session_id, head.rollout) for head in heads.values() if head.root_id in wanted]
        members = dict(below)
        return members | {root: root for root in members.values()}

    async def counted(self, stored: Stored, members: Members) -> dict[str, StoredSession]:
        """The same sessions; those of rollouts of several have their rollout's count."""
        if members:
            self._counts.update(await self._count(stored, members))
        events = dict(stored)
        for name, member in stored.items():
            if (count := self._counts.get(member.rollout_id)) is not None:
                events[name] = msgspec.structs.replace(member, rollout_rows=count)
        while len(self._counts) > ROLLOUTS_KEPT:
            self._counts.popitem(last=False)
        return events

    async def _count(self, stored: Stored, members: Members) -> dict[str, int]:
        """By root. A session that cannot be read has no rows."""
        counts: Counter[str] = Counter(dict.fromkeys(members.values(), 0))
        logs = {member: stored[member].events for member in members if member in stored}
        counts.update(await asyncio.to_thread(self._rows, logs, members))
        others = sorted(members.keys() - logs.keys())
        for part in (others[at : at + LOGS] for at in range(0, len(others), LOGS)):
            those = await self._database.read(partial(read_logs, session_ids=part, upto=self._high))
            counts.update(await asyncio.to_thread(self._rows, those, members))
        return dict(counts)

    def _rows(self, logs: Mapping[str, Sequence[EventRow]], members: Members) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for session_id, log in logs.items():
            try:
                session = fold(session_id, decode_events(log))
                is_left_out = session is None or (session.is_text and not self._has_text)
                rows = 0 if session is None or is_left_out else len(pick(session, self._branches))
            except Exception as error:  # noqa: BLE001 - a session's fault, whatever it is, ends no export
                self._database.unreadable.warn(session_id, told(error))
                continue
            counts[members[session_id]] += rows
        return counts


def _fits(head: ExportHead, wanted: EventFilter) -> bool:
    """A session whose head is lost belongs to every group, and to no run that is named."""
    if not head.is_known:
        return wanted.run is None
    return wanted.run in (None, head.run) and wanted.has_group(head.group_id)
