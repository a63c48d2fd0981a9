"""Validates an engine's reply, inline or in a worker process, and numbers its payloads' chunks.

Sending a body to another process takes about a third of a millisecond, as long as validating some tens of KiB inline;
smaller ones are validated inline. The cost is in logprob triples and ids; base64 payloads are cheap.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from app.domain import bounds, decide
from app.domain.calls import sampled_calls
from app.domain.events import ChunkRef, Dtype, PayloadRef, ReplayKind
from app.domain.history import RequestHistory
from app.domain.request import has_more_than_text
from app.domain.rules import EMPTY_REPLY
from app.domain.session import Session
from app.errors import GenerationFailed, Overloaded, TokenPrefixMismatch, UpstreamInvalid, WorkerCrash
from app.settings import Settings
from app.store.log import StoredChunk
from app.turn.in_flight import Claimed, EngineCall, TurnHistory
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import returns
from app.upstream.odd_replies import Failure, failure_in, with_text
from workers import job
from workers.parse import REPLAY, KnownTokens, PromptDiffers, Rejected
from workers.parse_prompt import LONG_PROMPT, KnownText, token_text
from workers.payloads import Chunk, Parent, PayloadSpec
from workers.pool import Crashed, Pool, PoolError
from workers.reply import UNKNOWN_VERSION, Job, Read, ValidatedReply, VersionSpan

LIGHTER = 16
"""How much cheaper a byte of base64 payload, or of the ids of the parent's tokens, is to validate than one of triples
(measured: 0.3, 0.5 and 5 ms per MiB)."""


class ReplyValidator:
    """Validates what engines return."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings

    async def validate(
        self, turn: Claimed, call: EngineCall, answer: EngineReply, new: Sequence[bytes]
    ) -> ValidatedReply:
        """`new` are the messages that are stored with it. Raises UpstreamInvalid, TokenPrefixMismatch, WorkerCrash,
        Overloaded."""
        prompt = call.prompt
        settings = self._settings
        known = None if prompt is None else prompt.known
        if prompt is None and (parent := decide.token_parent(turn.session, turn.plan)) is not None:
            known = KnownTokens(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)
        text, bodies = None, turn.entry.bodies
        if known is not None and prompt is None and bodies.size:
            text = bodies.text_of(known)
        work = Job(
            dialect=settings.upstream_dialect,
            known=known,
            payload_specs=[],
            messages=list(new),
            headers=answer.headers,
            status=answer.status,
            rid=call.rid,
            own=call.own + call.stream,
            protocol=call.shape,
            sent=b"" if prompt is None else prompt.text + b",",
            is_part=call.is_part,
            ids_field=call.ids_field if call.ids_field not in (None, "input_ids") else "",
            wish=call.wish,
            beginning=b"" if call.is_part else turn.request.beginning or b"",
        )
        read, new_bytes = None, sum(map(len, new))
        if not settings.replay and answer.body.size + new_bytes <= settings.inline_max_bytes:
            try:
                read = job.read(work, answer.body.joined(), text)
            except Rejected:
                read = None  # That is told below, or mended.
        if read is None or read.reply.places:
            specs = [self._payload_spec(turn, kind, call) for kind in REPLAY]
            work = msgspec.structs.replace(work, payload_specs=specs)
            read = await self.by_all_rules(work, answer, new_bytes, text)
        reply = read.reply
        reply.text, reply.plain = read.text, read.plain
        if reply.payloads and turn.session.config.evaluation:
            reply.payloads = []  # An engine that was not asked for them may send some.
        if reply.miscounted is not None and not _has_images(turn.history):
            raise UpstreamInvalid(f"{answer.engine} returned a malformed reply: {reply.miscounted}")
        self.add_hashes(turn, answer.engine, reply)
        # Tokens without a reported weight version get the one known at dispatch.
        if answer.dispatched is not None and any(one.version == UNKNOWN_VERSION for one in reply.weight_versions):
            reply.weight_versions = tuple(
                [
                    VersionSpan(answer.dispatched, span.start, span.end) if span.version == UNKNOWN_VERSION else span
                    for span in reply.weight_versions
                ]
            )
        if prompt is not None:
            reply.sent_ids, reply.trimmed = True, prompt.trimmed
        reply.dispatched = answer.dispatched
        reply.logprobs_of = reply.logprobs_of or answer.logprobs_of
        return reply

    def add_hashes(self, turn: Claimed, engine: str, reply: ValidatedReply) -> None:
        """What a turn says of its message and of who was asked. Raises UpstreamInvalid."""
        size = len(reply.message)
        if size >= self._settings.max_request_bytes or (size > bounds.FEW and bounds.is_too_much(reply.message)):
            raise UpstreamInvalid(f"{engine} returned a message that is too large to be sent back in a request")
        reply.engine, reply.requested_at = engine, turn.requested_at
        reply.message_hash, reply.calls_hash, reply.bare_hash = turn.history.reply_hashes(reply.message)
        if reply.rest:
            # Its client may send back what came of the reply alone, as the reply's other spelling.
            own, _, bare = turn.history.reply_hashes(reply.rest)
            reply.bare_hash = None if own == EMPTY_REPLY else bare or own
        if reply.calls_hash is not None:
            reply.calls = sampled_calls(reply.message)

    async def by_all_rules(self, work: Job, answer: EngineReply, new_bytes: int, text: KnownText | None) -> Read:
        """Validate inline if the reply is light, else in a worker. `text` is that of the known tokens.

        A content in text parts becomes text, in the answer too. Raises as `validate`, GenerationFailed.
        """
        refusal: Rejected | None = None
        try:
            try:
                return await self._judged(work, answer, new_bytes, text)
            except Rejected as error:
                mended, failure = await asyncio.to_thread(_looked_at, answer.body.joined())
                refusal = error
            if failure is not None:
                raise GenerationFailed.of(answer.engine, *failure) from refusal
            try:
                if mended is not None:
                    answer.body = Body([mended])
                    return await self._judged(work, answer, new_bytes, text)
            except Rejected as error:
                refusal = error
            raise UpstreamInvalid(f"{answer.engine} returned a malformed reply: {refusal}") from refusal
        finally:
            del refusal  # Its traceback has this frame: it would hold itself, and the reply.

    async def _judged(self, work: Job, answer: EngineReply, new_bytes: int, text: KnownText | None) -> Read:
        engine, body, limit = answer.engine, answer.body, self._settings.inline_max_bytes
        try:
            weighed = Weighed(body, new_bytes, limit, work.known, text)
            if weighed.is_light and body.size + new_bytes <= limit:
                return job.read(work, body.whole(), text)
            # What is light without its long values need not be light as a whole, as which it is read to be refused.
            if weighed.is_light and (read := job.read_cut(work, body.whole(), text, weighed.long_values)) is not None:
                return read
            result = job.decode_done(await self._pool.run(job.encode(work), *body.pieces))
            return Read(result, None if work.sent else text_in(body, result))
        except PromptDiffers as error:
            raise TokenPrefixMismatch(f"{engine} reports another prompt than the one it was sent: {error}") from error
        except Crashed as error:
            raise WorkerCrash(f"validating the reply of {engine} failed twice: {error}") from error
        except (PoolError, OSError) as error:
            raise Overloaded(f"the reply of {engine} cannot be validated now: {error}") from error

    def _payload_spec(self, turn: Claimed, kind: ReplayKind, call: EngineCall) -> PayloadSpec:
        of_experts = kind == "routed_experts"
        # If the client left out rows itself, they are not known to be the parent's.
        is_unchecked = of_experts and call.first_row > 0 and not call.own
        session, number = turn.session, turn.plan.parent
        parent = None if is_unchecked else _parent(session, number, kind)
        own = session.turn(number).token_count - 1 if number else 0
        return PayloadSpec(
            kind=kind,
            required=kind in self._settings.replay
            and not session.config.evaluation
            and returns(kind, self._settings.upstream_dialect, call.shape),
            start=call.first_row if of_experts else 0,
            shape=self._settings.expert_shape if of_experts else None,
            parent=parent,
            own=own if session.config.retain == "sampled" else None,
        )


class Weighed:
    """Does validating a body and compressing `new_bytes` of messages cost at most as much as `limit` bytes of triples?

    The prompt is expected to begin with `known`, whose text may be `text`. `long_values` are the body's, if they
    decided it.
    """

    def __init__(
        self, body: Body, new_bytes: int, limit: int, known: KnownTokens | None, text: KnownText | None
    ) -> None:
        weight = body.size + new_bytes
        self.long_values: job.LongValues | None = None
        self.is_light = weight <= limit and limit > 0
        least = weight if text is None else weight - text.known.text_bytes
        if weight <= limit or new_bytes > limit or least > limit * LIGHTER:
            return
        self.long_values = found = job.find_long_values(body.whole(), text)
        light = found.base64_bytes
        if found.begun is not None:
            weight -= found.begun.known.text_bytes  # To compare them costs a thousandth.
        elif found.prompt is not None and known is not None:
            light += min(found.prompt.size, known.text_bytes)
        self.is_light = weight - light + light // LIGHTER <= limit


def text_in(body: Body, result: ValidatedReply) -> Callable[[], KnownText | None] | None:
    """What makes the text of a reply's tokens, if the prompt's ids are long; a worker has validated it."""
    place = result.prompt
    if place is None or place.size <= LONG_PROMPT:
        return None

    def text() -> KnownText | None:
        ids = b"".join(body.slices(place.start + 1, place.end - 1)).translate(None, b" ")
        whole = ids + b"," + token_text(memoryview(result.output_ids).cast("i"))
        hasher = hashlib.sha256(whole)
        known = result.sequence
        return KnownText(known, bytearray(whole), hasher) if hasher.hexdigest() == known.hash else None

    return text


def _looked_at(body: bytes) -> tuple[bytes | None, Failure | None]:
    """What is made of a reply that was refused; runs on a thread."""
    return with_text(body), failure_in(body)


def _has_images(history: TurnHistory) -> bool:
    """Engines count image tokens differently."""
    return isinstance(history, RequestHistory) and has_more_than_text(history.raws)


def _parent(session: Session, number: int, kind: ReplayKind) -> Parent | None:
    """The parent's payload, with whose rows a new payload's are compared."""
    payload = session.payload(number, kind)
    if payload is None or not payload.chunks:
        return None
    chunks = [Chunk(chunk.start, chunk.rows, chunk.dtype, chunk.size, chunk.hash) for chunk in payload.chunks]
    return Parent(payload.start, payload.stop, payload.row_ids, chunks)


def payload_refs(fence: int, result: ValidatedReply) -> tuple[PayloadRef, ...]:
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


def stored_chunks(result: ValidatedReply) -> list[StoredChunk]:
    """The payloads' new chunks, in the order of their numbers."""
    new = [(payload.kind, new_chunk) for payload in result.payloads for new_chunk in payload.new]
    return [
        StoredChunk(number, kind, new_chunk.chunk.size, new_chunk.chunk.hash, new_chunk.frame)
        for number, (kind, new_chunk) in enumerate(new)
    ]
