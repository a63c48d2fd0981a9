"""What the cache knows of one session: its fold, and the messages, tokens and requests that the next one repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from app.domain.events import BlobsTombstoned, Event, Recorded, SessionErased, SessionRestored, TurnCommitted
from app.domain.fold import apply
from app.domain.known_body import KnownBodies
from app.domain.retention import ChunkUses
from app.domain.session import Session
from app.domain.tree import TreeIndex
from app.sessions.prefix_buffer import PrefixBuffers

ENTRY_BYTES = 2048
TURN_BYTES = 768
CHUNK_BYTES = 256
"""Approximate memory in bytes of an entry, of each of its turns, and of each chunk that its payloads name."""


class StoredContent:
    """Frames of turns that were read with the log: `wires` for the messages, `facts` for the tokens. They are dropped
    when they are first asked for: the next turn needs them once, and finds its messages and tokens in memory then."""

    def __init__(self) -> None:
        self.wires: dict[int, bytes | None] = {}
        self.facts: dict[int, bytes | None] = {}

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        parts = (self.wires, self.facts)
        return sum(len(frame) for part in parts if part for frame in part.values() if frame is not None)


class CacheEntry:
    """A session's state, and its messages, tokens and newest requests as far as they are in memory.

    `newest_seen` is the number of the newest event that this process has appended. `committing` is held while a turn of
    a tree is committed here, so that this process's commits do not make each other stale. `pinned_upto` is the last
    event that a checkpoint has of the session, as far as this process has heard; 0 for none. `unread` is the stored
    content that was read with the log and that no turn has asked for yet.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.index = TreeIndex(session.turns)
        self.uses = ChunkUses(session.every_payload.values())
        self.pinned_upto = 0
        self.messages = PrefixBuffers()
        self.tokens = PrefixBuffers()
        self.bodies = KnownBodies()
        self.keyed = {turn.retry_key: turn.number for turn in session.turns if turn.retry_key is not None}
        self.newest_seen = 0
        self.unread = StoredContent()
        self._every_index: TreeIndex | None = None
        self.committing = asyncio.Lock()

    @property
    def every_index(self) -> TreeIndex:
        """As `index`, with the turns that are undone too."""
        if self._every_index is None:
            self._every_index = TreeIndex(self.session.every_turn)
        return self._every_index

    @property
    def is_behind(self) -> bool:
        """Were events appended that follow others which this process has not seen?"""
        return self.session.version < self.newest_seen

    @property
    def size(self) -> int:
        known = self.messages.size + self.tokens.size + self.bodies.size + self.unread.size
        turns = len(self.session.turns) + len(self.session.undone)
        return ENTRY_BYTES + TURN_BYTES * turns + CHUNK_BYTES * self.uses.references + known

    def advance(self, events: Iterable[Recorded]) -> bool:
        """Apply new events; False if they do not follow the entry's version, or a restore has changed what was known:
        the entry is out of date."""
        for recorded in events:
            if recorded.seq != self.session.version + 1 or isinstance(recorded.event, SessionRestored):
                return False
            before, self.session = self.session, apply(self.session, recorded, self.session.session_id)
            self._index(before, recorded.event)
        return True

    def _index(self, before: Session, event: Event) -> None:
        match event:
            case TurnCommitted(turn=number):
                turn = self.session.turn(number)
                self.index.add(turn)
                if self._every_index is not None:
                    self._every_index.add(turn)
                self.uses.add(self.session.payloads.get(number, ()))
                if turn.retry_key is not None:
                    self.keyed[turn.retry_key] = number
            case BlobsTombstoned(turns=numbers):
                for number in numbers:
                    self.uses.remove(before.every_payload.get(number, ()))
            case SessionErased():
                self.uses = ChunkUses()
