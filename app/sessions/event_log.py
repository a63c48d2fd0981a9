"""A session's log for clients: its events, optionally followed live, and its refused replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from app.domain.events import BlobRef, Recorded, SessionErased, name_of, to_fields
from app.domain.rules import superseded
from app.domain.session import Payload, Session, Turn
from app.errors import NotFound, Overloaded, SessionNotFound
from app.store import content
from app.store.ports import Database, of_session
from app.store.sessions import load_events, load_head

POLL_S = 1.0
"""Interval in seconds at which a follower looks for events of other processes."""


MOST_FOLLOWERS = 1000
"""Open followed logs of a process: each reads the store once a second, even if nothing happens."""


class Followers:
    """The followers of each session's log in this process. `open` counts them with those of the log of all sessions."""

    def __init__(self) -> None:
        self.stopping = False
        self.open = 0
        self.following: dict[str, set[asyncio.Event]] = {}
        """By session; one without followers has no entry."""

    def stop(self) -> None:
        """End all followers, since a stopping server waits for open replies."""
        self.stopping = True
        for session_id in self.following:
            self.notify(session_id)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Raises Overloaded."""
        if self.open >= MOST_FOLLOWERS:
            raise Overloaded(f"{self.open} readers already follow logs")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    @contextlib.contextmanager
    def follow(self, session_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the session's log grows. Clear it before reading and wait for it afterwards."""
        changed = asyncio.Event()
        following = self.following.setdefault(session_id, set())
        following.add(changed)
        try:
            yield changed
        finally:
            following.discard(changed)
            if not following:
                self.following.pop(session_id, None)

    def notify(self, session_id: str) -> None:
        for changed in self.following.get(session_id, ()):
            changed.set()


async def wait_for_change(changed: asyncio.Event, most_s: float = POLL_S) -> None:
    """Wait until the event is set, at most `most_s` or POLL_S."""
    try:
        async with asyncio.timeout(min(most_s, POLL_S)):
            await changed.wait()
    except TimeoutError:
        return


OPEN_TURN = ("turn", "parent", "fence", "incarnation", "adapter")


def described(session: Session) -> dict[str, Any]:
    """The state as JSON-able fields, without hashes that only the server compares. Times are epoch seconds."""
    gone = superseded(session)
    return {
        **_fields(session, "session_id", "version", "status", "created_at", "closed_at"),
        "config": asdict(session.config),
        "fork": None if session.fork is None else asdict(session.fork),
        "metadata": None if session.metadata is None else _blob(session.metadata),
        "turns": [_turn(turn, live=turn.number not in gone) for turn in session.turns],
        "open_turn": None if session.open_turn is None else _fields(session.open_turn, *OPEN_TURN),
        "open_turns": [_fields(held, *OPEN_TURN) for _, held in sorted(session.open_turns.items())],
        "history": session.history,
        "affinity": None if session.affinity is None else asdict(session.affinity),
        "reward": None if session.reward is None else asdict(session.reward),
        "turn_rewards": {str(turn): asdict(reward) for turn, reward in sorted(session.turn_rewards.items())},
        "note": session.note,
        "tags": list(session.tags),
        "payloads": [_payload(turn, payload) for turn, kept in sorted(session.payloads.items()) for payload in kept],
        "blob_count": session.blob_count,
        "blobs": [_blob(blob) for blob in session.blobs],
    }


def event_fields(recorded: Recorded) -> dict[str, Any]:
    """An event as `GET /sessions/{id}/events` shows it."""
    return {"seq": recorded.seq, "type": name_of(recorded.event), "at": recorded.at, **to_fields(recorded.event)}


def _turn(turn: Turn, *, live: bool) -> dict[str, Any]:
    return {
        "turn": turn.number,
        **_fields(turn, "parent", "segment", "branch", "branch_cause", "agent_id"),
        "live": live,
        "seq": turn.seq,
        "messages": turn.message_count,
        "tokens": turn.token_count,
        **_fields(turn, "output_tokens", "finish_reason"),
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _payload(turn: int, payload: Payload) -> dict[str, Any]:
    return {
        "turn": turn,
        **_fields(payload, "kind", "start", "stop"),
        "shape": list(payload.shape),
        "chunks": len(payload.chunks),
        "bytes": sum(chunk.size for chunk in payload.chunks),
    }


def _blob(blob: BlobRef) -> dict[str, Any]:
    return _fields(blob, "number", "kind", "size")


PAGE = 500
"""Events read in one query."""


async def event_lines(
    database: Database, followers: Followers, session_id: str, after: int, follow: bool
) -> AsyncGenerator[bytes]:
    """The events after seq `after` as NDJSON. Raises SessionNotFound before the first line."""
    if await of_session(database, session_id, load_head) is None:
        raise SessionNotFound.of(session_id)
    return _event_lines(database, followers, session_id, after, follow)


async def _event_lines(
    database: Database, followers: Followers, session_id: str, after: int, follow: bool
) -> AsyncGenerator[bytes]:
    with followers.follow(session_id) as changed:
        while True:
            changed.clear()
            page = await of_session(database, session_id, load_events, after=after, limit=PAGE)
            if page:
                after = page[-1].seq
                yield await asyncio.to_thread(_ndjson, page)
            if len(page) == PAGE:
                continue
            if not follow or followers.stopping or (page and isinstance(page[-1].event, SessionErased)):
                return
            await wait_for_change(changed)


def _ndjson(page: Sequence[Recorded]) -> bytes:
    return b"".join(msgspec.json.encode(event_fields(recorded)) + b"\n" for recorded in page)


async def refused_reply(database: Database, session_id: str, fence: int) -> tuple[int, bytes]:
    """The size of a refused reply and the part of it that was kept. Raises SessionNotFound, NotFound,
    SessionUnreadable."""
    if await of_session(database, session_id, load_head) is None:
        raise SessionNotFound.of(session_id)
    refused = await of_session(database, session_id, content.refused_reply, fence)
    if refused is None:
        raise NotFound(f"no refused reply of session {session_id} with fence {fence} is kept")
    return refused
