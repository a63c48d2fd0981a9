"""How many rows a rollout has in an export, over all of its sessions.

A rollout of one session has as many as its own log says. For a rollout of several, whose sessions lie on several pages,
the logs of all of them are folded, without their content, once an export.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from app.domain.branches import Branches, Picker, pick
from app.domain.session import fold
from app.export.faults import told
from app.store import rollouts
from app.store.content import StoredSession, read_logs
from app.store.damage import SPAN
from app.store.feed import Position
from app.store.ports import Connection, Database
from app.store.sessions import EventRow, ExportHead, decode_events

KEPT = 1024
"""Rollouts whose counts are kept: the sessions of one mostly end close together."""

LOGS = 32
"""Logs in memory together."""

Stored = Mapping[str, StoredSession]

Members = Mapping[str, str]
"""Sessions of rollouts that have several, and the root of each."""


class RolloutRows:
    """Counts as of `high`, of rollouts that have several sessions; `branches` are those that become rows, with
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
        while len(self._counts) > KEPT:
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
