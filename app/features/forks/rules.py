"""Decides the log of a fork: a new session that begins after a turn of another one.

The turns from the root to that turn are copied in order and renumbered, as are their blobs. A copied turn's fence is
its own `seq`, so no later claim can have it; the keys of its replay chunks use that fence. From then on a fork is an
ordinary session, except that its copied turns may be excluded from the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from app.domain import retention
from app.domain.events import (
    AnnotationWritten,
    BlobRef,
    ChunkKey,
    ChunkRef,
    Event,
    ForkRef,
    Recorded,
    SessionConfig,
    SessionCreated,
    TurnCommitted,
    UnknownEvent,
)
from app.domain.session import Session, apply, fold
from app.errors import NotFound, SessionClosed


class Forked(msgspec.Struct, frozen=True):
    """The log of a fork, and the places of its content in the source.

    `turns`, `blobs` and `chunks` map the fork's numbers and keys to the source's; `chunks` are those that a readable
    payload needs. `columns` maps the fork's events that wrote a column to the source's.
    """

    events: Sequence[Event]
    turns: Mapping[int, int]
    blobs: Mapping[int, int]
    chunks: Mapping[ChunkKey, ChunkKey]
    columns: Mapping[int, int]

    @property
    def created(self) -> SessionCreated:
        first = self.events[0]
        assert isinstance(first, SessionCreated)
        return first

    @property
    def copied(self) -> list[TurnCommitted]:
        return [event for event in self.events if isinstance(event, TurnCommitted)]

    @property
    def freed(self) -> Iterator[tuple[str, ChunkRef]]:
        """The copied turns' chunks, with their kinds, that no readable payload needs."""
        for event in self.copied:
            for payload in event.payloads:
                for chunk in payload.chunks:
                    if chunk.key not in self.chunks:
                        yield payload.kind, chunk


def config_of_fork(source: Session, group_id: str | None) -> SessionConfig:
    """The fork's configuration is the source's. A fork is a rollout of its own, so it has no parent and no attempt
    number, and says nothing of its group's size."""
    own = {"group_id": group_id or source.config.group_id, "group_size": None, "attempt": None, "parent": None}
    return msgspec.structs.replace(source.config, **own, history=source.history)


def fork(
    source: Session,
    log: Sequence[Recorded],
    turn: int,
    *,
    config: SessionConfig,
    body_hash: str,
    metadata: BlobRef | None,
    loss: bool,
) -> Forked:
    """Fork `source` after its committed turn `turn`, live or rolled back; `log` is the source's whole log.

    `metadata` None: the source's. Raises SessionClosed (erased), NotFound (no such turn), UnknownEvent (a turn refers
    to content that its chain does not have).
    """
    _require_turn(source, turn)
    events = {one.event.turn: one.event for one in log if isinstance(one.event, TurnCommitted)}
    chain = [events[number] for number in source.line(turn)]
    ref = ForkRef(source.session_id, turn, len(chain), loss)
    own = metadata or source.metadata
    copies = _Copies(chain, _blobs(log), 0 if own is None else 1, is_tree=source.is_tree)
    created = SessionCreated(config, body_hash, own, ref)
    new: list[Event] = [created, *(copies.of(event) for event in chain)]
    columns: dict[int, int] = {}
    for seq, annotated in _annotations(source, log, {event.turn: place for place, event in enumerate(chain, 1)}):
        new.append(annotated)
        if annotated.column is not None:
            columns[len(new)] = seq
    session = fold(source.session_id, (Recorded(seq, 0.0, event) for seq, event in enumerate(new, 1)))
    assert session is not None
    lost = [place for place, event in enumerate(chain, 1) if event.payloads and event.turn not in source.payloads]
    kept = source.payloads
    partly = [place for place, event in enumerate(chain, 1) if any(one.is_own for one in kept.get(event.turn, ()))]
    tombstoned = retention.tombstones_of_fork(session, lost, partly)
    if tombstoned is not None:
        new.append(tombstoned)
        session = apply(session, Recorded(len(new), 0.0, tombstoned), source.session_id)
    back = {new_fence: old for old, new_fence in copies.fences.items()}
    needed = retention.chunk_keys(payload for live in session.payloads.values() for payload in live)
    blobs = {new_number: old for old, new_number in copies.blobs.items()}
    if metadata is None and source.metadata is not None:
        blobs[source.metadata.number] = source.metadata.number
    return Forked(
        events=new,
        turns={place: event.turn for place, event in enumerate(chain, 1)},
        blobs=blobs,
        chunks={key: (back[key[0]], key[1]) for key in sorted(needed)},
        columns=columns,
    )


def _annotations(
    source: Session, log: Iterable[Recorded], places: Mapping[int, int]
) -> Iterator[tuple[int, AnnotationWritten]]:
    """What is said of the copied turns, as the fork says it, each with the source's event."""
    said = {one.seq for turn in places for one in source.annotations.get(turn, {}).values()}
    for recorded in log if said else ():
        event = recorded.event
        if recorded.seq in said and isinstance(event, AnnotationWritten) and event.turn is not None:
            yield recorded.seq, msgspec.structs.replace(event, turn=places[event.turn])


def _require_turn(source: Session, turn: int) -> None:
    if source.status == "erased":
        raise SessionClosed(f"session {source.session_id} is erased")
    if turn not in source.turns:
        raise NotFound(f"turn {turn} is not committed in session {source.session_id}")


def _blobs(log: Iterable[Recorded]) -> dict[int, BlobRef]:
    """All blobs of the session's turns, by number."""
    events = (one.event for one in log if isinstance(one.event, TurnCommitted))
    return {ref.number: ref for event in events for ref in event.new_blobs}


class _Copies:
    """Makes the copies of a chain of turns. `fences` and `blobs` map the source's numbers to the new ones."""

    def __init__(
        self, chain: Sequence[TurnCommitted], known: Mapping[int, BlobRef], first_blob: int, *, is_tree: bool
    ) -> None:
        self._is_tree = is_tree
        self._branch = -1
        self._numbers = {0: 0} | {event.turn: place for place, event in enumerate(chain, 1)}
        self._known = known
        self._next_blob = first_blob
        self.fences = {event.fence: place + 1 for place, event in enumerate(chain, 1)}
        self.blobs: dict[int, int] = {}

    def of(self, event: TurnCommitted) -> TurnCommitted:
        """A copied turn. It has no retry key and an empty body hash: no client sent its request to the fork, so no
        retry can match it. Its branch follows from the chain alone: the fork has none of the others."""
        new: list[BlobRef] = []
        self._branch += not event.continues_tokens
        drifts = not event.continues_tokens and event.base_messages > 0
        place = {"segment": self._branch, "segment_cause": "drift" if drifts else None} if self._is_tree else {}
        return msgspec.structs.replace(
            event,
            turn=self._numbers[event.turn],
            parent=self._numbers[event.parent],
            fence=self.fences[event.fence],
            params=self._blob(event.params, new),
            tools=None if event.tools is None else self._blob(event.tools, new),
            echo=None if event.echo is None else self._blob(event.echo, new),
            images=tuple(self._blob(number, new) for number in event.images),
            new_blobs=tuple(new),
            retry_key=None,
            body_hash="",
            branch=None,
            branch_cause=None,
            carries=None,
            **place,
            payloads=tuple(
                msgspec.structs.replace(payload, chunks=tuple(map(self._chunk, payload.chunks)))
                for payload in event.payloads
            ),
        )

    def _blob(self, number: int, new: list[BlobRef]) -> int:
        """The fork's number of a blob; the first turn that refers to it brings it. Raises UnknownEvent."""
        if number not in self.blobs:
            if number not in self._known:
                raise UnknownEvent(f"a turn names blob {number}, which the log does not have")
            self.blobs[number] = self._next_blob
            new.append(msgspec.structs.replace(self._known[number], number=self._next_blob))
            self._next_blob += 1
        return self.blobs[number]

    def _chunk(self, chunk: ChunkRef) -> ChunkRef:
        """Raises UnknownEvent."""
        if chunk.fence not in self.fences:
            raise UnknownEvent(f"a turn brought chunk {chunk.number} of fence {chunk.fence}, which is not its line's")
        return msgspec.structs.replace(chunk, fence=self.fences[chunk.fence])
