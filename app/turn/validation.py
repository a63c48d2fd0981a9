"""Validates an engine's reply, inline or in a worker process, and numbers its payloads' chunks.

Sending a body to another process takes about a third of a millisecond, as long as validating some tens of KiB inline;
smaller ones are validated inline. The cost is in logprob triples and ids; base64 payloads are cheap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

from app.domain import bounds, decide
from app.domain.calls import sampled_calls
from app.domain.events import ChunkRef, Dtype, PayloadRef, ReplayKind, VersionSpan
from app.domain.history import Incoming
from app.domain.reply import ValidatedReply
from app.domain.request import has_more_than_text
from app.domain.session import Session
from app.errors import Overloaded, TokenPrefixMismatch, UpstreamInvalid, WorkerCrash
from app.fleet.engines import Answer
from app.settings import Settings
from app.store.log import StoredChunk
from app.turn.engine_call import EngineCall
from app.turn.in_flight import InFlightTurn, RequestHistory
from app.upstream.body import Body
from app.upstream.dialects import returns
from workers import job
from workers.job import Job, LongValues, WorkerResult
from workers.parse import REPLAY, KnownTokens, PromptDiffers, Rejected
from workers.parse_parts import UNKNOWN_VERSION
from workers.parse_prompt import KnownText
from workers.payloads import Chunk, Parent, Want
from workers.pool import Crashed, Pool, PoolError

LIGHTER = 16
"""How much cheaper a byte of base64 payload, or of the ids of the parent's tokens, is to validate than one of triples
(measured: 0.3, 0.5 and 5 ms per MiB)."""


class ReplyValidator:
    """Validates what engines return."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings

    async def validate(
        self, turn: InFlightTurn, call: EngineCall, answer: Answer, new: Sequence[bytes]
    ) -> ValidatedReply:
        """`new` are the messages that are stored with it. Raises UpstreamInvalid, TokenPrefixMismatch, WorkerCrash,
        Overloaded."""
        prompt = call.prompt
        reply = answer.reply
        work = Job(
            dialect=self._settings.upstream_dialect,
            known=_known(turn) if prompt is None else prompt.known,
            wants=[self._want(turn, kind, call) for kind in REPLAY],
            messages=list(new),
            headers=reply.headers,
            status=reply.status,
            rid=call.rid,
            own=call.own,
            protocol=call.shape,
            sent=b"" if prompt is None else prompt.text + b",",
            is_part=call.is_part,
            ids_field=call.ids_field if call.ids_field not in (None, "input_ids") else "",
        )
        known = None if work.known is None or work.sent else turn.entry.bodies.text_of(work.known)
        result, text = await self._run_job(work, answer, sum(map(len, new)), known)
        if result.miscounted is not None and not _has_images(turn.history):
            raise UpstreamInvalid(f"{answer.engine} returned a malformed reply: {result.miscounted}")
        size = len(result.message)
        if size >= self._settings.max_request_bytes or (size > bounds.FEW and bounds.is_too_much(result.message)):
            raise UpstreamInvalid(f"{answer.engine} returned a message that is too large for a request to send it back")
        message_hash, calls_hash, bare_hash = turn.history.reply_hashes(result.message)
        return ValidatedReply(
            result,
            engine=answer.engine,
            requested_at=turn.requested_at,
            message_hash=message_hash,
            calls_hash=calls_hash,
            bare_hash=bare_hash,
            calls=() if calls_hash is None else sampled_calls(result.message),
            weight_versions=_versions(result, answer.dispatched),
            payloads=_payload_refs(turn.fence, result),
            trimmed=0 if prompt is None else prompt.trimmed,
            sent_ids=prompt is not None,
            dispatched=answer.dispatched,
            logprobs_of=answer.logprobs_of,
            text=text,
        )

    async def _run_job(
        self, work: Job, answer: Answer, new_bytes: int, text: KnownText | None
    ) -> tuple[WorkerResult, Callable[[], KnownText] | None]:
        """Run the job inline if the reply is light, else in a worker. `text` is that of the known tokens; inline, what
        makes that of all tokens is returned."""
        engine, body = answer.engine, answer.reply.body
        try:
            known_bytes = 0 if work.known is None else work.known.text_bytes
            weighed = Weighed(body, new_bytes, self._settings.inline_max_bytes, known_bytes, text)
            if weighed.is_light:
                return job.work_here(work, memoryview(body.joined()), weighed.long_values)
            return job.decode_done(await self._pool.run(job.encode(work), *body.pieces)), None
        except PromptDiffers as error:
            raise TokenPrefixMismatch(f"{engine} reports another prompt than it was sent: {error}") from error
        except Rejected as error:
            raise UpstreamInvalid(f"{engine} returned a malformed reply: {error}") from error
        except Crashed as error:
            raise WorkerCrash(f"judging the reply of {engine} failed twice: {error}") from error
        except (PoolError, OSError) as error:
            raise Overloaded(f"the reply of {engine} cannot be judged now: {error}") from error

    def _want(self, turn: InFlightTurn, kind: str, call: EngineCall) -> Want:
        of_experts = kind == "routed_experts"
        # If the client left out rows itself, they are not known to be the parent's.
        is_unchecked = of_experts and call.first_row > 0 and not call.own
        parent = None if is_unchecked else _parent(turn.session, turn.plan.parent, cast(ReplayKind, kind))
        return Want(
            kind=kind,
            required=kind in self._settings.replay and returns(kind, self._settings.upstream_dialect, call.shape),
            start=call.first_row if of_experts else 0,
            shape=self._settings.expert_shape if of_experts else None,
            parent=parent,
        )


class Weighed:
    """Does validating a body and compressing `new_bytes` of messages cost at most as much as `limit` bytes of triples?

    `known_bytes` are those of the ids that the prompt is expected to begin with, and `text` may be their text.
    `long_values` are the body's, if they decided it.
    """

    def __init__(self, body: Body, new_bytes: int, limit: int, known_bytes: int, text: KnownText | None = None) -> None:
        weight = len(body) + new_bytes
        self.long_values: LongValues | None = None
        self.is_light = weight <= limit and limit > 0
        if weight <= limit or new_bytes > limit or weight > limit * LIGHTER:
            return
        self.long_values = found = job.find_long_values(memoryview(body.joined()), text)
        light = found.base64_bytes
        if found.prompt is not None:
            light += min(found.prompt.end - found.prompt.start, known_bytes)
        self.is_light = weight - light + light // LIGHTER <= limit


def _has_images(history: RequestHistory) -> bool:
    """Engines count image tokens differently."""
    return isinstance(history, Incoming) and has_more_than_text(history.raws)


def _known(turn: InFlightTurn) -> KnownTokens | None:
    parent = decide.token_parent(turn.session, turn.plan)
    return None if parent is None else KnownTokens(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)


def _parent(session: Session, number: int, kind: ReplayKind) -> Parent | None:
    """The parent's payload, with whose rows a new payload's are compared."""
    payload = session.payload(number, kind)
    if payload is None or not payload.chunks:
        return None
    chunks = [Chunk(chunk.start, chunk.rows, chunk.dtype, chunk.size, chunk.hash) for chunk in payload.chunks]
    return Parent(payload.start, payload.stop, payload.row_ids, chunks)


def _payload_refs(fence: int, result: WorkerResult) -> tuple[PayloadRef, ...]:
    """The payloads as stored in events; their new chunks are numbered within the turn."""
    numbers = itertools.count()
    return tuple(
        PayloadRef(
            kind=cast(ReplayKind, payload.kind),
            start=payload.start,
            stop=payload.stop,
            sent=payload.sent,
            shape=payload.shape,
            chunks=tuple(_chunk_ref(fence, next(numbers), new.chunk) for new in payload.new),
            shared=payload.shared,
        )
        for payload in result.payloads
    )


def _chunk_ref(fence: int, number: int, chunk: Chunk) -> ChunkRef:
    return ChunkRef(fence, number, chunk.start, chunk.rows, cast(Dtype, chunk.dtype), chunk.size, chunk.hash)


def stored_chunks(result: WorkerResult) -> list[StoredChunk]:
    """The payloads' new chunks, in the order of their numbers."""
    new = [(payload.kind, one) for payload in result.payloads for one in payload.new]
    return [
        StoredChunk(number, kind, one.chunk.size, one.chunk.hash, one.frame) for number, (kind, one) in enumerate(new)
    ]


def _versions(result: WorkerResult, dispatched: str | None) -> tuple[VersionSpan, ...]:
    """Tokens without a reported weight version get the one known at dispatch."""
    known = UNKNOWN_VERSION if dispatched is None else dispatched
    return tuple(
        VersionSpan(known if span.version == UNKNOWN_VERSION else span.version, span.start, span.end)
        for span in result.weight_versions
    )
