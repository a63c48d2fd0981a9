"""Writes sessions with realistic turns directly into a store, for benchmarks that begin with a full store."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from app.composition import store_points
from app.domain.events import BlobRef, RewardAssigned, SessionConfig, SessionCreated, TurnCommitted, TurnOpened
from app.domain.history import canonical_hash, decode_message
from app.sessions.recovery import register
from app.store.engine import Database
from app.store.log import Operation, StoredBlob
from app.store.log_sessions import AssignReward, Close, Create
from app.store.log_turns import Claim, Commit, Known
from app.store.writer import apply_all
from ops.bench.load import opening_messages
from workers import codec
from workers.codec import TOKEN_BYTES, Exchange, StoredTokens
from workers.parse import token_text
from workers.parse_parts import VersionSpan

SESSIONS_AT_ONCE = 250
"""Sessions of one transaction, which has a turn of each."""

CONFIG = SessionConfig(rollback_window=1)
PROMPT_TOKENS, OUTPUT_TOKENS, QUESTION_BYTES = 100, 20, 512
"""Size of a turn with arbitrary content: tokens of its prompt and output, bytes of its question."""

_HASH = "0" * 32


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn as stored: its two frames, and the values that the log has of them.

    `text` is the text of its token ids. `messages` are the request's new messages and `message` is the reply's, as raw
    JSON. `hashes` are the canonical hashes of all these messages.
    """

    tokens: bytes | None
    exchange: bytes
    messages: Sequence[bytes]
    message: bytes
    hashes: tuple[str, ...]
    text: bytes
    suffix_tokens: int
    output_tokens: int
    content_hash: str
    finish_reason: str

    @classmethod
    def of(cls, tokens: StoredTokens, exchange: Exchange, finish_reason: str = "stop") -> StoredTurn:
        packed = codec.pack_turn(msgspec.structs.replace(exchange, tokens=tokens))
        return cls(
            *packed,
            messages=exchange.messages,
            message=exchange.message,
            hashes=tuple(_canonical(raw) for raw in (*exchange.messages, exchange.message)),
            text=token_text(memoryview(tokens.suffix_ids + tokens.output_ids).cast("i")),
            suffix_tokens=len(tokens.suffix_ids) // TOKEN_BYTES,
            output_tokens=len(tokens.output_ids) // TOKEN_BYTES,
            content_hash=codec.content_hash(*packed),
            finish_reason=finish_reason,
        )


class StoredSession(msgspec.Struct, frozen=True):
    """A session to write. Each turn continues the previous one."""

    session_id: str
    turns: Sequence[StoredTurn]


async def fill(url: str, sessions: int, turns: int, *, ended: bool = False) -> None:
    """Write sessions `filled-0` and so on, which all have the same turns. Only their number matters, not their
    content."""
    made = [_plain_turn(number) for number in range(turns)]
    every = (StoredSession(f"filled-{number}", made) for number in range(sessions))
    database = Database(url, points=store_points())
    await database.open()
    try:
        await write_sessions(database, every, b'{"model":"simulator"}', ended=ended)
    finally:
        await database.close()


def _plain_turn(number: int) -> StoredTurn:
    question = opening_messages(QUESTION_BYTES, seed=number)
    answer = b'{"role":"assistant","content":"It is so."}'
    tokens = StoredTokens(_ids(PROMPT_TOKENS), _ids(OUTPUT_TOKENS), os.urandom(8 * OUTPUT_TOKENS))
    return StoredTurn.of(tokens, Exchange(question, answer, b'{"choices":[{"message":' + answer + b"}]}", []))


def _ids(count: int) -> bytes:
    """Random token ids of five digits, as int32."""
    return array("i", (secrets.randbelow(90_000) + 10_000 for _ in range(count))).tobytes()


async def write_sessions(database: Database, sessions: Iterable[StoredSession], params: bytes, *, ended: bool) -> None:
    """Write the sessions, many at once: their first turns, then their second ones, and so on, as if they ran at the
    same time. `params` is a JSON object, the same for every request.

    With `ended`, the sessions are closed and have a reward.
    """
    incarnation = await register(database)
    every = iter(sessions)
    while part := list(itertools.islice(every, SESSIONS_AT_ONCE)):
        logs = [_Log(session, incarnation, time.time(), params) for session in part]
        await _write(database, [log.created() for log in logs])
        for number in range(max(len(session.turns) for session in part)):
            steps = [log.turn() for log in logs if number < len(log.session.turns)]
            await _write(database, [claim for claim, _ in steps], [commit for _, commit in steps])
        if ended:
            await _write(database, [operation for log in logs for operation in log.ended()])


async def _write(database: Database, *batches: Sequence[Operation[Any]]) -> None:
    await database.write(lambda tx: [apply_all(tx, batch) for batch in batches], durable=False)


def _blob(number: int, kind: str, raw: bytes) -> StoredBlob:
    return StoredBlob(number, kind, len(raw), hashlib.sha256(raw).hexdigest(), codec.compress(raw))


class _Log:
    """The running totals of a session's log, turn by turn."""

    def __init__(self, session: StoredSession, incarnation: int, at: float, params: bytes) -> None:
        self.session = session
        self._session_id = session.session_id
        self._incarnation = incarnation
        self._at = at
        self._params = _blob(0, "params", params)
        self._turn = self._messages = self._tokens = self._text_bytes = 0
        self._text = hashlib.sha256()
        self._spelling = hashlib.sha256()

    def created(self) -> Create:
        event = SessionCreated(CONFIG, body_hash=_HASH)
        return Create(self._session_id, self._at, event, _HASH, None, None)

    def ended(self) -> tuple[AssignReward, Close]:
        reward = RewardAssigned(float(len(self._session_id) % 2))
        return AssignReward(self._session_id, self._at, reward), Close(self._session_id, self._at)

    def turn(self) -> tuple[Claim, Commit]:
        """The claim and the commit of the next turn. The log has one event for the creation and two for each turn."""
        stored = self.session.turns[self._turn]
        self._turn += 1
        fence = 2 * self._turn
        opened = TurnOpened(self._turn, self._turn - 1, self._incarnation, body_hash=_HASH)
        for raw in stored.messages:
            self._spelling.update(raw + b",")
        self._text.update(stored.text)
        self._text_bytes += len(stored.text)
        event = self._committed(stored, fence)
        self._spelling.update(stored.message + b",")
        self._messages += len(stored.messages) + 1
        self._tokens += stored.suffix_tokens + stored.output_tokens
        blobs = [self._params] if event.new_blobs else []
        held = (self._session_id, fence, self._incarnation, self._at)
        known = Known(fence, self._at, opened.turn - 1)
        size = len(stored.tokens or b"") + len(stored.exchange)
        return (
            Claim(self._session_id, Known(fence - 1, self._at, opened.turn - 1), self._at, opened, 8.0),
            Commit(*held, self._at, known, [event], stored.tokens, stored.exchange, blobs, size=size),
        )

    def _committed(self, stored: StoredTurn, fence: int) -> TurnCommitted:
        params = BlobRef(self._params.number, "params", self._params.size, self._params.hash)
        return TurnCommitted(
            turn=self._turn,
            parent=self._turn - 1,
            fence=fence,
            segment=0,
            base_messages=self._messages,
            new_messages=len(stored.messages),
            message_hashes=stored.hashes,
            client_hash=self._spelling.copy().hexdigest()[:32],
            base_tokens=self._tokens,
            suffix_tokens=stored.suffix_tokens,
            output_tokens=stored.output_tokens,
            tokens_hash=self._text.hexdigest(),
            tokens_text_bytes=self._text_bytes,
            body_hash=_HASH,
            content_hash=stored.content_hash,
            params=params.number,
            dialect="sglang",
            engine="http://127.0.0.1:1",
            weight_versions=(VersionSpan("default", 0, stored.output_tokens),),
            requested_at=self._at,
            finish_reason=stored.finish_reason,
            new_blobs=(params,) if self._turn == 1 else (),
        )


def _canonical(raw: bytes) -> str:
    return canonical_hash(decode_message(raw, "a message"), CONFIG.matcher)
