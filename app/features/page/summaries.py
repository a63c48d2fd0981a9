"""Sums up sessions for the page's lists: what each is about, what it did last, its lengths and times;
and values of their metadata as columns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

import msgspec

from app.domain.events import (
    Recorded,
    RewardAssigned,
    RolledBack,
    SessionCreated,
    SessionErased,
    SessionRestored,
    TurnAbandoned,
    TurnCommitted,
    TurnRejected,
    UnknownEvent,
)
from app.domain.restore import in_effect
from app.domain.selection import MISSING, value_of
from app.sessions.conversation import as_messages
from app.sessions.session_list import SessionList, SessionQuery
from app.sessions.tasks import SESSIONS_PER_READ, tasks_of
from app.store.content import load_frames, metadata_of
from app.store.damage import of_readable
from app.store.database import Database
from app.store.ports import Connection
from app.store.sessions import EventRow, Frames, decode_events, event_rows
from turnlog.actions import Action, actions_of, common_heads, task_text
from turnlog.replies import SessionPage
from workers import codec
from workers.codec import CorruptContent

MAX_SESSIONS = 100
"""Sessions in one request."""

KEPT_SESSIONS = 2_000
KEPT_TURNS = 200_000
"""Summaries in memory, and the live turns of all of them."""


class Summary(msgspec.Struct, frozen=True):
    """A session after event `version`. Times are seconds since the epoch.

    `task` is how the first turn's request begins, `actions` those of the newest live turn; empty where there is no turn
    or no content. `turns` counts live ones, `tokens` their tokens, each once, of which `output_tokens` were
    sampled. `ended_at`: when a turn ended last.
    """

    version: int
    task: str
    actions: Sequence[Action]
    turns: int
    tokens: int
    output_tokens: int
    finish_reason: str | None
    started_at: float
    ended_at: float | None
    reward: float | None
    components: Mapping[str, float]


class _Turn(msgspec.Struct, frozen=True, gc=False):
    tokens: int
    output_tokens: int
    finish_reason: str | None
    protocol: str


class _Known(msgspec.Struct):
    """What a log says up to event `version`, and what was read of the turns `first` and `last`."""

    version: int = 0
    turns: dict[int, _Turn] = {}
    started_at: float = 0.0
    ended_at: float | None = None
    reward: RewardAssigned | None = None
    first: int = 0
    last: int = 0
    task: str = ""
    actions: Sequence[Action] = ()

    def unread(self) -> set[int]:
        """The turns whose content is needed: the first and the newest one, unless they have been read."""
        return {min(self.turns), max(self.turns)} - {self.first, self.last} if self.turns else set()

    def summary(self) -> Summary:
        newest = self.turns.get(max(self.turns, default=0))
        return Summary(
            version=self.version,
            task=self.task if self.turns else "",
            actions=self.actions if self.turns else (),
            turns=len(self.turns),
            tokens=sum(turn.tokens for turn in self.turns.values()),
            output_tokens=sum(turn.output_tokens for turn in self.turns.values()),
            finish_reason=newest.finish_reason if newest else None,
            started_at=self.started_at,
            ended_at=self.ended_at,
            reward=None if self.reward is None else self.reward.reward,
            components={} if self.reward is None else self.reward.components,
        )


class Summaries:
    """Keeps what it has read: of a session that changes, only the new events and the newest turn are read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, _Known] = {}

    async def of(self, session_ids: Sequence[str]) -> dict[str, Summary]:
        """By session, without unknown sessions and logs that cannot be read. Raises StoreUnavailable."""
        known = {session_id: self._known.get(session_id, _Known()) for session_id in dict.fromkeys(session_ids)}

        def rows(connection: Connection, ids: Sequence[str]) -> dict[str, list[EventRow]]:
            return {session_id: _rows(connection, session_id, known[session_id].version) for session_id in ids}

        new = await self._database.read(lambda connection: of_readable(connection, list(known), rows))
        known = await asyncio.to_thread(_folded, known, new)
        unread = {session_id: numbers for session_id, one in known.items() if (numbers := one.unread())}

        def frames(connection: Connection, ids: Sequence[str]) -> dict[str, Frames]:
            return {one: load_frames(connection, one, sorted(unread[one]), tokens=False) for one in ids}

        for at in range(0, len(unread), SESSIONS_PER_READ):
            part = list(unread)[at : at + SESSIONS_PER_READ]
            content = await self._database.read(
                lambda connection: of_readable(connection, part, frames)  # noqa: B023
            )
            await asyncio.to_thread(_read, {one: known[one] for one in part}, content)
        for session_id, one in known.items():  # the last ones that were asked for
            self._known.pop(session_id, None)
            self._known[session_id] = one
        turns = sum(len(one.turns) for one in self._known.values())
        while self._known and (len(self._known) > KEPT_SESSIONS or turns > KEPT_TURNS):
            oldest = self._known.pop(next(iter(self._known)))
            turns -= len(oldest.turns)
        return {session_id: one.summary() for session_id, one in known.items()}


def _rows(connection: Connection, session_id: str, after: int) -> list[EventRow]:
    """The new events, all of them where a restore took some back."""
    rows = event_rows(connection, session_id, after=after)
    if after and any(row.type == SessionRestored.__name__ for row in rows):
        return event_rows(connection, session_id)
    return rows


def _folded(known: Mapping[str, _Known], new: Mapping[str, Sequence[EventRow]]) -> dict[str, _Known]:
    """Of each session the next state; what was known before is left as it is, for requests that run meanwhile."""
    folded: dict[str, _Known] = {}
    for session_id, rows in new.items():
        try:
            log = decode_events(rows)
        except UnknownEvent:
            continue
        state = known[session_id]
        if log:
            state = _after(state if log[0].seq > 1 else _Known(), in_effect(log))
        if state.version:
            folded[session_id] = state
    return folded


def _after(known: _Known, log: Sequence[Recorded]) -> _Known:
    state = msgspec.structs.replace(known, turns=dict(known.turns))
    for recorded in log:
        match event := recorded.event:
            case SessionCreated():
                state.started_at = recorded.at
            case TurnCommitted():
                state.turns[event.turn] = _Turn(
                    tokens=event.suffix_tokens + event.output_tokens,
                    output_tokens=event.output_tokens,
                    finish_reason=event.finish_reason,
                    protocol=event.protocol,
                )
                state.ended_at = recorded.at
            case RolledBack():
                for turn in event.discarded:
                    state.turns.pop(turn, None)
            case TurnRejected() | TurnAbandoned():
                state.ended_at = recorded.at
            case RewardAssigned() if event.turn is None:
                state.reward = event
            case SessionErased():
                state.task, state.actions = "", ()
                if state.reward is not None:
                    state.reward = RewardAssigned(state.reward.reward)
        state.version = recorded.seq
    return state


def _read(known: Mapping[str, _Known], content: Mapping[str, Frames]) -> None:
    for session_id, state in known.items():
        first, last = min(state.turns), max(state.turns)
        frames = content.get(session_id, {})
        if first != state.first:
            # Without the reply, which is no task.
            state.first, state.task = first, task_text(_messages(state.turns[first], frames.get(first))[:-1])
        if last != state.last:
            newest = _messages(state.turns[last], frames.get(last))[-1:]
            state.last, state.actions = last, actions_of(newest)


def _messages(turn: _Turn, frame: tuple[bytes | None, bytes | None] | None) -> list[object]:
    """A turn's own messages; none where they are erased or damaged."""
    try:
        contents = as_messages(turn.protocol, codec.unpack_messages(None if frame is None else frame[1]))
        return [msgspec.json.decode(message) for message in contents]
    except (CorruptContent, msgspec.DecodeError):
        return []


COMPARED = 24
"""Sessions of a page whose tasks are compared, spread over it."""

MAX_COLUMNS = 6

MAX_VALUE = 200
"""Characters of one value; a longer one is cut."""


class ListedSessions(SessionPage):
    """A page of the list. `metadata`: for each session that has any of the columns, its values as text, by column.
    `heads`: how many of the tasks begin, judged by some."""

    heads: Sequence[str]
    metadata: Mapping[str, Mapping[str, str]]


async def listed(
    database: Database, sessions: SessionList, query: SessionQuery, cursor: str | None, limit: int, columns: str | None
) -> ListedSessions:
    """A page of the list with the metadata named by `columns`, a comma between two.

    A column is a key, with dots into objects. Raises InvalidRequest for an invalid cursor, StoreUnavailable.
    """
    found = await sessions.page(query, cursor, limit)
    ids = [row["session_id"] for row in found["sessions"]]
    keys = [key.strip() for key in (columns or "").split(",") if key.strip()][:MAX_COLUMNS]
    stored = await database.read(lambda c: metadata_of(c, ids)) if keys else {}
    values = await asyncio.to_thread(lambda: {name: _values_of(raw, keys) for name, raw in stored.items()})
    tasks = await tasks_of(database, ids[:: math.ceil(len(ids) / COMPARED) or 1])
    given = {name: given for name, given in values.items() if given}
    return {**found, "metadata": given, "heads": common_heads(tasks.values())}


def _values_of(raw: bytes, keys: Sequence[str]) -> dict[str, str]:
    metadata, values = msgspec.json.decode(raw), {}
    for key in keys:
        value = value_of(metadata, key)
        if value is None or value is MISSING:
            continue
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        values[key] = text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
    return values
