"""What was said of sessions and turns, and what the log must have of it: each acknowledged word in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection

from app.domain.events import AnnotationWritten, Event, Recorded, RewardAssigned, SessionCreated
from app.domain.session import fold
from app.store.sessions import load_events

Word = AnnotationWritten | RewardAssigned


class Told(msgspec.Struct, frozen=True):
    """A word that was acknowledged as the event `seq`."""

    session_id: str
    word: Word
    seq: int
    asked_at: float
    sent_at: float


class Said:
    """`sent` are the words that somebody tried to say, by session."""

    def __init__(self) -> None:
        self.sent: dict[str, list[Word]] = {}
        self.told: list[Told] = []

    def problems(self, connection: Connection) -> Iterator[str]:
        """Of all sessions of which something was said, and of their forks."""
        for session_id in sorted({*self.sent, *(told.session_id for told in self.told)}):
            log = load_events(connection, session_id)
            session = fold(session_id, log)
            if session is None:
                yield f"{session_id}: something was said of it, and it is not there"
                continue
            is_erased = session.status == "erased"
            told = [one for one in self.told if one.session_id == session_id]
            yield from (f"{session_id}: {problem}" for problem in _told(log, told, is_erased=is_erased))
            if not is_erased:
                yield from (f"{session_id}: {problem}" for problem in self._unsaid(session_id, log))

    def _unsaid(self, session_id: str, log: Sequence[Recorded]) -> Iterator[str]:
        created = log[0].event
        is_fork = isinstance(created, SessionCreated) and created.fork is not None
        sent = self.sent.get(session_id, [])
        for recorded in log:
            if is_fork and recorded.at == log[0].at:
                continue  # it came with the turns
            match recorded.event:
                case AnnotationWritten(erased=False) as word if word not in sent:
                    yield f"event {recorded.seq} says what nobody said: {word}"
                case RewardAssigned(of_root=False, components_erased=False) as word if (
                    _has_more(word) and replace(word, restored=False) not in sent
                ):
                    yield f"event {recorded.seq} assigns what nobody sent: {word}"


def _has_more(word: RewardAssigned) -> bool:
    """Other clients assign plain numbers."""
    return bool(word.components) or word.turn is not None


def _told(log: Sequence[Recorded], told: Sequence[Told], *, is_erased: bool) -> Iterator[str]:
    for one in told:
        there = log[one.seq - 1].event if one.seq <= len(log) else None
        if there != one.word and not ((is_erased or _lacks_text(there)) and _bare(there) == _bare(one.word)):
            yield f"event {one.seq} was acknowledged as {one.word}, and is {there}"
        for later in told:
            if one.sent_at < later.asked_at and one.seq >= later.seq:
                yield f"event {later.seq} was asked for after event {one.seq} was there"


def _lacks_text(event: Event | None) -> bool:
    """An erasure has begun with it."""
    match event:
        case AnnotationWritten(erased=True) | RewardAssigned(components_erased=True):
            return True
    return False


def _bare(event: Event | None) -> Event | None:
    """As an erasure leaves it."""
    match event:
        case AnnotationWritten():
            return msgspec.structs.replace(event, value=None, writer=None, erased=False)
        case RewardAssigned():
            return msgspec.structs.replace(event, components={}, components_erased=False)
    return event
