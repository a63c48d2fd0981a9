"""Reads replay payloads chunk by chunk; each chunk is checked against the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from app.domain.events import BlobsTombstoned, ChunkKey, PayloadRef, ReplayKind, TurnCommitted
from app.domain.session import Payload, Session
from app.errors import NotFound, PayloadTombstoned, SessionUnreadable
from app.store.content import load_chunks
from app.store.ports import Database, of_session
from app.store.sessions import load_events
from workers import payloads, sampling_masks
from workers.codec import CorruptContent, Exchange
from workers.payloads import Chunk, Ids
from workers.sampling_masks import Masks

Frames = Mapping[ChunkKey, bytes | None]


def keys_of(payload: Payload, first: int = 0) -> list[ChunkKey]:
    """The chunks that contain row `first` or later rows."""
    return [chunk.key for chunk in payload.chunks if chunk.start + chunk.rows > first]


def rows_of(payload: Payload, frames: Frames, first: int, stop: int) -> Ids:
    """Rows [first, stop) as [rows, ids a row], in the smallest type. Raises CorruptContent."""
    parts = _parts(payload, first, stop)
    return payloads.join([payloads.load(ref, frames.get(key))[rows] for key, ref, rows in parts])


def masks_of(payload: Payload, frames: Frames, first: int, stop: int) -> Masks:
    """Rows [first, stop) of a sampling mask. Raises CorruptContent."""
    parts = _parts(payload, first, stop)
    masks = [(sampling_masks.load(ref, frames.get(key)), rows) for key, ref, rows in parts]
    return sampling_masks.join([mask.part(rows.start, rows.stop) for mask, rows in masks])


def _parts(payload: Payload, first: int, stop: int) -> Iterator[tuple[ChunkKey, Chunk, slice]]:
    """The chunks with rows of [first, stop), and which of their rows. One ends where the next begins."""
    for chunk, end in zip(payload.chunks, [*(chunk.start for chunk in payload.chunks[1:]), payload.stop], strict=True):
        if chunk.start < stop and end > first:
            ref = Chunk(chunk.start, chunk.rows, chunk.dtype, chunk.size, chunk.hash)
            yield chunk.key, ref, slice(max(first - chunk.start, 0), min(end, stop) - chunk.start)


async def values(
    database: Database, session: Session, number: int, exchange: Exchange, kinds: Collection[str]
) -> dict[str, bytes]:
    """The payloads of turn `number`'s reply by kind, in the engine's spelling, without tombstoned ones.

    Raises SessionUnreadable.
    """
    by_kind: dict[str, bytes] = {}
    for cut in exchange.cuts:
        payload = next((stored for stored in session.whole_payloads(number) if stored.kind == cut.kind), None)
        if cut.kind not in kinds or payload is None:
            continue
        if cut.form == "text":
            by_kind[cut.kind] = b""
            continue
        keys = keys_of(payload, payload.sent)
        frames = await load_chunks(database, session.session_id, keys)

        def render() -> bytes:
            first, stop = payload.sent, payload.stop  # noqa: B023
            if cut.form == "sets":  # noqa: B023
                return sampling_masks.render(cut, masks_of(payload, frames, first, stop))  # noqa: B023
            return payloads.render(cut, rows_of(payload, frames, first, stop))  # noqa: B023

        try:
            by_kind[cut.kind] = await asyncio.to_thread(render)
        except CorruptContent as error:
            if isinstance(await _why_not(database, session.session_id, number, cut.kind), PayloadTombstoned):
                continue  # since `session` was read
            raise unreadable(session.session_id, number, cut.kind, error) from error
    return by_kind


async def payload_of(
    database: Database, session: Session, number: int, kind: ReplayKind
) -> tuple[Payload, Ids | Masks]:
    """Turn `number`'s payload: its description and all its rows, including those that the engine left out.

    Raises NotFound (no such turn or payload), PayloadTombstoned, SessionUnreadable.
    """
    if number not in session.turns:
        raise NotFound(f"turn {number} is not committed")
    payload = session.payload(number, kind)
    if payload is None:
        raise await _why_not(database, session.session_id, number, kind)
    keys = keys_of(payload)
    frames = await load_chunks(database, session.session_id, keys)
    try:
        read: Callable[..., Ids | Masks] = masks_of if kind == sampling_masks.KIND else rows_of
        rows = await asyncio.to_thread(read, payload, frames, payload.start, payload.stop)
    except CorruptContent as error:
        why = await _why_not(database, session.session_id, number, kind)
        if isinstance(why, PayloadTombstoned):  # since `session` was read
            raise why from error
        raise unreadable(session.session_id, number, kind, error) from error
    return payload, rows


def unreadable(session_id: str, number: int, kind: str, error: CorruptContent) -> SessionUnreadable:
    return SessionUnreadable(f"session {session_id}, turn {number}: {kind}: {error}")


async def _why_not(database: Database, session_id: str, number: int, kind: str) -> NotFound | PayloadTombstoned:
    """The log's description of a payload that cannot be read."""
    log = await of_session(database, session_id, load_events)
    brought: Sequence[PayloadRef] = ()
    for recorded in log:
        match recorded.event:
            case TurnCommitted(turn=turn, payloads=refs) if turn == number:
                brought = [ref for ref in refs if ref.kind == kind]
            case BlobsTombstoned(turns=turns, reason=reason) if brought and number in turns:
                ref = brought[0]
                return PayloadTombstoned(
                    f"{kind} of turn {number}, rows {ref.start} to {ref.stop} of shape {list(ref.shape)}, was "
                    f"tombstoned by event {recorded.seq} ({reason})"
                )
    return NotFound(f"turn {number} of session {session_id} has no {kind}")
