"""A session's state, which `fold` makes of its events.

A process keeps `Session` between requests, and a snapshot stores it. It grows by a few hundred bytes a turn, never by
the prompt, and can be dropped at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from app.domain.events import (
    BlobRef,
    ChunkRef,
    ForkRef,
    History,
    ReplayKind,
    SessionConfig,
)
from app.domain.turns import Turn, Turns
from workers.codec import describe

EMPTY = Turns()

Status = Literal["open", "closed", "erased", "undone"]
"""`undone`: the session was created after the checkpoint to which the store was taken back."""


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A readable replay payload: rows [start, stop) in consecutive chunks; see `PayloadRef`."""

    kind: ReplayKind
    start: int
    stop: int
    sent: int
    shape: tuple[int, ...]
    chunks: tuple[ChunkRef, ...]

    @property
    def row_ids(self) -> int:
        return math.prod(self.shape)


class OpenTurn(msgspec.Struct, frozen=True, array_like=True):
    """A claim: the turn that is in flight."""

    turn: int
    parent: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None
    adapter: str | None = None
    agent_id: str | None = None


class Affinity(msgspec.Struct, frozen=True, array_like=True):
    """The engine that has the session's prefix; `control` names the affinity where a client asked for it."""

    engine: str
    control: str | None = None


class AssignedReward(msgspec.Struct, frozen=True, array_like=True):
    reward: float
    components: dict[str, float]


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The state after event `version`.

    `turns` are the committed turns: a tree, of which a linear session has one live path. `open_turns` are the turns in
    flight, by number; `last_turn` is the highest number given out, `branches` counts the branches. `last_event_at` is
    when the last event was written: with `version` it distinguishes this log from another with as many events. `blobs`
    are the per-session blobs that a turn may refer to again. `payloads` are the replay payloads, by turn, that have not
    been tombstoned. `reward` is the session's own, or, where `has_roots_reward`, that of the root of its rollout.
    `fork`: it began as a copy. `deliveries` are what is written down of replies that were not delivered, by turn: True
    once such a reply was given to a retry. `history` says who may attach where; None until the first turn decides.
    `is_reclaimed`: it was closed because it was idle. `undone` are the turns that a restore has undone, and
    `undone_payloads` their replay payloads that have not been tombstoned; they are in none of the other fields. `note`
    and `tags` are what a person wrote on it. `images` are the blobs of its images by their SHA-256; `blobs` has none
    of them.
    """

    session_id: str
    version: int
    status: Status
    config: SessionConfig
    body_hash: str
    created_at: float
    last_event_at: float
    metadata: BlobRef | None = None
    turns: Turns = EMPTY
    open_turns: dict[int, OpenTurn] = {}
    blobs: tuple[BlobRef, ...] = ()
    blob_count: int = 0
    reward: AssignedReward | None = None
    turn_rewards: dict[int, AssignedReward] = {}
    closed_at: float | None = None
    payloads: dict[int, tuple[Payload, ...]] = {}
    affinity: Affinity | None = None
    has_roots_reward: bool = False
    fork: ForkRef | None = None
    last_turn: int = 0
    branches: int = 0
    deliveries: dict[int, bool] = {}
    history: History | None = "linear"
    is_reclaimed: bool = False
    undone: Turns = EMPTY
    undone_payloads: dict[int, tuple[Payload, ...]] = {}
    note: str | None = None
    tags: tuple[str, ...] = ()
    images: dict[str, int] = {}

    @property
    def context_turns(self) -> int:
        """How many of the first turns were copied from another session, and are in that one's loss alone."""
        return 0 if self.fork is None else self.fork.context_turns

    @property
    def open_turn(self) -> OpenTurn | None:
        """The turn in flight of a linear session, which has at most one."""
        return next(iter(self.open_turns.values()), None)

    @property
    def is_tree(self) -> bool:
        return self.history == "tree"

    @property
    def leaf(self) -> Turn | None:
        """The newest turn: in a linear session the end of its live path, in a tree that of its main branch."""
        return self.turns.newest

    @property
    def path(self) -> tuple[int, ...]:
        """The turns from the root to the leaf: a linear session's live turns."""
        leaf = self.leaf
        return () if leaf is None else tuple(self.line(leaf.number))

    @property
    def every_turn(self) -> list[Turn]:
        """The committed turns, those that are undone too, in the order of their commits."""
        return sorted((*self.turns, *self.undone), key=lambda turn: turn.seq) if self.undone else list(self.turns)

    @property
    def every_payload(self) -> dict[int, tuple[Payload, ...]]:
        """The readable replay payloads, by turn, those of turns that are undone too."""
        return {**self.payloads, **self.undone_payloads} if self.undone_payloads else self.payloads

    @property
    def with_undone(self) -> Session:
        """The state as if nothing were undone."""
        every = {"turns": Turns(self.every_turn), "payloads": self.every_payload}
        return msgspec.structs.replace(self, **every, undone=EMPTY, undone_payloads={}) if self.undone else self

    def turn(self, number: int) -> Turn:
        """A committed turn. Raises KeyError."""
        return self.turns[number]

    def payload(self, number: int, kind: ReplayKind) -> Payload | None:
        """Turn `number`'s payload of a kind; None where there was none or it has been tombstoned."""
        return next((payload for payload in self.payloads.get(number, ()) if payload.kind == kind), None)

    def line(self, number: int) -> list[int]:
        """The turns from the root to turn `number`."""
        return [turn.number for turn in self._chain(number, lambda turn: turn.parent > 0)]

    def message_chain(self, number: int) -> list[Turn]:
        """The turns whose messages make up the history after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.base_messages > 0)

    def token_chain(self, number: int) -> list[Turn]:
        """The turns whose tokens make up the sequence after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.base_tokens > 0)

    def _chain(self, number: int, continues: Callable[[Turn], bool]) -> list[Turn]:
        chain = [self.turn(number)]
        while continues(chain[-1]):
            chain.append(self.turn(chain[-1].parent))
        chain.reverse()
        return chain


def encode_session(session: Session) -> bytes:
    """The state as a snapshot stores it."""
    return msgspec.msgpack.encode(session, enc_hook=list)


def decode_session(data: bytes) -> Session:
    """Raises MsgspecError."""
    return msgspec.msgpack.decode(data, type=Session, dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    return kind(msgspec.convert(value, list[Turn]))


describe(Session, list[Turn])
