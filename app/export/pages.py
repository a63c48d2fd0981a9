"""Finds what an export reads next: sessions in the order of their last change, or whole groups of them.

A page is found before any content is read: the sessions of its rows, and their advantages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar

import msgspec

from app.domain.branches import Branches, Picker
from app.domain.events import EXPORTED
from app.domain.groups import grpo
from app.export import formats
from app.export.links import sign
from app.export.query import ExportQuery
from app.export.rollout_rows import Members, RolloutRows
from app.store.content import StoredSession, fetch_objects, read_sessions, rewards
from app.store.damage import BrokenRow, PageDamaged, attempt
from app.store.engine import Database
from app.store.feed import END, EventFilter, Position, changed_sessions, last_places
from app.store.ports import Connection
from app.store.sessions import ExportHead, every_head, export_heads, group_members

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

GROUPS_KEPT = 256
"""Groups kept in memory during an export: a group's sessions usually end close together."""


class ExportPage(msgspec.Struct, frozen=True):
    """A session's place in an export, or its group's: the sessions to read for it, with about so many turns."""

    session_id: str
    at: Position
    members: Sequence[str]
    turns: int
    is_group: bool
    advantages: Mapping[str, float]


class _Group(msgspec.Struct, frozen=True):
    """The position of each session's last exported event; sessions without one are left out.

    So are sessions without a turn whose rollout has turns elsewhere. `advantages` are by root; `rollouts` give each
    session's root.
    """

    ends: Mapping[str, Position]
    last: Position
    turns: int
    advantages: Mapping[str, float]
    rollouts: Mapping[str, str]

    def has_rows_of(self, rollout: str) -> bool:
        return any(self.rollouts[session_id] == rollout for session_id in self.ends)

    def advantages_of(self, session_ids: Iterable[str]) -> dict[str, float]:
        """The advantage of a rollout, which all its sessions share."""
        rollouts = ((member, self.rollouts.get(member, member)) for member in session_ids)
        return {member: self.advantages[root] for member, root in rollouts if root in self.advantages}


class ExportPages:
    """The pages up to `high`. `grouped`: a row contains a whole group; `advantages`: each session needs one.

    `images`, `columns`: read these too. A group stands at the position of its last session, even if that session was
    erased since. `turn_bytes`: the stored bytes of a turn, on average, in what was read last.
    """

    def __init__(
        self,
        database: Database,
        high: Position,
        *,
        grouped: bool,
        advantages: bool,
        replay: bool | Literal["urls"],
        url_s: int,
        images: bool,
        columns: Sequence[str],
        branches: Branches | Picker,
        has_text: bool = False,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._database = database
        self._part_bytes = part_bytes
        self._high = high
        self._grouped = grouped
        self._advantages = advantages
        self._replay = bool(replay)
        self._images = images
        self._content: dict[str, Any] = {"replay": bool(replay), "images": images, "columns": columns}
        self._url_s = url_s if replay == "urls" else None
        self._rollout_rows = RolloutRows(database, high, branches, has_text=has_text)
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._heads: dict[str, ExportHead] | None = None
        self._order: list[tuple[str, Position]] | None = None
        self.turn_bytes: int | None = None

    @classmethod
    def of_query(
        cls,
        database: Database,
        high: Position,
        query: ExportQuery,
        branches: Branches | Picker,
        part_bytes: int = PART_BYTES,
    ) -> ExportPages:
        """The pages that a query asks for."""
        return cls(
            database,
            high,
            grouped=formats.takes_groups(query.shape),
            advantages=query.advantage is not None,
            replay=query.replay,
            url_s=query.url_s,
            images=query.images == "inline",
            columns=query.column_names,
            branches=branches,
            has_text=formats.takes_text(query.format),
            part_bytes=part_bytes,
        )

    async def following(
        self,
        after: Position,
        session_id: str | None,
        group_id: str | None,
        types: Sequence[str],
        name: str | None = None,
        generation: int | None = None,
    ) -> tuple[Iterator[list[ExportPage]], Position | None]:
        """The next pages, in parts that may be in memory together, and the last position examined; None at the end.
        Around damage there may be sessions of other names.

        How large the turns of one part were decides how many turns the next one has.
        """
        wanted = EventFilter(tuple(types), session_id, group_id, name, generation)

        def read(connection: Connection) -> tuple[list[ExportPage], Position | None]:
            if self._heads is not None:
                changed = self._changed_of_all(connection, self._heads, wanted, after)
            elif after > self._high:
                raise BrokenRow("a place behind all events: its session is on a damaged page")
            else:
                changed = changed_sessions(connection, wanted, after=after, upto=self._high, limit=PAGE)
                if not _in_order([after, *(place for _, place in changed)]):
                    raise BrokenRow("places out of order")
            heads = self._heads_of(connection, [changed_id for changed_id, _ in changed])
            return self._places(connection, heads, changed, asked_for=session_id is not None)

        places, last = await self._read(read)
        return self._parts(places), last

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
        self, connection: Connection, heads: Mapping[str, ExportHead], wanted: EventFilter, after: Position
    ) -> list[tuple[str, Position]]:
        """As `changed_sessions`, of sessions whose heads are given, by their own events."""
        if self._order is None:
            # A session whose group is not known belongs to every group.
            in_group = [
                head.session_id
                for head in heads.values()
                if wanted.group_id is None or not head.is_known or head.group_id == wanted.group_id
            ]
            ids = in_group if wanted.session_id is None else [wanted.session_id]
            places = last_places(connection, ids, self._high, wanted.types)
            self._order = sorted(places.items(), key=lambda place: place[1])
        at = bisect_right(self._order, after, key=lambda place: place[1])
        return self._order[at : at + PAGE]

    async def of(self, session_ids: Sequence[str]) -> list[ExportPage]:
        """The pages of these sessions, each with its group if rows contain groups."""

        def read(connection: Connection) -> list[ExportPage]:
            heads = self._heads_of(connection, session_ids)
            # Of a session without a head it is not known, around damage, whether it is there.
            changed = [(name, END) for name in session_ids if self._heads is not None or name in heads]
            return self._places(connection, heads, changed, asked_for=True)[0]

        return await self._read(read)

    async def read(self, part: Sequence[ExportPage]) -> dict[str, StoredSession]:
        """The stored content of these pages' sessions; a session whose head is lost gives nothing."""
        every = sorted({member for place in part for member in place.members})

        def read(connection: Connection) -> tuple[dict[str, StoredSession], Members]:
            sessions = read_sessions(connection, every, self._high, **self._content)
            return sessions, self._rollout_rows.members(connection, sessions, self._heads)

        sessions, members = await self._read(read)
        if self._url_s is None:
            await fetch_objects(self._database, sessions.values())
        else:
            urls = await sign(self._database, sessions.values(), self._url_s)
            sessions = {
                session_id: msgspec.structs.replace(stored, urls=urls) for session_id, stored in sessions.items()
            }
        stored = {session_id: sessions.get(session_id) or StoredSession(session_id, "", None) for session_id in every}
        self._measure(stored.values())
        return await self._rollout_rows.counted(stored, members)

    def _places(
        self,
        connection: Connection,
        heads: Mapping[str, ExportHead],
        changed: Sequence[tuple[str, Position]],
        *,
        asked_for: bool,
    ) -> tuple[list[ExportPage], Position | None]:
        known = ((heads.get(session_id, ExportHead(session_id, None, 0)), at) for session_id, at in changed)
        places = [self._place(connection, head, at, asked_for) for head, at in known]
        return [place for place in places if place is not None], changed[-1][1] if changed else None

    def _heads_of(self, connection: Connection, session_ids: Sequence[str]) -> Mapping[str, ExportHead]:
        return export_heads(connection, session_ids) if self._heads is None else self._heads

    def _place(self, connection: Connection, head: ExportHead, at: Position, asked_for: bool) -> ExportPage | None:
        """None if the session's group comes later. `asked_for`: the group is given here, whatever its last position."""
        alone = ExportPage(head.session_id, at, [head.session_id], head.turns, self._grouped, {})
        if head.group_id is None or not (self._grouped or self._advantages):
            return alone
        group = self._group(connection, head.group_id)
        if not self._grouped:
            return msgspec.structs.replace(alone, advantages=group.advantages_of([head.session_id]))
        if head.session_id not in group.ends and not (asked_for and group.has_rows_of(head.rollout)):
            return msgspec.structs.replace(alone, is_group=False)
        if group.last > at and not asked_for:
            return None
        members = sorted(group.ends)
        return ExportPage(head.session_id, at, members, group.turns, True, group.advantages_of(members))

    def _group(self, connection: Connection, group_id: str) -> _Group:
        known = self._groups.get(group_id)
        if known is None:
            known = self._groups[group_id] = self._looked_up(connection, group_id)
            if len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)
        return known

    def _looked_up(self, connection: Connection, group_id: str) -> _Group:
        if self._heads is None:
            heads = group_members(connection, group_id)
        else:
            heads = [head for head in self._heads.values() if head.group_id == group_id]
        roots = [member.session_id for member in heads if member.root_id is None]
        taken = {member.rollout for member in heads if member.turns}
        members = [member for member in heads if member.turns or member.rollout not in taken]
        every = [member.session_id for member in members]
        ends: Mapping[str, Position] = {}
        if self._grouped:
            ends = last_places(connection, every, self._high, EXPORTED)
        return _Group(
            ends=ends,
            last=max(ends.values(), default=Position(0, 0)),
            turns=sum(member.turns for member in members),
            advantages=grpo(rewards(connection, roots, self._high)) if self._advantages else {},
            rollouts={member.session_id: member.rollout for member in heads},
        )

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

    def _measure(self, read: Collection[StoredSession]) -> None:
        sizes = [stored_bytes(stored) for stored in read]
        turns = sum(len(stored.frames) for stored in read)
        if turns:
            self.turn_bytes = max(sum(sizes) // turns, 1)


def stored_bytes(stored: StoredSession) -> int:
    """Bytes of a session's log, frames, blobs and columns."""
    frames = (frame for both in stored.frames.values() for frame in both if frame is not None)
    shared = (blob or b"" for blob in stored.blobs.values())
    columns = (frame for written in stored.columns.values() for frame in written.values())
    return sum(len(row.data or b"") for row in stored.events) + sum(map(len, chain(frames, shared, columns)))


def _in_order(places: Sequence[Position]) -> bool:
    """The positions must ascend: those of a damaged index may form a circle."""
    return all(before < place for before, place in pairwise(places))
