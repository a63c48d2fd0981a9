"""Checks one session: compares its stored rows with a fold of its log."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select

from app.domain.columns import unpack
from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    BlobRef,
    BlobsTombstoned,
    ChunkKey,
    ChunkRef,
    Recorded,
    SessionCreated,
    SessionRestored,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
    UnknownEvent,
    name_of,
)
from app.domain.session import Session, fold
from app.features.resume.schema import staged_tokens
from app.sessions.replay_payloads import keys_of
from app.store import repair
from app.store.content import load_frames, stored_chunks
from app.store.damage import PageDamaged, attempt
from app.store.dialect import CoreReads
from app.store.log_sessions import has_text
from app.store.repair import FoldedLog
from app.store.schema import (
    annotation_columns,
    blobs,
    chunks,
    events,
    open_turns,
    refused_replies,
    sessions,
    snapshots,
    turns,
)
from app.store.sessions import load_snapshot
from ops.verify.report import Report
from workers import codec, payloads, sampling_masks
from workers.codec import TOKEN_BYTES, CorruptContent, Exchange
from workers.parse import token_text
from workers.top_logprobs import FLOAT_BYTES, unpacked

_CHUNK = (
    chunks.c.fence,
    chunks.c.number,
    chunks.c.size,
    chunks.c.hash,
    chunks.c.tombstoned_by,
    or_(chunks.c.data.is_not(None), and_(chunks.c.location.is_not(None), chunks.c.tombstoned_by.is_(None))),
)

TABLES = (
    sessions,
    events,
    open_turns,
    turns,
    annotation_columns,
    blobs,
    chunks,
    refused_replies,
    staged_tokens,
    snapshots,
)
"""The tables with rows of sessions. A damaged store may have a session in some of them only."""

PAGE = 500
"""Sessions listed in one query."""

TURNS_AT_ONCE = 100
"""Turns whose content is in memory at the same time."""

LOGPROB_BYTES = 8

MAX_TRIM = 1
"""A turn leaves out at most this many tokens at the end of its parent."""

_Chains = dict[tuple[int, int], tuple[int, Any]]
"""Key: a turn and how many of its last tokens are left out. Value: the number of tokens up to there, and their hash."""


def check_damaged(connection: Connection, session_id: str, report: Report) -> None:
    """Report which tables of a session cannot be read, after its check met a damaged page."""
    why: dict[str, str] = {}
    for table in TABLES:
        query = select(table).where(table.c.session_id == session_id)
        try:
            attempt(connection, lambda again: again.execute(query).all())  # noqa: B023
        except PageDamaged as error:
            why[table.name] = str(error)
    names = ", ".join(why) or "an index"
    reason = next(iter(why.values()), "the database met a damaged page")
    report.unreadable.append(session_id)
    report.found(session_id, f"its rows in {names} cannot be read: {reason}")


def chunk_fault(ref: ChunkRef, frame: bytes | None) -> str | None:
    """What is wrong with a chunk's frame."""
    try:
        payloads.raw_of(payloads.Chunk(ref.start, ref.rows, ref.dtype, ref.size, ref.hash), frame)
    except CorruptContent as error:
        return f"chunk {ref.key}: {error}"
    return None


class SessionCheck:
    """Compares one session with its log, in one transaction. It does not read objects: `in_objects`."""

    def __init__(self, connection: Connection, session_id: str, report: Report) -> None:
        self._connection = connection
        self._session_id = session_id
        self._report = report
        self._log: Sequence[Recorded] = ()
        self.in_objects: list[ChunkRef] = []

    def run(self) -> None:
        self._report.sessions += 1
        log = self._folded()
        if log is None:
            return
        session, self._log, _ = log
        self._report.events += len(self._log)
        self._derived(log)
        self._order()
        self._fences(session)
        self._retry_keys(session)
        self._bindings()
        self._snapshot(session)
        if session.status == "erased":
            self._check_erased()
        else:
            self._blobs()
            self._columns(session)
            self._content()
            self._chunks(session)
            self._payloads(session)
            self._refused()
            self._staged(session)

    def _found(self, what: str) -> None:
        self._report.found(self._session_id, what)

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self._found(what)

    def _rows(self, table: Any, *columns: Any) -> Sequence[Any]:
        return self._connection.execute(select(*columns).where(table.c.session_id == self._session_id)).all()

    def _folded(self) -> FoldedLog | None:
        """The folded log; None, and a problem reported, if it has a gap or an unreadable event."""
        try:
            log = repair.read_log(CoreReads(self._connection), self._session_id)
        except UnknownEvent as error:
            self._found(f"the log cannot be read: {error}")
            return None
        if log is None:
            self._found("rows without a log")
        return log

    def _derived(self, log: FoldedLog) -> None:
        for difference in repair.differences(CoreReads(self._connection), self._session_id, log):
            self._found(str(difference))

    def _order(self) -> None:
        """Check that positions in the global order grow with the log, within each transaction, and so in a whole SQLite
        store.

        On PostgreSQL, a transaction with a lower number may append later.
        """
        last: dict[int, int] = {}
        columns = (events.c.seq, events.c.tx, events.c.position)
        for seq, tx, position in sorted(self._rows(events, *columns)):
            self._expect(position > last.get(tx, 0), f"event {seq} comes before an earlier one in the order of events")
            last[tx] = position

    def _fences(self, session: Session) -> None:
        """Check that every turn that ended was opened under the fence it names, and ended once; in a linear session,
        in the order of fences. A turn copied by a fork was never opened: its fence is its own event's number. No turn's
        number was given twice."""
        copied = 0 if session.fork is None else session.fork.turns
        opened: dict[int, int] = {}
        last = last_number = 0
        for recorded in self._log:
            match recorded.event:
                case TurnCommitted(turn=turn, fence=fence) if turn <= copied:
                    self._expect(fence == recorded.seq, f"turn {turn} is a copy, with fence {fence} at {recorded.seq}")
                    last = max(last, fence)
                case TurnOpened(turn=turn):
                    opened[recorded.seq] = turn
                    self._expect(
                        turn > last_number, f"event {recorded.seq} gives turn {turn} a number after {last_number}"
                    )
                    last_number = max(last_number, turn)
                case TurnCommitted() | TurnRejected() | TurnAbandoned() as ended:
                    found = opened.pop(ended.fence, None)
                    place = f"event {recorded.seq} ends turn {ended.turn} under fence {ended.fence}"
                    self._expect(found == ended.turn, f"{place}: not open")
                    self._expect(session.is_tree or ended.fence >= last, f"{place}, after fence {last}")
                    last = max(last, ended.fence)

    def _retry_keys(self, session: Session) -> None:
        """Check that no key has two turns. One that is undone has none any more."""
        keys = [turn.retry_key for turn in session.turns if turn.retry_key is not None]
        twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
        self._expect(not twice, f"committed twice under one retry key: {twice}")

    def _bindings(self) -> None:
        """Check that each turn came from the session's engine while the session was bound to one.

        A turn whose client released the binding commits without one.
        """
        engine: str | None = None
        for recorded in self._log:
            match recorded.event:
                case AffinityBound():
                    engine = recorded.event.engine
                case AffinityReleased():
                    engine = None
                case TurnCommitted() if engine is not None:
                    event = recorded.event
                    self._expect(
                        event.engine == engine, f"turn {event.turn} came from an engine that was not its session's"
                    )

    def _snapshot(self, session: Session) -> None:
        """Check the snapshot. One whose last event was lost in a crash of the database, or after which there was a
        restore, is ignored here and by readers."""
        start = load_snapshot(self._connection, self._session_id)
        if start is None or all((one.seq, one.at) != (start.version, start.last_event_at) for one in self._log):
            return
        later = [recorded for recorded in self._log if recorded.seq > start.version]
        if any(isinstance(recorded.event, SessionRestored) for recorded in later):
            return
        self._expect(fold(self._session_id, later, start) == session, "a fold from the snapshot differs from the log's")

    def _committed(self) -> Iterator[TurnCommitted]:
        return (recorded.event for recorded in self._log if isinstance(recorded.event, TurnCommitted))

    def _check_erased(self) -> None:
        for table in (turns, annotation_columns, blobs, chunks, refused_replies, staged_tokens, snapshots):
            left = self._rows(table, func.count())[0][0]
            self._expect(left == 0, f"erased, but {left} rows are left in {table.name}")
        for recorded in self._log:
            bare = f"erased, but event {recorded.seq} ({name_of(recorded.event)}) still has a client's text"
            self._expect(not has_text(recorded.event), bare)

    def _columns(self, session: Session) -> None:
        """Check that every column that the session has is stored unchanged."""
        table = annotation_columns.c
        rows = self._rows(annotation_columns, table.turn, table.name, table.seq, table.data)
        stored = {(turn, name, seq): frame for turn, name, seq, frame in rows}
        for turn, said in session.annotations.items():
            for name, annotation in said.items():
                if annotation.column is not None:
                    try:
                        unpack(stored.get((turn, name, annotation.seq), b""), annotation.column)
                    except CorruptContent as error:
                        self._expect(False, f"turn {turn}, annotation {name}: {error}")

    def _blobs(self) -> None:
        """Check that every blob of the log is stored unchanged, and that turns name only these blobs."""
        refs: dict[int, BlobRef] = {}
        for recorded in self._log:
            match recorded.event:
                case SessionCreated(metadata=BlobRef() as ref):
                    refs[ref.number] = ref
                case TurnCommitted(new_blobs=new):
                    refs.update((ref.number, ref) for ref in new)
        stored = {
            row[0]: row for row in self._rows(blobs, blobs.c.number, blobs.c.kind, blobs.c.location, blobs.c.data)
        }
        self._expect(stored.keys() == refs.keys(), f"blobs {sorted(stored)} are stored, the log has {sorted(refs)}")
        for number, ref in refs.items():
            if number in stored and stored[number][2] is None:
                self._blob(ref, *stored[number][1::2])
        for turn in self._committed():
            needed = {turn.params, *turn.images} | ({turn.tools, turn.echo} - {None})
            self._expect(needed <= refs.keys(), f"turn {turn.turn} names blobs {needed}, which the log does not have")

    def _blob(self, ref: BlobRef, kind: str, data: bytes | None) -> None:
        try:
            raw = codec.decompress(data)
        except CorruptContent as error:
            self._found(f"blob {ref.number}: {error}")
            return
        self._expect(kind == ref.kind, f"blob {ref.number} is {kind}, the log says {ref.kind}")
        same = len(raw) == ref.size and hashlib.sha256(raw).hexdigest() == ref.hash
        self._expect(same, f"blob {ref.number} differs from the log")

    def _content(self) -> None:
        """Check the rows of each committed turn, and the hash of all tokens up to it, which continues that of its
        parent."""
        committed = list(self._committed())
        self._report.turns += len(committed)
        columns = (turns.c.turn, turns.c.parent_turn, turns.c.segment, turns.c.choice_index)
        stored = sorted(tuple(row) for row in self._rows(turns, *columns))
        expected = sorted((turn.turn, turn.parent, turn.segment, turn.choice_index) for turn in committed)
        self._expect(stored == expected, f"{len(stored)} turns are stored, which differ from the log's {len(expected)}")
        chains: _Chains = {(0, 0): (0, hashlib.sha256())}
        for start in range(0, len(committed), TURNS_AT_ONCE):
            part = committed[start : start + TURNS_AT_ONCE]
            frames = load_frames(self._connection, self._session_id, [turn.turn for turn in part])
            for turn in part:
                try:
                    self._turn(turn, *frames.get(turn.turn, (None, None)), chains)
                except CorruptContent as error:
                    self._found(f"turn {turn.turn}: {error}")

    def _turn(self, turn: TurnCommitted, token_frame: bytes | None, exchange: bytes | None, chains: _Chains) -> None:
        if exchange is None:
            raise CorruptContent("the content is missing")
        if codec.content_hash(token_frame, exchange) != turn.content_hash:
            raise CorruptContent("the content's hash differs from the log's")
        self._exchange(turn, codec.unpack(exchange, Exchange))
        tokens = codec.unpack_tokens(token_frame, exchange)
        if turn.is_text:
            has_tokens = any((tokens.suffix_ids, tokens.output_ids, tokens.logprobs, turn.base_tokens))
            self._expect(not has_tokens, f"turn {turn.turn}: it has tokens, but the log says that it has text alone")
            return
        sizes = {
            "suffix_ids": (len(tokens.suffix_ids), turn.suffix_tokens * TOKEN_BYTES),
            "output_ids": (len(tokens.output_ids), turn.output_tokens * TOKEN_BYTES),
            "logprobs": (len(tokens.logprobs), turn.output_tokens * LOGPROB_BYTES),
        }
        if tokens.top is not None:
            rows = 0 if tokens.top.output is None else len(unpacked(tokens.top.output)[0])
            given = len(tokens.top.prompt_logprobs) // FLOAT_BYTES
            of_prompt = given if tokens.top.prompt is None else len(unpacked(tokens.top.prompt)[0])
            is_right = rows in (0, turn.output_tokens) and given == of_prompt <= turn.suffix_tokens
            self._expect(is_right, f"turn {turn.turn}: the most likely tokens are not as many as its tokens")
        for name, (size, said) in sizes.items():
            self._expect(size == said, f"turn {turn.turn}: {name} has {size} bytes, the log says {said}")
        length, hasher = chains.get((turn.parent, turn.trimmed) if turn.base_tokens else (0, 0), (-1, None))
        if hasher is None or length != turn.base_tokens:
            raise CorruptContent(f"it continues {turn.base_tokens} tokens of turn {turn.parent}, which has {length}")
        hasher = hasher.copy()
        own = memoryview(tokens.suffix_ids + tokens.output_ids).cast("i")
        total = length + len(own)
        for trimmed in range(min(MAX_TRIM, len(own)), -1, -1):
            part, own = own[: len(own) - trimmed], own[len(own) - trimmed :]
            hasher.update(token_text(part))
            chains[turn.turn, trimmed] = (total - trimmed, hasher.copy())
        self._expect(hasher.hexdigest() == turn.tokens_hash, f"turn {turn.turn}: tokens_hash differs from the log")

    def _staged(self, session: Session) -> None:
        """Check that staged tokens are those of a turn that was opened and did not commit, of an open session."""
        fences = {row[0] for row in self._rows(staged_tokens, staged_tokens.c.fence)}
        committed = {turn.fence for turn in self._committed()}
        opened = {recorded.seq for recorded in self._log if isinstance(recorded.event, TurnOpened)} - committed
        allowed = opened if session.status == "open" else set[int]()
        self._expect(fences <= allowed, f"staged tokens of fences {sorted(fences - allowed)}, which are no open turn's")

    def _chunks(self, session: Session) -> None:
        """Check that every chunk of the log is stored, with its data or as a tombstone, and with data if a payload
        needs it."""
        brought = [chunk for turn in self._committed() for ref in turn.payloads for chunk in ref.chunks]
        refs = {(chunk.fence, chunk.number): chunk for chunk in brought}
        needed = {key for live in session.every_payload.values() for payload in live for key in keys_of(payload)}
        tombstones = {recorded.seq for recorded in self._log if isinstance(recorded.event, BlobsTombstoned)}
        rows = {(row[0], row[1]): row[2:] for row in self._rows(chunks, *_CHUNK)}
        held = {one.fence for one in session.open_turns.values()}
        orphans = sorted(key for key in rows.keys() - refs.keys() if key[0] not in held)
        self._expect(not orphans, f"chunks {orphans[:5]} belong to no turn")
        for key, ref in refs.items():
            size, digest, by, live = rows.get(key, (None, None, None, False))
            self._expect((size, digest) == (ref.size, ref.hash), f"chunk {key} is not the one in the log")
            self._expect(live or key not in needed, f"chunk {key} is gone, but a payload needs it")
            # The data of a closed session's tombstones is freed in steps after the event.
            self._expect(key in needed or not live or session.status != "open", f"chunk {key} should be gone")
            self._expect(
                live or by in tombstones, f"chunk {key} was tombstoned by event {by}, which is not a tombstone event"
            )
            if live:
                self._chunk(key, ref)

    def _payloads(self, session: Session) -> None:
        """Check that the chunks of a payload have no gaps, and that rows taken from the parent belong to the parent's
        tokens."""
        bases = {turn.turn: turn.base_tokens for turn in self._committed()}
        for number, live in session.payloads.items():
            for payload in live:
                at, is_mask = payload.start, payload.kind == sampling_masks.KIND
                for chunk in payload.chunks:
                    # A sampling mask's chunk may stand for the last rows of the one before.
                    follows = chunk.start <= at if is_mask else chunk.start == at
                    self._expect(follows, f"turn {number}: {payload.kind} has a gap at row {at}")
                    at = chunk.start + chunk.rows
                self._expect(at == payload.stop, f"turn {number}: {payload.kind} ends at row {at}, not {payload.stop}")
                # An engine sends a mask's rows of its own output only.
                own = bases[number] > 0 or payload.start == (0 if is_mask else payload.sent)
                self._expect(own, f"turn {number}: {payload.kind} begins with rows of other tokens")

    def _chunk(self, key: ChunkKey, ref: ChunkRef) -> None:
        """Check one chunk. Chunks are large, so only one is in memory."""
        frame = stored_chunks(self._connection, self._session_id, [key]).get(key)
        if isinstance(frame, str):
            self.in_objects.append(ref)
        elif (fault := chunk_fault(ref, frame)) is not None:
            self._found(fault)

    def _exchange(self, turn: TurnCommitted, exchange: Exchange) -> None:
        sent = len(exchange.messages)
        self._expect(sent == turn.new_messages, f"turn {turn.turn}: {sent} messages, the log says {turn.new_messages}")

    def _refused(self) -> None:
        """Check that every stored refused reply belongs to a turn that the log says was rejected."""
        rejected = {recorded.event.fence for recorded in self._log if isinstance(recorded.event, TurnRejected)}
        kept = {row[0] for row in self._rows(refused_replies, refused_replies.c.fence)}
        self._expect(kept <= rejected, f"rejected replies {sorted(kept - rejected)[:5]} belong to no rejected turn")
