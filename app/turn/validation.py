"""From an engine's reply to what is committed: judged inline or in the pool, its payloads numbered.

Handing a body to another process costs about a third of a millisecond, and so does judging one of some tens
of KiB: smaller ones are judged where they are. What makes a reply slow to judge is its triples and ids, not
its bytes; a base64 payload weighs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from app.domain import decide
from app.domain.events import ChunkRef, Dtype, PayloadRef, ReplayKind, VersionSpan
from app.domain.history import Incoming
from app.domain.request import has_more_than_text
from app.domain.session import Session
from app.errors import Overloaded, TokenPrefixMismatch, UpstreamInvalid, WorkerCrash
from app.fleet.engines import Answer
from app.settings import Settings
from app.store.log import StoredChunk
from app.turn.claims import ClaimedTurn, RequestHistory
from app.turn.engine_request import EngineRequestOptions, Prompt
from app.upstream.body import Body
from app.upstream.dialects import returns
from workers import job
from workers.job import Job, PayloadRange, WorkerResult
from workers.parse import REPLAY, Known, PromptDiffers, Rejected
from workers.parse_parts import UNKNOWN_VERSION
from workers.payloads import Chunk, Parent, Want
from workers.pool import Crashed, PoolError

PAYLOAD_LIGHTER = 16
"""How much cheaper a byte of a base64 payload is to judge than one of triples (measured: 0.3 and 5 ms a MiB)."""


class ValidatedReply(msgspec.Struct, frozen=True):
    """An engine's sound reply, ready to be committed. `output_ids` are there where the prompt was sent as ids."""

    reply: decide.Reply
    message: bytes
    facts: bytes
    wire: bytes
    payloads: tuple[PayloadRef, ...]
    chunks: list[StoredChunk]
    places: list[PayloadRange]
    output_ids: bytes


class Workers(Protocol):
    """Where a large reply is judged: `workers.pool.Pool`."""

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes: ...


class ReplyValidator:
    """Validates what engines return."""

    def __init__(self, pool: Workers, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings

    async def judge(
        self,
        opening: ClaimedTurn,
        incoming: RequestHistory,
        new: Sequence[bytes],
        answer: Answer,
        requested_at: float,
        ask: EngineRequestOptions,
        prompt: Prompt | None,
    ) -> ValidatedReply:
        """`prompt` is what was sent as ids. Raises UpstreamInvalid, TokenPrefixMismatch, WorkerCrash, Overloaded."""
        engine, reply = answer.engine, answer.reply
        work = Job(
            dialect=self._settings.upstream_dialect,
            known=_known(opening) if prompt is None else prompt.known,
            wants=[self._want(opening, kind, ask) for kind in REPLAY],
            messages=list(new),
            headers=reply.headers,
            status=reply.status,
            rid=ask.rid,
            own=ask.own,
            protocol=opening.event.protocol,
            sent=b"" if prompt is None else prompt.text + b",",
        )
        try:
            if is_light(reply.body, sum(map(len, new)), self._settings.inline_max_bytes):
                done = job.work(work, memoryview(reply.body.joined()))
            else:
                done = job.decode_done(await self._pool.run(job.encode(work), *reply.body.pieces))
        except PromptDiffers as error:
            raise TokenPrefixMismatch(f"{engine} reports another prompt than it was sent: {error}") from error
        except Rejected as error:
            raise UpstreamInvalid(f"{engine} returned a malformed reply: {error}") from error
        except Crashed as error:
            raise WorkerCrash(f"judging the reply of {engine} failed twice: {error}") from error
        except (PoolError, OSError) as error:
            raise Overloaded(f"the reply of {engine} cannot be judged now: {error}") from error
        if done.miscounted is not None and not _has_images(incoming):
            raise UpstreamInvalid(f"{engine} returned a malformed reply: {done.miscounted}")
        payloads, chunks = _numbered(opening.fence, done)
        return ValidatedReply(
            _reply(done, answer, incoming.reply_hash(done.message), requested_at, prompt),
            done.message,
            done.facts,
            done.wire,
            payloads,
            chunks,
            done.places,
            done.output_ids,
        )

    def _want(self, opening: ClaimedTurn, kind: str, ask: EngineRequestOptions) -> Want:
        of_experts = kind == "routed_experts"
        # Rows that a client left out by its own wish are not known to be the parent's.
        on_faith = of_experts and ask.first_row > 0 and not ask.own
        parent = None if on_faith else _parent(opening.session, opening.plan.parent, cast(ReplayKind, kind))
        return Want(
            kind=kind,
            required=kind in self._settings.replay
            and returns(kind, self._settings.upstream_dialect, opening.event.protocol),
            start=ask.first_row if of_experts else 0,
            shape=self._settings.expert_shape if of_experts else None,
            parent=parent,
        )


def is_light(body: Body, new_bytes: int, limit: int) -> bool:
    """Does judging the body, and compressing `new_bytes` of messages, cost no more than `limit` bytes of triples?"""
    weight = len(body) + new_bytes
    if weight <= limit:
        return limit > 0
    if new_bytes > limit or weight > limit * PAYLOAD_LIGHTER:
        return False
    payload = job.base64_bytes(memoryview(body.joined()))
    return weight - payload + payload // PAYLOAD_LIGHTER <= limit


def _has_images(incoming: RequestHistory) -> bool:
    """Engines count an image's tokens in their own ways."""
    return isinstance(incoming, Incoming) and has_more_than_text(incoming.raws)


def _known(opening: ClaimedTurn) -> Known | None:
    parent = decide.token_parent(opening.session, opening.plan)
    return None if parent is None else Known(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)


def _parent(session: Session, number: int, kind: ReplayKind) -> Parent | None:
    """What a new payload's rows are compared with."""
    payload = session.payload(number, kind)
    if payload is None or not payload.chunks:
        return None
    chunks = [Chunk(chunk.start, chunk.rows, chunk.dtype, chunk.size, chunk.hash) for chunk in payload.chunks]
    return Parent(payload.start, payload.stop, payload.row_ids, chunks)


def _numbered(fence: int, done: WorkerResult) -> tuple[tuple[PayloadRef, ...], list[StoredChunk]]:
    """The payloads as the log names them; their new chunks are numbered through within the turn."""
    refs: list[PayloadRef] = []
    rows: list[StoredChunk] = []
    for payload in done.payloads:
        chunks: list[ChunkRef] = []
        for new in payload.new:
            number, chunk = len(rows), new.chunk
            dtype = cast(Dtype, chunk.dtype)
            chunks.append(ChunkRef(fence, number, chunk.start, chunk.rows, dtype, chunk.size, chunk.hash))
            rows.append(StoredChunk(number, payload.kind, chunk.size, chunk.hash, new.frame))
        refs.append(
            PayloadRef(
                kind=cast(ReplayKind, payload.kind),
                start=payload.start,
                stop=payload.stop,
                sent=payload.sent,
                shape=payload.shape,
                chunks=tuple(chunks),
                shared=payload.shared,
            )
        )
    return tuple(refs), rows


def _reply(
    done: WorkerResult, answer: Answer, message_hash: str, requested_at: float, prompt: Prompt | None
) -> decide.Reply:
    """An engine that does not say its weight version has the one that it was known to have."""
    dispatched = UNKNOWN_VERSION if answer.dispatched is None else answer.dispatched
    spans = tuple(
        VersionSpan(dispatched if span.version == UNKNOWN_VERSION else span.version, span.start, span.end)
        for span in done.weight_versions
    )
    return decide.Reply(
        dialect=done.dialect,
        engine=answer.engine,
        base=done.base,
        suffix_tokens=done.suffix_tokens,
        output_tokens=done.output_tokens,
        tokens_hash=done.sequence.hash,
        tokens_text_bytes=done.sequence.text_bytes,
        finish_reason=done.finish_reason,
        weight_versions=spans,
        message_hash=message_hash,
        requested_at=requested_at,
        trimmed=0 if prompt is None else prompt.trimmed,
        cached_tokens=done.cached_tokens,
        sent_ids=prompt is not None,
        dispatched=answer.dispatched,
    )
