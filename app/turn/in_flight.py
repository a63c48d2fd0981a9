"""What there is of a turn, phase by phase, the clients that wait for it, and the stages in which it spends its time.

InFlightTurn    a request, its clients, and how its work is cancelled: from its arrival to its reply
Placed          where it joins its session: it was read and compared with the history
Claimed         its claim, a fence, is in the store; `EngineCall` is what an engine is asked for it
Generated       an engine's answer, with the reply that was found valid
TurnCommitted   the event of the log (`domain.events`): it is on disk
TurnReply       what its client gets
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, Protocol

import msgspec

from app.domain.completion import RequestPrompt
from app.domain.decide import TurnBlobs
from app.domain.events import (
    DEFAULT_RUN,
    AffinityBound,
    AffinityReleased,
    BlobRef,
    EngineShape,
    GivenIds,
    History,
    Recorded,
    Timing,
    TurnOpened,
)
from app.domain.history import RequestHistory
from app.domain.request import ChatRequest, CompletionRequest, IdsField
from app.domain.rules import Plan
from app.domain.session import Session
from app.errors import AppError, ClientGone, SessionClosed
from app.fleet.engines import PATHS, EngineOrder
from app.sessions.cache import CacheEntry
from app.store.log import StoredBlob
from app.tito.normalise import EngineDialect
from app.turn.live import LiveStream
from app.upstream import inference
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import streamed
from app.upstream.generate import GENERATE
from app.upstream.headers import Headers
from app.upstream.streams import IDS_STREAM, Push, StreamReader
from workers import codec
from workers.parse import KnownTokens
from workers.reply import LogprobsOf, ValidatedReply
from workers.top_logprobs import LogprobWish

CancelReason = Literal["session_closed", "disconnect", "limit"]

AwayCause = Literal["listed", "draining", "dead", "expired"]

Request = ChatRequest | CompletionRequest

TurnHistory = RequestHistory | RequestPrompt
"""A request's history: a chat's messages, or a completion's prompt."""


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Connection(Protocol):
    """A client's connection."""

    def is_gone(self) -> bool:
        """Has the client ended it, even if its request has not been read up to that end?"""
        ...

    def data_age_s(self) -> float | None:
        """How long ago the client's last byte came; None if that is not known."""
        ...


class EngineControl(Protocol):
    """A client's own say over the engine of its turn (session control)."""

    async def prepare(self, engine: str) -> None:
        """Prepare `engine` before the turn is sent to it. Raises NotSent, SessionOpenFailed, StoreUnavailable."""

    def binding(self, session: Session, engine: str) -> AffinityBound | AffinityReleased | None:
        """The binding event of the turn's commit, for the engine that answered."""


class EngineChoice(msgspec.Struct):
    """The engines in the `order` in which they are tried; `away` says why the session's own is not the first. `control`
    is set if the client chose the engine."""

    order: EngineOrder
    away: AwayCause | None = None
    control: EngineControl | None = None


OpenStagedStream = Callable[[Push | None, int | None, str, str | None, LogprobsOf | None], StreamReader]
"""`fleet.engines.OpenStream` with what takes the deltas, and the most tokens, before it."""


IdsOrigin = Literal["built", "client", "continued"]
"""Where a chat's ids come from, which decides what becomes of them at an engine that takes none.

    built       from the messages: the engine renders these instead, and the turn is captured
    client      the client's own: 400 `unsupported`
    continued   of a generation that was aborted: it cannot go on (TakesNoIds)
"""


class PromptIds(msgspec.Struct, frozen=True):
    """A prompt's ids as decimal text, joined by commas. It begins with `known` if it continues the
    parent's tokens.

    `trimmed`: how many of the parent's last tokens are left out. `extends`: the prompt was built on
    the stored tokens and must begin with them.
    """

    text: bytes
    known: KnownTokens | None
    trimmed: int = 0
    extends: bool = False


class SharedBlob(msgspec.Struct, frozen=True):
    """Parameters, tools, an echo or an image, which a session stores once however many turns repeat
    them.

    `frame` is the compressed content; None where the session was seen to have it already.
    """

    kind: Literal["params", "tools", "echo", "image"]
    raw: bytes
    hash: str
    frame: bytes | None


class EngineCall(msgspec.Struct):
    """A request to an engine. `params` is a JSON object, `tools` raw JSON, `messages` those of a
    chat as engines take them, `text` the prompt of a completion.

    `own` are raw JSON members that Turnlog adds to this request only, each after a comma;
    `first_row` is the first row of `routed_experts` asked for. `ids` are the prompt's, if they are
    known; `prompt` is None if the engine that was asked last takes no ids, and `ids_field` the field
    of a chat that it takes them from. `is_part`: it continues a generation. `is_native`: that engine
    got a request of `/generate`, which `wants_native` asks for; `is_inference`: one of vLLM's
    `/inference/v1/generate`. `stream` are the members that ask for a stream, if one is wanted,
    `push` takes its deltas, and `open_stream` makes its reader if that is not the usual one. `wish`:
    what else of the logprobs the reply must have.

    What is stored of it: `new` are the messages that are not stored yet, `stored` these with
    references to their images. `shared` are the blobs that the session may not have.
    `odd_arguments`: a new message has a call whose arguments are no JSON object. `tool_errors`: new
    messages that are results of failed calls. `left_out`: what of the request is not sent
    (`app.domain.left_out`).
    """

    shape: EngineShape
    params: bytes
    tools: bytes | None
    messages: Sequence[bytes | memoryview]
    text: str | None
    rid: str
    ids: PromptIds | None = None
    origin: IdsOrigin = "built"
    own: bytes = b""
    first_row: int = 0
    is_part: bool = False
    wants_native: bool = False
    prompt: PromptIds | None = None
    ids_field: IdsField | None = None
    is_native: bool = False
    stream: bytes = b""
    is_inference: bool = False
    push: Push | None = None
    open_stream: OpenStagedStream | None = None
    wish: LogprobWish | None = None
    new: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()
    shared: Sequence[SharedBlob] = ()
    odd_arguments: bool = False
    tool_errors: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def sent_params(self) -> bytes:
        return streamed(self.params) if self.stream == IDS_STREAM else self.params

    @property
    def path(self) -> str:
        """The route of the body that was made last."""
        return GENERATE if self.is_native else inference.GENERATE if self.is_inference else PATHS[self.shape]


class TemplateInputs(msgspec.Struct, frozen=True):
    """What a request's chat template renders besides messages. `offered` are the tools that it shows, `dialect` that of
    the engines, which render so."""

    tools: Sequence[Any] | None
    choice: Any
    offered: Sequence[Any] | None
    arguments: Mapping[str, Any]
    dialect: EngineDialect


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A request that was read for `session`, the state of the session in which it joins `history`.

    If the last message is an assistant's, `partial_reply` is that message and `partial_hash` the hash of the body
    without it. `template` is None unless the prompt is rendered here. `large` is the body's size in bytes if it must
    not be processed on the event loop, else 0.
    """

    flight: InFlightTurn
    request: Request
    large: int
    session: Session
    history: TurnHistory
    partial_reply: Mapping[str, Any] | None = None
    partial_hash: str | None = None
    template: TemplateInputs | None = None


class Claimed(msgspec.Struct, eq=False):
    """A turn whose claim is in the store, under `fence`. Whatever happens, it ends with a commit, a rejection or a
    release.

    `request`, `history`, `template` and `large` are those of `Placed`; a limit may let the request ask for less.
    `session` is the state at the claim, and its live turns cannot change while the claim stands. `idle_since` is the
    time of the session's last event before the claim, `opened_at` that of the claim, and the engine is asked from
    `requested_at` on. `rid` names the generation at the engine.

    What came of it so far: `call` is what is asked, `choice` whom. `answer` is the newest answer; `received` is the
    body that is being validated, which is kept if the reply is rejected. `failure` are the code and message of the
    error that ended it; None also where an engine's own error is passed on. Not the error itself, whose traceback would
    keep the turn.
    """

    flight: InFlightTurn
    request: Request
    history: TurnHistory
    template: TemplateInputs | None
    large: int
    entry: CacheEntry
    session: Session
    plan: Plan
    opened: TurnOpened
    fence: int
    incarnation: int
    opened_at: float
    idle_since: float
    requested_at: float
    rid: str
    call: EngineCall | None = None
    choice: EngineChoice | None = None
    answer: EngineReply | None = None
    received: Body | None = None
    generated: Generated | None = None
    failure: tuple[str, str] | None = None

    def may_hold_claim(self, session: Session) -> bool:
        """May the claim still stand in this state of the session? A state from before the claim does not tell.

        Without it nothing can be decided: what the turn continues is no longer kept for it, and where a crash of the
        database undid it, its number and fence may be another turn's.
        """
        if session.version < self.fence:
            return True
        held, opened = session.open_turns.get(self.opened.turn), self.opened
        return held is not None and (held.fence, held.parent, held.body_hash) == (
            self.fence,
            opened.parent,
            opened.body_hash,
        )


class Generated(msgspec.Struct):
    """An engine's answer and the reply in it, which was found valid. `given_ids` as in `TurnCommitted`."""

    answer: EngineReply
    reply: ValidatedReply
    given_ids: GivenIds | None = None


class TurnReply(msgspec.Struct, frozen=True):
    """The reply to the client. Its body is in parts, so that a large one is cut without copying.

    `turn` is None for an engine's own error, which commits nothing. `replayed`: another request's
    turn, stored or, if `joined`, still in flight. `is_aborted`: an engine ended the generation
    early. `rolled_back`: how many live turns this one superseded when it committed. `echo`: what
    the request's parser kept for the rendering of the reply. `left_out`: what of the request the
    engine was not sent (`app.domain.left_out`). `given_ids` as in `TurnCommitted`. `session_id`: the turn is that of
    an ended generation of the session's name.
    """

    status: int
    headers: Headers
    parts: Sequence[bytes | memoryview]
    turn: int | None = None
    replayed: bool = False
    joined: bool = False
    is_aborted: bool = False
    rolled_back: int = 0
    echo: bytes | None = None
    left_out: tuple[str, ...] = ()
    given_ids: GivenIds | None = None
    session_id: str | None = None


class InFlightTurn(msgspec.Struct, eq=False):
    """A request for a turn, from its arrival to its reply; if it begins one, also who waits for that.

    `retry_key` (hashed) and `retry_count` are the marks of a retry: an idempotency key, and the OpenAI SDKs' count of
    the attempts before this one. `body_hash` is that of the canonical body, by which other retries are known, once it
    is placed. `new_history` becomes the session's where its first turn decides that. `headers` are the client's, `run`
    is the session's, `adapter` the LoRA adapter. `has_waited`: at a gate, or for a turn that it repeats, so that the
    session may have been finished after the request came. `absorbed_by` is the committed turn that has absorbed it, a
    late attempt (`Retries.repeated`).

    `waiters` are its client and those that joined; `finished`, made for the first that joins, resolves to the reply if
    the turn commits, else to None. `is_at_gate`: it waits at a gate. `claim` is its `TurnOpened`, once that is written;
    `attempts` are the times of all its attempts to claim. `engine_asked`: its request may have reached an engine;
    `aborts` are tasks that may still abort its generation. `features` is what features keep of it, by their names: the
    kernel reads none of it.
    """

    session_id: str
    waiter: Waiter
    stages: Stages
    headers: Headers = []
    retry_key: str | None = None
    retry_count: int = 0
    body_hash: str = ""
    agent_id: str | None = None
    has_waited: bool = False
    new_history: History = "linear"
    run: str = DEFAULT_RUN
    adapter: str | None = None
    absorbed_by: int | None = None
    waiters: list[Waiter] = []
    finished: asyncio.Future[TurnReply | None] | None = None
    cancel_reason: CancelReason | None = None
    is_at_gate: bool = False
    claim: Recorded | None = None
    attempts: list[float] = []
    engine_asked: bool = False
    aborts: Collection[asyncio.Task[None]] = ()
    task: asyncio.Task[object] | None = None
    features: dict[str, Any] = {}

    @property
    def is_retry(self) -> bool:
        return self.retry_count > 0

    @property
    def has_client(self) -> bool:
        """Does a client still wait for the reply, as far as its connection tells? Before it is in flight: its own."""
        for waiter in self.waiters or (self.waiter,):
            if not waiter.is_disconnected and (waiter.connection is None or not waiter.connection.is_gone()):
                return True
        return False

    @property
    def has_claim(self) -> bool:
        return self.claim is not None

    def add(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        if self.is_at_gate:
            waiter.turn_at_gate()

    def remove(self, waiter: Waiter) -> None:
        """If no other client waits for the turn, cancel it."""
        self.waiters.remove(waiter)
        if not self.waiters:
            self.cancel("disconnect")

    def joined(self) -> asyncio.Future[TurnReply | None]:
        """`finished`, for one who waits for it."""
        if self.finished is None:
            self.finished = asyncio.get_running_loop().create_future()
        return self.finished

    def finish(self, reply: TurnReply | None) -> None:
        """The turn has ended, with `reply` if it committed. Waiters are released, so that no cycle
        keeps the reply alive."""
        if self.finished is not None and not self.finished.done():
            self.finished.set_result(reply)
        self.finished = None
        for waiter in self.waiters:
            waiter.flight = None
        self.waiters = []

    @contextlib.contextmanager
    def waiting_at_gate(self) -> Iterator[None]:
        """While the turn waits at a gate, clients that disconnect leave at once; the last one
        cancels the turn."""
        self.is_at_gate = True
        for waiter in tuple(self.waiters):
            waiter.turn_at_gate()
        try:
            yield
        finally:
            self.is_at_gate = False

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the work on the prompt or at the engine. A turn that is past both is decided by its
        fence."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
            if self.task is not None:
                self.task.cancel()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Work that `cancel` ends. Raises TurnCancelled."""
        if self.cancel_reason is not None:
            raise TurnCancelled
        self.task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.cancel_reason is None or task is None:
                raise
            task.uncancel()
            raise TurnCancelled from None
        finally:
            self.task = None

    def cancel_error(self) -> AppError:
        """What the client of a cancelled turn is told."""
        if self.cancel_reason == "session_closed":
            return SessionClosed.of(self.session_id, "was closed during the turn")
        return ClientGone("the client disconnected, which ended its turn")


def blobs_of(call: EngineCall, session: Session) -> tuple[TurnBlobs, list[StoredBlob]]:
    """The numbers in the session of what the turn stores once, and the rows that it does not have yet."""
    params = call.sent_params
    numbers: dict[str, int] = {}
    images: list[int] = []
    refs: list[BlobRef] = []
    rows: list[StoredBlob] = []
    known = {(ref.kind, ref.hash): ref.number for ref in session.blobs}
    for blob in (SharedBlob("params", params, hashlib.sha256(params).hexdigest(), None), *call.shared):
        number = session.images.get(blob.hash) if blob.kind == "image" else known.get((blob.kind, blob.hash))
        if number is None:
            number = session.blob_count + len(refs)
            refs.append(BlobRef(number, blob.kind, len(blob.raw), blob.hash))
            frame = codec.compress(blob.raw) if blob.frame is None else blob.frame
            rows.append(StoredBlob(number, blob.kind, len(blob.raw), blob.hash, frame))
        if blob.kind == "image":
            images.append(number)
        else:
            numbers[blob.kind] = number
    shared = numbers["params"], numbers.get("tools"), tuple(refs), numbers.get("echo"), tuple(images)
    return TurnBlobs(*shared), rows


def _no_watch(waiter: Waiter) -> None:
    """For clients that report their disconnect without being watched."""


class Waiter(msgspec.Struct, eq=False):
    """A client that waits for a turn, its own or one that it joined.

    `grow` reserves memory for the reply. `watch` arranges that `client_disconnected` is called; it
    is needed only at a gate, since other turns go on without their client. `token_session` is the
    session whose token authorised the request; `has_run_token`: that of a run did. `connection` is
    None if it cannot be looked at. `live` takes its own turn's deltas.
    """

    grow: Callable[[int], None]
    watch: Callable[[Waiter], None] = _no_watch
    token_session: str | None = None
    connection: Connection | None = None
    live: LiveStream | None = None
    has_run_token: bool = False
    flight: InFlightTurn | None = None
    departure: asyncio.Future[None] | None = None
    is_disconnected: bool = False
    has_left: bool = False

    def wait_for(self, flight: InFlightTurn) -> None:
        """Wait for a turn, this client's own or one that it joins."""
        self.flight = flight
        flight.add(self)

    async def join(self, flight: InFlightTurn) -> TurnReply | None:
        """Wait for another request's turn that this request repeats; returns its reply if it commits.

        Raises ClientGone if the client leaves first.
        """
        self.wait_for(flight)
        finished = flight.joined()
        self.departure = asyncio.get_running_loop().create_future()
        await asyncio.wait((finished, self.departure), return_when=asyncio.FIRST_COMPLETED)
        if self.has_left:
            raise ClientGone("the client disconnected while it waited for a turn that it had joined")
        return finished.result()

    def turn_at_gate(self) -> None:
        """The turn waits at a gate."""
        if self.is_disconnected:
            self.leave()
        else:
            self.watch(self)

    def client_disconnected(self) -> None:
        """The client has disconnected. Leave a turn that waits at a gate; any other turn goes on
        until `leave`."""
        self.is_disconnected = True
        if self.flight is not None and self.flight.is_at_gate:
            self.leave()

    def leave(self) -> None:
        """Stop waiting, for good."""
        flight, self.flight = self.flight, None
        self.has_left = True
        if self.departure is not None and not self.departure.done():
            self.departure.set_result(None)
        if flight is not None:
            flight.remove(self)


class TurnCancelled(Exception):
    """The turn was cancelled by `InFlightTurn.cancel`."""


class TurnStage(IntEnum):
    """A turn is in exactly one stage at any moment. Its stages add up to the time from the last byte
    of the request to the last byte of the reply:

        claim ─▶ (gate ─▶) prepare ─▶ (gate ─▶) engine ─▶ validate ─▶ commit ─▶ reply
                              ▲                             │
                              └──── cut off by a pause ─────┘

    `gate`: waiting while a gate is shut. `claim`: parsing, matching and writing the claim.
    `prepare`: building the prompt and choosing an engine. `engine`: from dispatch to the reply's last
    byte. `validate`: validating the reply. `commit`: writing the turn to disk. `reply`: sending the
    reply, until the last byte is handed to the connection.
    """

    GATE = 0
    CLAIM = 1
    PREPARE = 2
    ENGINE = 3
    VALIDATE = 4
    COMMIT = 5
    REPLY = 6


STAGES = len(TurnStage)


class Stages:
    """When one turn entered each of its stages, beginning with `claim`; repeated stages add up.

    `clock` is monotonic, in seconds. `marks` are the stages in their order, each with the time at
    which it was entered. The turn appends to them itself: a function for it would be six calls a
    turn. `ended_at` is when the last byte of the reply or error was sent.

    For a committed turn: `request_bytes` and `reply_bytes` (from the engine) as received,
    `stored_bytes` as stored.
    """

    __slots__ = ("clock", "ended_at", "marks", "reply_bytes", "request_bytes", "stored_bytes")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.marks = [(TurnStage.CLAIM, clock())]
        self.ended_at: float | None = None
        self.request_bytes = 0
        self.reply_bytes = 0
        self.stored_bytes = 0

    def seconds(self) -> list[float]:
        """Seconds by stage. A stage that has not ended counts as 0."""
        seconds = [0.0] * STAGES
        stage, since = self.marks[0]
        for following, at in self.marks:
            seconds[stage] += at - since
            stage, since = following, at
        if self.ended_at is not None:
            seconds[stage] += self.ended_at - since
        return seconds

    def timing(self) -> Timing:
        """What the log keeps: it is written before the commit ends, so without the later stages."""
        gate, claim, prepare, engine, validate = self.seconds()[: TurnStage.COMMIT]
        return Timing(
            round(gate * 1e6), round(claim * 1e6), round(prepare * 1e6), round(engine * 1e6), round(validate * 1e6)
        )


COMMITTED = "committed"
ABORTED = "aborted"
"""Committed, but an engine ended the generation early."""

REPLAYED, JOINED = "replayed", "joined"
"""A retry that got the stored reply, or that waited for the turn in flight."""

ENGINE_ERROR = "engine_error"
"""An engine's own 4xx or 5xx, passed to the client."""

OUTCOMES = (COMMITTED, ABORTED, REPLAYED, JOINED, ENGINE_ERROR)
"""How a request for a turn ends; an `AppError` has its code as outcome instead."""

NEW_TURNS = frozenset((COMMITTED, ABORTED))

SUCCEEDED = frozenset((COMMITTED, ABORTED, REPLAYED, JOINED))
"""Outcomes in which the client got its turn."""
