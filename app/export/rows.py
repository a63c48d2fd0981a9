"""Makes the rows that shapes take from a session's stored content; runs on a thread.

Which turns a session's rows have is known from its log, before any content is read. Content is unpacked when a shape
reads it, so a trainer that reads only tokens does not pay for conversations. Its hash is always checked against the
log's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import pybase64
from msgspec import UNSET, UnsetType

from app.domain import images
from app.domain.branches import Branches, Picker, branch_rows
from app.domain.columns import Column, align, unpack
from app.domain.events import AnnotationWritten, ChunkRef, ReplayKind, TurnCommitted, UnknownEvent
from app.domain.groups import Root
from app.domain.samples import Inconsistent, Sample, Segment, TurnSpan, TurnTokens, segments
from app.domain.samples import sample as made
from app.domain.session import Payload, Session, fold
from app.export.query import ExportQuery
from app.export.row import (
    Links,
    MaskRows,
    Routing,
    Row,
    RowImage,
    Source,
    Top,
    TurnContent,
    TurnSampling,
    Unfit,
    sampling_of,
)
from app.sessions import replay_payloads as replay
from app.sessions.conversation import as_messages
from app.store.content import StoredSession
from app.store.sessions import decode_events
from workers import codec
from workers.codec import CorruptContent, Messages, TopLogprobs, TopRows
from workers.parse import REPLAY
from workers.sampling_masks import KIND as MASK
from workers.top_logprobs import NO_ID, NO_LOGPROB, unpacked

T = TypeVar("T", covariant=True)


class Lazy(Sequence[T]):
    """A sequence whose content is made at the first access."""

    def __init__(self, make: Callable[[], Sequence[T]]) -> None:
        self._items = functools.cache(make)

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items())


class Known(msgspec.Struct, frozen=True):
    """A session folded up to the position of its page; `times` are when each turn was committed.

    `root` is its rollout's root, None for the root itself. `values` are those of its annotations, by their event.
    """

    session: Session
    events: dict[int, TurnCommitted]
    times: dict[int, float]
    root: Root | None = None
    values: Mapping[int, Any] = {}

    @property
    def groups(self) -> set[str | None]:
        """The group named by its rows, and the group that counts its rollout."""
        own = self.session.config.group_id
        if self.root is None or not self.root.exists:
            return {own}
        return {own or self.root.group_id, self.root.group_id}


class Folded(NamedTuple):
    """A session that was read, and its fold; None where its log gives no rows, or is to be read once more for why."""

    stored: StoredSession
    known: Known | None


def known(stored: StoredSession) -> Known:
    """Raises UnknownEvent, CorruptContent."""
    if stored.damage is not None:
        raise CorruptContent(stored.damage)
    log = decode_events(stored.events)
    session = fold(stored.session_id, log)
    if session is None:
        raise UnknownEvent("the log is empty")
    committed = [(recorded.at, recorded.event) for recorded in log if isinstance(recorded.event, TurnCommitted)]
    events = {event.turn: event for _, event in committed}
    said = log if session.annotations else ()
    values = {written.seq: written.event.value for written in said if isinstance(written.event, AnnotationWritten)}
    return Known(session, events, {event.turn: at for at, event in committed}, stored.root, values)


class SessionRows:
    """A session's branches that become rows as `query` asks for them, and a row of each. `release` is Turnlog's
    version, for provenance.

    `segments` are those of which a part fits. Rows and segments are of the log alone. Samples are made one at a time,
    because each contains its whole prompt.
    """

    def __init__(
        self, stored: StoredSession, known_session: Known, query: ExportQuery, branches: Branches | Picker, release: str
    ) -> None:
        self._query = query
        self._stored = stored
        self._known = known_session
        self._release = release
        self._tokens: dict[int, TurnTokens] = {}
        self._tops: dict[int, TopLogprobs | None] = {}
        self._saids: dict[int, Messages] = {}
        self._shared: dict[int, bytes] = {}
        self.session = known_session.session
        self.rows = branch_rows(known_session.session, branches, query.loss)
        events = {number: counted(known_session.events[number]) for row in self.rows for number in row.turns}
        self.segments = segments(known_session.session, self.rows, events, query.max_seq_len, query.truncate)
        self._rollout_rows = len(self.rows) if stored.rollout_rows is None else stored.rollout_rows

    def needed(self, segment: Segment) -> set[int]:
        """The turns of a segment's tokens, and those of the conversation at its end."""
        chain = self.session.message_chain(segment.turns[-1].turn)
        return {*(event.turn for event in segment.turns), *(turn.number for turn in chain)}

    def row(self, segment: Segment, cursor: str, *, advantage: float | None = None) -> Row:
        """Raises CorruptContent, Inconsistent; Unfit where a sampled row of a payload is not there."""
        for event in segment.turns:
            if event.turn not in self._tokens:
                self._tokens[event.turn] = self._unpacked(event)
        sample = made(segment, self._tokens)
        path, payloads = segment.row.turns, self._query.replay
        routing, differs = dict(self._routing(sample, path)) if payloads is True else {}, None
        mask = routing.pop(MASK, UNSET)
        if payloads is True and self._query.routing == "sampled":
            routing, differs = self._sampled(sample, routing)
        columns = {name: self._of_column(sample, name) for name in self._query.column_names}
        chain = Lazy(lambda: [turn.number for turn in self.session.message_chain(sample.turns[-1].turn)])
        return Row(
            session=self.session,
            sample=sample,
            turns=Lazy(lambda: [self._turn(span.turn) for span in sample.turns]),
            messages=Lazy(lambda: [message for number in chain for message in self._messages(number)]),
            metadata=None if self.session.metadata is None else self._blob(self.session.metadata.number),
            source=self._source(sample),
            cursor=cursor,
            is_last=self.session.is_tree or segment.row is self.rows[-1],
            routing=cast(dict[str, Routing | None], routing),
            mask=cast(MaskRows | UnsetType | None, mask),
            routing_differs=differs,
            advantage=advantage,
            replay=payloads is True,
            by_turn=self._query.rewards == "turn",
            root=self._known.root,
            rollout_rows=self._rollout_rows,
            sampling=Lazy(lambda: [self._sampling(self._known.events[span.turn]) for span in sample.turns]),
            links=dict(self._links(sample, path)) if payloads == "urls" else None,
            # Without reading a message.
            stored_images=sum(len(self._known.events[number].images) for number in chain) if self.session.images else 0,
            images=None if self._query.images == "none" else Lazy(lambda: list(self._images(chain))),
            annotations=self._annotations(sample) if self.session.annotations else None,
            columns={name: align(sample.turns, column) for name, (column, _) in columns.items()} or None,
            as_of_seq=max([self.session.version, *(seq for _, seq in columns.values())]),
            top=None if self._query.top_k is None else self._top(sample, self._query.top_k),
        )

    def _annotations(self, sample: Sample) -> Mapping[str, Any] | None:
        """The JSON values; `note` and `tags` of the session are fields of their own."""
        of_session = {name: value for name, value in self._values(0).items() if name not in ("note", "tags")}
        of_turns = {str(span.turn): values for span in sample.turns if (values := self._values(span.turn))}
        return {"session": of_session, "turns": of_turns} if of_session or of_turns else None

    def _values(self, turn: int) -> dict[str, Any]:
        said = self.session.annotations.get(turn, {})
        return {name: self._known.values[written.seq] for name, written in said.items() if written.column is None}

    def _of_column(self, sample: Sample, name: str) -> tuple[dict[int, Column], int]:
        """A column by the turns of the sample that have it, and the newest event that wrote a part of it.

        One that was written again since the export's window was fixed is the new one. Raises CorruptContent.
        """
        by_turn: dict[int, Column] = {}
        newest = 0
        for turn in (span.turn for span in sample.turns):
            said = self.session.annotations.get(turn, {}).get(name)
            if said is None or said.column is None or not (there := self._stored.columns.get((turn, name))):
                continue
            seq = said.seq if said.seq in there else max(there)
            by_turn[turn] = unpack(there[seq], said.column if seq == said.seq else None)
            newest = max(newest, seq)
        return by_turn, newest

    def _unpacked(self, event: TurnCommitted) -> TurnTokens:
        """A turn's tokens, checked against the log. Raises CorruptContent."""
        number = event.turn
        tokens, exchange = self._stored.frames.get(number, (None, None))
        if exchange is None:
            raise CorruptContent(f"turn {number}: the content is missing")
        if codec.content_hash(tokens, exchange) != event.content_hash:
            raise CorruptContent(f"turn {number}: the content's hash differs from the log's")
        if event.is_text:
            return TurnTokens(event, b"", b"", b"")
        unpacked = codec.unpack_tokens(tokens, exchange)
        if self._query.top_k is not None:
            self._tops[number] = unpacked.top
        return TurnTokens(event, unpacked.suffix_ids, unpacked.output_ids, unpacked.logprobs)

    def _said(self, number: int) -> Messages:
        if number not in self._saids:
            self._saids[number] = codec.unpack_messages(self._stored.frames[number][1])
        return self._saids[number]

    def _blob(self, number: int) -> bytes:
        if number not in self._shared:
            self._shared[number] = codec.decompress(self._stored.blobs.get(number))
        return self._shared[number]

    def _turn(self, number: int) -> TurnContent:
        event = self._known.events[number]
        messages = self._messages(number)
        return TurnContent(
            event=event,
            at=self._known.times[number],
            messages=messages[:-1],
            message=messages[-1],
            params=self._blob(event.params),
            tools=None if event.tools is None else self._blob(event.tools),
        )

    def _sampling(self, event: TurnCommitted) -> TurnSampling:
        return sampling_of(event, self._blob(event.params))

    def _messages(self, number: int) -> list[bytes]:
        messages = as_messages(self._known.events[number].protocol, self._said(number))
        if self._query.images != "inline" or not self._known.events[number].images:
            return messages
        data = {sha256: self._image(sha256) for sha256 in images.hashes(messages)}
        return [images.put_back(message, data) for message in messages]

    def _images(self, chain: Sequence[int]) -> Iterator[RowImage]:
        """The images of these turns' messages. Raises CorruptContent."""
        place = 0
        for number in chain:
            for message in as_messages(self._known.events[number].protocol, self._said(number)):
                for image in images.shown(message):
                    data = None if image.sha256 is None or self._query.images != "inline" else self._image(image.sha256)
                    known = msgspec.structs.asdict(image)
                    yield RowImage(**known, bytes=data, not_stored=image.sha256 is None, message=place, turn=number)
                place += 1

    def _top(self, sample: Sample, k: int) -> Top:
        """The most likely tokens, and the prompts' logprobs. Raises CorruptContent, Inconsistent."""
        count = len(sample.tokens)
        top = Top(
            np.full((count, k), NO_ID, np.int32),
            np.full((count, k), NO_LOGPROB, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.uint8),
        )

        def place(span: TurnSpan, first: int, end: int, packed: TopRows, *, is_longer: bool = False) -> None:
            ids, logprobs = unpacked(packed)
            _require_count(len(ids) == end - first or (is_longer and len(ids) > end - first), span)
            width = min(k, ids.shape[1])
            top.top_ids[first:end, :width] = ids[: end - first, :width]
            top.top_logprobs[first:end, :width] = logprobs[: end - first, :width]

        for span in sample.turns:
            if (stored := self._tops.get(span.turn)) is None:
                continue
            if stored.output is not None:
                # A turn may be cut, and its last token trimmed by the next one.
                place(span, span.output_start, span.end, stored.output, is_longer=True)
            given = np.frombuffer(stored.prompt_logprobs, "<f4")
            _require_count(len(given) <= span.output_start - span.start, span)
            first = span.output_start - len(given)
            top.prompt_logprobs[first : span.output_start] = given
            top.prompt_logprobs_mask[first : span.output_start] = 1
            if stored.prompt is not None:
                place(span, first, span.output_start, stored.prompt)
        return top

    def _image(self, sha256: str) -> bytes:
        """Raises CorruptContent."""
        if sha256 not in self.session.images:
            raise CorruptContent(f"image {sha256} is not in the log")
        return self._blob(self.session.images[sha256])

    def _source(self, sample: Sample) -> Source:
        events = [self._known.events[span.turn] for span in sample.turns]
        return Source(
            engines=sorted({part.engine for event in events for part in event.parts or (event,)}),
            dialects=sorted({event.dialect for event in events}),
            created_at=self.session.created_at,
            committed_at=self._known.times[events[-1].turn],
            turnlog_version=self._release,
        )

    def _sampled(
        self, sample: Sample, newest: Mapping[str, Routing | MaskRows | None]
    ) -> tuple[dict[str, Routing | MaskRows | None], int]:
        """The rows that each turn has of its own tokens, and how many of them the newest turn has otherwise.

        Raises CorruptContent; Unfit where one is not there.
        """
        sampled: dict[str, Routing | MaskRows | None] = {}
        differs = 0
        for kind, new in newest.items():
            parts: list[Routing] = []
            at = 0
            for span in sample.turns:
                event = self._known.events[span.turn]
                stop = min(event.base_tokens + event.suffix_tokens + event.output_tokens, len(sample.tokens)) - 1
                stop = min(stop, span.end)
                if stop > at:
                    parts.append(self._own_rows(event, kind, at, stop))
                    at = stop
            if len({part.ids.shape[1:] for part in parts}) > 1:
                raise Unfit(f"{kind}: the turns' rows differ in shape")
            ids = np.concatenate([part.ids for part in parts]) if parts else np.zeros((0,), np.uint8)
            sampled[kind] = Routing(ids, 0)
            if isinstance(new, Routing):
                shared = ids[new.row_start : new.row_start + len(new.ids)]
                differs += int((shared != new.ids).any(axis=tuple(range(1, shared.ndim))).sum())
        return sampled, differs

    def _own_rows(self, event: TurnCommitted, kind: str, first: int, stop: int) -> Routing:
        """Rows [first, stop) as this turn has them."""
        payloads = self.session.payloads.get(event.turn, ())
        payload = next((payload for payload in payloads if payload.kind == kind), None)
        if payload is None and any(ref.kind == kind for ref in event.payloads):
            raise Unfit("tombstoned")
        if payload is None or payload.start > first or payload.stop < stop:
            raise Unfit(f"turn {event.turn} has no {kind} of its own tokens")
        needed = [chunk for chunk in payload.chunks if chunk.start < stop and chunk.start + chunk.rows > first]
        if any(chunk.key not in self._stored.chunks for chunk in needed):
            raise Unfit("tombstoned")
        rows = replay.rows_of(payload, self._stored.chunks, first, stop)
        return Routing(rows.reshape(len(rows), *payload.shape), first)

    def _routing(self, sample: Sample, path: Sequence[int]) -> Iterator[tuple[str, Routing | MaskRows | None]]:
        """The sample's rows: those of the newest turn of its branch that has any, up to the sample's end. None if they
        are tombstoned, perhaps since the export's window was fixed.

        Raises CorruptContent.
        """
        stored = self._stored.chunks
        for needed in self._needed(sample, path):
            payload = needed.payload
            if payload is None or any(chunk.key not in stored for chunk in needed.chunks):
                yield needed.kind, None
            elif needed.kind == MASK:
                masks = replay.masks_of(payload, stored, payload.start, needed.stop)
                yield needed.kind, MaskRows(masks, payload.start)
            else:
                rows = replay.rows_of(payload, stored, payload.start, needed.stop)
                yield needed.kind, Routing(rows.reshape(len(rows), *payload.shape), payload.start)

    def _links(self, sample: Sample, path: Sequence[int]) -> Iterator[tuple[str, Links | None]]:
        """As `_routing`, unread and without sampling masks."""
        for needed in self._needed(sample, path):
            if needed.kind != MASK:
                yield needed.kind, None if needed.payload is None else self._linked(needed, needed.payload)

    def _linked(self, needed: _Needed, payload: Payload) -> Links | None:
        """None if the rows are tombstoned."""
        chunks: list[dict[str, Any]] = []
        for ref in needed.chunks:
            described = {name: getattr(ref, name) for name in ("start", "rows", "dtype", "size", "hash")}
            name, frame = self._stored.objects.get(ref.key), self._stored.chunks.get(ref.key)
            if name is not None:
                chunks.append({**described, "url": self._stored.urls[name]})
            elif frame is not None:
                chunks.append({**described, "frame": pybase64.b64encode(frame).decode()})
            else:
                return None
        shape = [max(needed.stop - payload.start, 0), *payload.shape]
        return {"row_start": payload.start, "shape": shape, "chunks": chunks}

    def _needed(self, sample: Sample, path: Sequence[int]) -> Iterator[_Needed]:
        """Of each kind of payload that any turn of the sample has brought."""
        brought = {ref.kind for span in sample.turns for ref in self._known.events[span.turn].payloads}
        whole = [payload for number in reversed(path) for payload in self.session.whole_payloads(number)]
        for kind in (kind for kind in REPLAY if kind in brought):
            payload = next((payload for payload in whole if payload.kind == kind), None)
            if payload is None:
                yield _Needed(kind, None, (), 0)
            else:
                stop = min(payload.stop, max(len(sample.tokens) - 1, 0))
                yield _Needed(kind, payload, [chunk for chunk in payload.chunks if chunk.start < stop], stop)


def counted(event: TurnCommitted) -> TurnCommitted:
    """The event, without the counts of a turn of text alone: they are the upstream's, and there are no tokens that they
    could be checked against."""
    return msgspec.structs.replace(event, suffix_tokens=0, output_tokens=0) if event.is_text else event


class _Needed(NamedTuple):
    """A kind's payload of a sample, None if it is tombstoned, and its chunks with rows before `stop`."""

    kind: ReplayKind
    payload: Payload | None
    chunks: Sequence[ChunkRef]
    stop: int


def _require_count(holds: bool, span: TurnSpan) -> None:
    if not holds:
        raise Inconsistent(f"turn {span.turn}: the most likely tokens are not as many as its tokens")
