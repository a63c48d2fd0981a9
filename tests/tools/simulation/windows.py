"""What must hold of replay payloads: which are kept after each commit, that what can be read is what the engine sent,
and that the rest is told of as gone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from app.domain.events import BlobsTombstoned, Recorded, ReplayKind, SessionClosed, TurnCommitted
from app.domain.session import Session, states
from app.errors import PayloadTombstoned
from app.sessions import replay_payloads
from app.sessions.transcript import stored_reply
from app.store.content import StoredSession
from app.store.database import Database
from tests.tools.simulation.engine import EXPERTS
from tests.tools.simulation.told import Story, Told

KIND: ReplayKind = "routed_experts"

LOOKED_AT = 2
"""How many of a session's tombstones are read: each costs as much as a turn."""


def windows(story: Story, log: Sequence[Recorded], max_bytes: int | None) -> Iterator[str]:
    """After each commit, the payloads within a window are there and no others, but for what an open turn continues."""
    retain, is_closed = story.session.config.retain, False
    gone_before: set[int] = set()
    last_commit = 0
    every = list(states(story.session.session_id, log))
    for place, (recorded, state) in enumerate(zip(log, every, strict=True)):
        is_closed |= isinstance(recorded.event, SessionClosed)
        if isinstance(recorded.event, BlobsTombstoned) and recorded.event.reason == "closed" and not is_closed:
            yield f"event {recorded.seq} drops the payloads of an open session"
        if not isinstance(recorded.event, TurnCommitted):
            continue
        at = f"after turn {recorded.event.turn}"
        event = _dropping(log[place + 1]) if place + 1 < len(log) else None
        after = state if event is None else every[place + 1]
        committed = story.before(recorded.seq + 1)
        brought = {turn.number for turn in committed if turn.event.payloads}
        kept = brought if retain == "all" else _in_windows(story, committed, brought)
        whole = {number for number in after.payloads if after.whole_payloads(number)}
        pinned = {held.parent for held in after.open_turns.values()}
        # It was decided at one of these states: a turn that was in flight then may have failed before it was written.
        decided_at = every[last_commit:place]
        lately = {held.parent for earlier in decided_at for held in earlier.open_turns.values()}
        last_commit = place
        over = set(event.turns) & kept if event is not None and event.reason == "budget" else set()
        if early := kept - whole - gone_before - over:
            yield f"{at} the payloads of turns {sorted(early)} are gone, which are in a window"
        if event is not None and (needed := pinned & set(event.turns)):
            yield f"{at} the payloads of turns {sorted(needed)} are gone, which an open turn continues"
        # A window counts the payloads that can be read; one that had left before may be counted or not.
        readable = {number for number in state.payloads if state.whole_payloads(number)}
        if late := whole - kept - pinned - lately - _in_windows(story, committed, readable):
            yield f"{at} the payloads of turns {sorted(late)} are there, which are in no window"
        if max_bytes is not None:
            yield from (
                f"{at} {what}" for what in _budget(state, after, over, pinned | {recorded.event.turn}, max_bytes)
            )
        if event is not None and event.reason == "window":
            left = set(event.turns) - story.superseded(committed) if retain == "sampled" else set()
            own = {number for number in left if state.turn(number).token_count - 1 > state.first_own_row(number)}
            if set(event.own) != own:
                yield f"{at} own rows of turns {event.own} are kept, not of {sorted(own)}"
        gone_before |= brought - whole


def _dropping(recorded: Recorded) -> BlobsTombstoned | None:
    """What a commit's next event drops, if it is of that commit."""
    event = recorded.event
    return event if isinstance(event, BlobsTombstoned) and event.reason != "closed" else None


def _in_windows(story: Story, committed: Sequence[Told], having: Collection[int]) -> set[int]:
    """The newest of the turns `having` a payload on the way to each leaf that is not superseded."""
    gone = story.superseded(committed)
    found: set[int] = set()
    for leaf in story.leaves([turn for turn in committed if turn.number not in gone]):
        line = [turn.number for turn in story.tokens_line(leaf) if turn.number in having]
        found.update(line[-story.session.config.rollback_window - 1 :])
    return found


def _budget(
    before: Session, after: Session, over: Collection[int], stay: Collection[int], max_bytes: int
) -> Iterator[str]:
    """`over` was dropped for the budget, and what has to `stay` was not."""
    size = _bytes(after, after.payloads)
    if size > max_bytes and not after.payloads.keys() <= set(stay):
        yield f"{size} bytes of payloads are kept"
    if over:
        newest = max(over, key=lambda number: before.turn(number).seq)
        if _bytes(before, after.payloads.keys() | {newest}) <= max_bytes:
            yield f"payloads of turns {sorted(over)} are gone that the budget has room for"


def _bytes(state: Session, turns: Collection[int]) -> int:
    """Of the payloads of these turns, shared chunks once."""
    kept = [payload for number in turns for payload in state.payloads.get(number, ())]
    return sum({chunk.key: chunk.size for payload in kept for chunk in payload.chunks}.values())


def rows(story: Story, stored: StoredSession) -> Iterator[str]:
    """What can be read of a payload is what the engine sent, row by row."""
    for number, payloads in story.session.payloads.items():
        for payload in payloads:
            experts = story.by_number[number].experts
            if experts is None:
                yield f"turn {number} has a payload that no engine sent"
                continue
            read = replay_payloads.rows_of(payload, stored.chunks, payload.start, payload.stop)
            if read.reshape(-1).tolist() != experts[payload.start * EXPERTS : payload.stop * EXPERTS]:
                yield f"rows {payload.start} to {payload.stop} of turn {number} are not those that its engine sent"
            if payload.stop * EXPERTS != len(experts):
                yield f"the payload of turn {number} ends at row {payload.stop}"


async def tombstones(story: Story, database: Database) -> list[str]:
    """Where a payload is gone its turn says so, and its reply has null in its place."""
    found = []
    session = story.session
    gone = [turn for turn in story.turns if turn.event.payloads and not session.whole_payloads(turn.number)]
    for turn in gone[-LOOKED_AT:]:
        try:
            await replay_payloads.payload_of(database, session, turn.number, KIND)
            found.append(f"the payload of turn {turn.number} is gone, and can be read")
        except PayloadTombstoned:
            pass
        if len(turn.bodies) == 1:
            _, _, body = await stored_reply(database, session, turn.number, [KIND])
            if body != _without_payload(turn.bodies[0]):
                found.append(f"the reply of turn {turn.number} is not the engine's without its payload")
    return found


def _without_payload(body: bytes) -> bytes:
    reply = msgspec.json.decode(body)
    payload = reply["choices"][0]["meta_info"]["routed_experts"].encode()
    return body.replace(b'"' + payload + b'"', b"null")
