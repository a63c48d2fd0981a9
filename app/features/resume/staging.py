"""Stages the tokens of a turn in flight, so that a retry after a crash goes on from them.

    engine's stream ─▶ StagedStream ─▶ a row each TURNLOG_STAGE_TOKENS_S ─▶ deleted by the commit
                                             │
              the server or the engine dies  └─▶ the retry: `restore`, then as after an abort

A row holds the stream's bytes as the engine sent them, and what reads a stream reads them again. Nothing waits for a
row to be written, and a turn that cannot write one goes on without.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from app.domain.request import ChatRequest, value_of
from app.errors import AppError
from app.features.resume import staged_tokens
from app.features.resume.continuation import can_continue
from app.features.resume.staged_tokens import DropStaged, StagedRow, StageTokens, TakeOverStaged
from app.settings import Settings
from app.store.ports import Database, Writer
from app.turn.in_flight import Claimed, EngineCall, Request
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import DialectChoice, asked_for, asks_for_prompt
from app.upstream.generate import GenerateStream, can_translate
from app.upstream.streams import BadStream, Push, ReplyStream
from workers import codec
from workers.codec import CorruptContent
from workers.join_text import CALL, text_of
from workers.reply import LogprobsOf

log = logging.getLogger("turnlog.staging")

AnyStream = ReplyStream | GenerateStream


class StagingCounters(msgspec.Struct):
    """What this process has staged: turns by outcome (`resume.OUTCOMES`), and tokens that were not generated again."""

    turns: Counter[str] = msgspec.field(default_factory=Counter)
    tokens_restored: int = 0


class Staging:
    """Stages the turns of this process, if TURNLOG_STAGE_TOKENS_S says so."""

    def __init__(self, database: Database, writer: Writer, settings: Settings) -> None:
        self.counters = StagingCounters()
        self.is_on = settings.stage_tokens_s > 0
        self._database = database
        self._writer = writer
        self._settings = settings

    def begin(self, turn: Claimed, call: EngineCall, dialect: DialectChoice) -> StagedTurn | None:
        """None if the turn cannot be continued. `dialect` is that of all engines."""
        if not self._can_stage(turn.request, call, dialect):
            self.counters.turns["not_staged"] += 1
            return None
        return StagedTurn(
            turn, call, self._database, self._writer, self._settings, self.counters, is_native=dialect == "sglang"
        )

    def _can_stage(self, request: Request, call: EngineCall, dialect: DialectChoice) -> bool:
        """Do the engines stream the turn with its ids, and can it be continued from them? A stream has no payloads,
        and vLLM's no logprobs of the prompt."""
        if not isinstance(request, ChatRequest) or dialect == "auto":
            return False
        if dialect == "sglang" and (call.ids is None or not can_translate(request.params, call.tools)):
            return False
        if dialect == "vllm" and asks_for_prompt(call.wish):
            return False
        if self._settings.replay or asked_for(request.params) or not can_continue(request):
            return False
        return value_of(request.params.get("n"), "n") in (None, 1)


class StagedTurn:
    """The staged tokens of one turn. `is_native`: they come from SGLang's `/generate`."""

    def __init__(
        self,
        turn: Claimed,
        call: EngineCall,
        database: Database,
        writer: Writer,
        settings: Settings,
        counters: StagingCounters,
        *,
        is_native: bool,
    ) -> None:
        self.counters = counters
        self.is_native = is_native
        self._session_id = turn.flight.session_id
        self._turn = turn.opened.turn
        self._held = (turn.flight.session_id, turn.fence, turn.incarnation, turn.opened_at)
        self._request_hash = _request_hash(turn, call)
        self._database = database
        self._writer = writer
        self._interval_s = settings.stage_tokens_s
        self._rows = self._parts = 0
        self._stream: StagedStream | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written_at = asyncio.get_running_loop().time()
        self._is_lost = False

    @property
    def has_ended(self) -> bool:
        """Has the engine ended the newest generation, and not aborted it?"""
        stream = None if self._stream is None else self._stream.reply_stream
        return stream is not None and stream.has_ended and not stream.was_aborted

    # what the turn generates

    def stream(
        self, push: Push | None, limit: int | None, engine: str, version: str | None, logprobs_of: LogprobsOf | None
    ) -> StagedStream:
        """Begin the next generation, of at most `limit` tokens: reads the stream of this engine, whose weight version
        is `version` if known."""
        reader = GenerateStream(limit) if self.is_native else ReplyStream(push, limit)
        self._stream = StagedStream(self, reader, engine, version, logprobs_of)
        return self._stream

    def grown(self, stream: StagedStream) -> None:
        """Write what has come since the last row, if that is long ago. The end of a reply is not written: the commit is
        about to follow."""
        is_due = asyncio.get_running_loop().time() - self._written_at >= self._interval_s
        if is_due and self._writing is None and not self._is_lost and stream.has_news:
            self._writing = asyncio.create_task(self._write(stream, stream.take()), name="turnlog-staging")

    def cut(self) -> EngineReply | None:
        """The generation that its engine did not finish, as if the engine had aborted it; None if there are no tokens,
        or if all have come."""
        stream = self._stream
        if stream is None or not stream.reply_stream.tokens or stream.reply_stream.has_ended:
            return None
        answer = _aborted(stream.engine, stream.version, stream.logprobs_of, stream.reply_stream)
        self.counters.turns["moved"] += answer is not None
        return answer

    async def end_part(self) -> None:
        """The generation is to be continued by another: all of it is written first."""
        stream, self._stream = self._stream, None
        await self.settled()
        if stream is not None and stream.reply_stream.tokens:
            if not self._is_lost and (stream.has_news or stream.reply_stream.was_aborted):
                await self._write(stream, stream.take())
            self._parts += 1

    async def settled(self) -> None:
        """Wait for the row that is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self, stream: StagedStream, news: bytes) -> None:
        """`news` was taken when the row became due: once this runs, the end may have come. A row that may not have been
        written ends the staging of the turn: none may follow it."""
        data = codec.compress(news)
        row = StagedRow(self._rows, self._parts, stream.engine, stream.version, stream.logprobs_of, data)
        self._rows += 1
        self._written_at = asyncio.get_running_loop().time()
        operation = StageTokens(*self._held, self._request_hash, row)
        try:
            self._is_lost = not await self._writer.submit(operation)
        except AppError as error:
            self._is_lost = True
            log.warning(
                "session %s: the tokens of turn %d are no longer staged: %s", self._session_id, self._turn, error
            )
        finally:
            self._writing = None
        self.counters.turns["staged"] += row.number == 0 and not self._is_lost

    # what an earlier turn has left

    async def restore(self) -> list[EngineReply]:
        """The generations that a turn with the same request has left, as if their engines had aborted them. They are
        this turn's from now on. Raises StoreUnavailable, StoreFull."""
        session_id = self._session_id
        left = await self._database.read(
            lambda connection: staged_tokens.left_by(connection, session_id, self._request_hash),
            session_id=session_id,
        )
        if left is None:
            return []
        take_over = TakeOverStaged(*self._held, left.fence)
        if not await self._writer.submit(take_over):
            return []
        rows = list(_contiguous(left.rows))
        answers = await asyncio.to_thread(_answers, rows, self.is_native)
        if len(rows) < len(left.rows) or not answers:
            await self.drop(f"the tokens staged under fence {left.fence} cannot be continued")
            return []
        self._rows, self._parts = len(rows), rows[-1].part + 1
        return answers

    def restored(self, tokens: int) -> None:
        """The turn goes on from so many tokens."""
        log.info("session %s: turn %d continues from %d staged tokens", self._session_id, self._turn, tokens)
        self.counters.turns["restored"] += 1
        self.counters.tokens_restored += tokens

    async def drop(self, why: str) -> None:
        """The turn is generated anew. Raises StoreUnavailable, StoreFull."""
        log.warning("session %s: turn %d is generated from the start: %s", self._session_id, self._turn, why)
        self.counters.turns["anew"] += 1
        self._rows = self._parts = 0
        await self._writer.submit(DropStaged(*self._held))


class StagedStream:
    """Reads one generation's stream, and keeps its bytes until they are written."""

    def __init__(
        self,
        turn: StagedTurn,
        reply_stream: AnyStream,
        engine: str,
        version: str | None,
        logprobs_of: LogprobsOf | None,
    ) -> None:
        self.reply_stream = reply_stream
        self.engine = engine
        self.version = version
        self.logprobs_of = logprobs_of
        self._turn = turn
        self._pieces: list[bytes] = []
        self._staged = 0

    @property
    def is_live(self) -> bool:
        return self.reply_stream.is_live

    @property
    def has_news(self) -> bool:
        """Are there tokens that are not written, and more to come?"""
        return self.reply_stream.tokens > self._staged and not self.reply_stream.has_ended

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.reply_stream.feed(piece)
        self._turn.grown(self)

    def reply(self) -> bytes:
        return self.reply_stream.reply()

    def take(self) -> bytes:
        """The bytes since the last call."""
        pieces, self._pieces = self._pieces, []
        self._staged = self.reply_stream.tokens
        return b"".join(pieces)


def _request_hash(turn: Claimed, call: EngineCall) -> str:
    """What must be the same for a turn to go on from another's tokens: the body, the place, the agent, and what the
    engine is asked for besides messages."""
    parts = [turn.opened.body_hash, str(turn.plan.parent), turn.opened.agent_id or ""]
    parts.append(hashlib.sha256(call.params).hexdigest())
    parts += [blob.hash for blob in call.shared if blob.kind == "tools"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _contiguous(rows: Sequence[StagedRow]) -> Iterator[StagedRow]:
    """Up to the first that is missing: a crash of PostgreSQL may have undone one, and a later one was written."""
    return (row for number, row in enumerate(rows) if row.number == number)


def _answers(rows: Sequence[StagedRow], is_native: bool) -> list[EngineReply]:
    """The generations in these rows; none if one of them cannot be read or continued."""
    answers = []
    for _, part in itertools.groupby(rows, lambda row: row.part):
        of_part = list(part)
        stream: AnyStream = GenerateStream() if is_native else ReplyStream()
        try:
            for row in of_part:
                stream.feed(codec.decompress(row.data))
        except CorruptContent:
            return []
        except BadStream:
            pass  # The engine's own end of it, after the tokens.
        answer = _aborted(of_part[0].engine, of_part[0].version, of_part[0].logprobs_of, stream)
        if answer is None:
            return []
        answers.append(answer)
    return answers


def _aborted(engine: str, version: str | None, logprobs_of: LogprobsOf | None, stream: AnyStream) -> EngineReply | None:
    """None where a tool call has begun in a form that only the engine can read: both of its halves would be text."""
    has_calls, body = stream.has_calls, stream.begun()
    if has_calls and CALL not in text_of(body):
        return None
    return EngineReply(
        200,
        [("content-type", "application/json")],
        Body([body]),
        engine=engine,
        dispatched=version,
        known=version,
        logprobs_of=logprobs_of,
        is_native=isinstance(stream, GenerateStream),
    )
