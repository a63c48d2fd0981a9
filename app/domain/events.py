"""The events of a session, as immutable facts.

An event holds ids, counts, hashes and references to blobs, never content: prompts and completions are in the store's
content tables, so that erasing them leaves the log whole. The components of a reward are the exception; an erasure
removes them from the event. Events are stored under `name` with the integer `VERSIONS[name]`; a changed structure gets
the next number and a step in `upcast.py`. Hashes are lower-case hex.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Matcher = Literal["tolerant", "strict", "role_content_only"]

OnAbort = Literal["return", "continue", "fail"]
"""What happens to a generation that an engine ended early."""

OnDivergence = Literal["reject", "segment"]
"""What happens to a request that does not continue the stored history and may not roll back to where it joins."""

Protocol = Literal["chat", "completions"]
"""Which of the OpenAI API's routes a turn was taken over."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of all events. `omit_defaults` keeps rows small; a default is therefore part of a version."""


class SessionConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the creator of a session chose. `on_drift` came with version 2 of SessionCreated.

    With version 3 came `on_abort` (None: what the server is set to) and `parent`, the session whose sub-agent this
    one is.
    """

    rollback_window: int
    matcher: Matcher = "tolerant"
    on_divergence: OnDivergence = "reject"
    retain: Literal["window", "all"] = "window"
    on_drift: Literal["segment", "reject"] = "segment"
    history: Literal["linear"] = "linear"
    group_id: str | None = None
    attempt: int | None = None
    adapter: str | None = None
    on_abort: OnAbort | None = None
    parent: str | None = None


class BlobRef(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A per-session blob stored once: `number` within the session, `size` in raw bytes, hash of the raw bytes."""

    number: int
    kind: Literal["metadata", "params", "tools"]
    size: int
    hash: str


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Output tokens [start, end) of one turn were sampled under the weight version `version`."""

    version: str
    start: int
    end: int


def is_number(version: str) -> bool:
    """Is a weight version a number that a 64-bit integer holds?"""
    return version.isascii() and version.isdigit() and len(version) < 19


ReplayKind = Literal["routed_experts", "indexer_topk"]
"""What an engine can return for a trainer to replay its choices: a row of ids for each token but the last."""

Dtype = Literal["uint8", "uint16", "int16", "int32"]
"""How ids are stored: the smallest of these, in this order, that holds a chunk's ids. Little-endian."""


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, start + rows) of a replay payload, stored once.

    Its key in the session is the fence of the turn that brought it and a number within that turn. `size`
    and `hash` (SHA-256, 128 bits) are of the rows as raw ids of `dtype`.
    """

    fence: int
    number: int
    start: int
    rows: int
    dtype: Dtype
    size: int
    hash: str


class PayloadRef(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A turn's replay payload: rows [start, stop), each of the inner shape `shape`.

    Its chunks are the first `shared` ones of the parent's payload of that kind, then `chunks`. The engine sent
    the rows from `sent` on; the earlier ones are known from the parent.
    """

    kind: ReplayKind
    start: int
    stop: int
    sent: int
    shape: tuple[int, ...]
    chunks: tuple[ChunkRef, ...]
    shared: int = 0


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) of a turn came from one generation, of the engine with this base URL."""

    engine: str
    start: int
    end: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Time that a turn spent in each stage before its commit, in microseconds of a monotonic clock.

    `gate`: waiting for a pause to end. `claim`: until its claim was on disk, matching included. `prepare`: building the
    prompt and choosing an engine. `engine`: from dispatch to the reply's last byte, all attempts and parts together.
    `validate`: validating the reply.
    """

    gate: int
    claim: int
    prepare: int
    engine: int
    validate: int


class ForkRef(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The origin of a fork: turn `turn` of session `session`, with all turns that it continues.

    The new session's first `turns` turns are copies. `loss`: their sampled tokens are in its loss too.
    """

    session: str
    turn: int
    turns: int
    loss: bool

    @property
    def context_turns(self) -> int:
        """How many copied turns are context: not in this session's loss."""
        return 0 if self.loss else self.turns


class SessionCreated(Event, frozen=True):
    """`body_hash` distinguishes a repeated create from a conflicting one.

    `fork` (since version 4) says that the session began as a copy; a `TurnCommitted` for each copied turn follows,
    without a `TurnOpened`: its fence is its own `seq`.
    """

    config: SessionConfig
    body_hash: str
    metadata: BlobRef | None = None
    fork: ForkRef | None = None


class TurnOpened(Event, frozen=True):
    """A claim was taken. Its `seq` is the fence: it only grows, and the turn's commit must name it.

    `adapter` (since version 3) is the adapter that the turn is for, if Turnlog knows of one.
    """

    turn: int
    parent: int
    incarnation: int
    body_hash: str
    retry_key: str | None = None
    protocol: Protocol = "chat"
    adapter: str | None = None


class TurnCommitted(Event, frozen=True):
    """A turn is part of the session for good.

    Messages: the turn's history is its parent's first `base_messages` messages (0: it starts anew),
    then `new_messages` of the client, then the reply's one. `message_hashes` are the canonical hashes of
    the latter two. `client_hash` is the hash of the spelling of the request's messages, as the client
    sent them, by which the next request's history is known again without looking at each message.

    Tokens: the prompt is the parent's `base_tokens` tokens (0: the engine's prompt does not continue
    them) and `suffix_tokens` new ones; `output_tokens` follow. `tokens_hash` is the SHA-256 of all of them as
    text (decimal, a comma after each), which has `tokens_text_bytes` bytes.

    `payloads` (since version 2) are the replay payloads that came with the reply.

    Since version 3: `trimmed` of the parent's last tokens are not part of the prompt, so that `base_tokens` is that
    much shorter; `cached_tokens` of the prompt were in the engine's prefix cache, if it says; `sent_ids` says that the
    engine was sent token ids rather than messages or text.

    Since version 4: `adapter` as in `TurnOpened`; `dispatched` is the weight version that its adapter or engine was
    known to have when the (first) generation began; `parts`, where the reply was joined from several generations.

    Since version 5: `timing`.
    """

    turn: int
    parent: int
    fence: int
    segment: int
    base_messages: int
    new_messages: int
    message_hashes: tuple[str, ...]
    client_hash: str
    base_tokens: int
    suffix_tokens: int
    output_tokens: int
    tokens_hash: str
    tokens_text_bytes: int
    body_hash: str
    content_hash: str
    params: int
    dialect: Literal["sglang", "vllm"]
    engine: str
    weight_versions: tuple[VersionSpan, ...]
    requested_at: float
    tools: int | None = None
    finish_reason: str | None = None
    retry_key: str | None = None
    new_blobs: tuple[BlobRef, ...] = ()
    segment_cause: Literal["drift", "divergence"] | None = None
    protocol: Protocol = "chat"
    choice_index: int = 0
    payloads: tuple[PayloadRef, ...] = ()
    trimmed: int = 0
    cached_tokens: int | None = None
    sent_ids: bool = False
    adapter: str | None = None
    dispatched: str | None = None
    parts: tuple[Part, ...] = ()
    timing: Timing | None = None


class TurnRejected(Event, frozen=True):
    """The open turn ended without a commit: the engine failed (`status`) or its reply was invalid.

    `kept_bytes` (since version 2) of the refused reply's `reply_bytes` are kept for diagnosis.
    """

    turn: int
    fence: int
    reason: str
    status: int | None = None
    detail: str | None = None
    reply_bytes: int | None = None
    kept_bytes: int | None = None


class TurnAbandoned(Event, frozen=True):
    """The open turn ended without a reply.

    Its process is dead (`owner_dead`) or could not release it (`not_released`), or it was cancelled because the session
    was closed (`session_closed`) or the client disconnected (`disconnect`).
    """

    turn: int
    fence: int
    reason: Literal["owner_dead", "not_released", "session_closed", "disconnect"]


class RolledBack(Event, frozen=True):
    """The turns after `to_turn` (0: all) are no longer live. Stands in the commit of the turn that replaces them."""

    to_turn: int
    discarded: tuple[int, ...]


class BlobsTombstoned(Event, frozen=True):
    """The replay payloads of these turns can no longer be read.

    Their description stays in `TurnCommitted`. `freed` are the keys (fence, number) of the chunks that no payload
    refers to any more; their bytes are deleted. They left the rollback window in the commit before this event
    (`window`), or the session has been closed for long enough (`closed`).
    """

    turns: tuple[int, ...]
    freed: tuple[tuple[int, int], ...]
    reason: Literal["window", "closed"] = "window"


class RewardAssigned(Event, frozen=True):
    """A later assignment replaces an earlier one for the same `turn` (None: the session).

    `of_root` (since version 2): the reward of the root of the session's rollout, which overrides the session's own.
    `components_erased` (since version 2): its components were deleted with the session's content. This is the only
    event that is ever rewritten.
    """

    reward: float
    components: dict[str, float] = {}
    turn: int | None = None
    of_root: bool = False
    components_erased: bool = False


class AffinityBound(Event, frozen=True):
    """From now on the session's turns go to the engine with this base URL, which has its prefix cached.

    `cause`: its `first` turn; its engine is no longer `listed`, is `draining`, is `dead`; the binding had `expired`; or
    a client chose it (`control`, then also the name of the affinity: `nvext.session_control`).
    """

    engine: str
    cause: Literal["first", "listed", "draining", "dead", "expired", "control"] = "first"
    control: str | None = None


class AffinityReleased(Event, frozen=True):
    """The session is no longer bound to an engine: a client ended it (`closed`), or it expired (`expired`)."""

    reason: Literal["closed", "expired"] = "closed"


class SessionClosed(Event, frozen=True):
    """By a client (`deleted`), or by the janitor after TURNLOG_IDLE_CLOSE_S (`idle`, since version 2).

    `root` (since version 3): because the root of its rollout was closed.
    """

    reason: Literal["deleted", "idle", "root"] = "deleted"


class SessionErased(Event, frozen=True):
    """The content is deleted. The events and the id stay, so that the id is never used again."""


TYPES: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        SessionCreated,
        TurnOpened,
        TurnCommitted,
        TurnRejected,
        TurnAbandoned,
        RolledBack,
        BlobsTombstoned,
        RewardAssigned,
        AffinityBound,
        AffinityReleased,
        SessionClosed,
        SessionErased,
    )
}

VERSIONS: dict[str, int] = {
    **dict.fromkeys(TYPES, 1),
    "SessionCreated": 4,
    "TurnOpened": 3,
    "TurnCommitted": 5,
    "TurnRejected": 2,
    "RewardAssigned": 2,
    "SessionClosed": 3,
}

EXPORTED = ("TurnCommitted", "RewardAssigned", "SessionClosed")
"""Events after which a session's export rows may differ from before."""


class Recorded(msgspec.Struct, frozen=True):
    """An event with its position: `seq` counts from 1 without a gap, `at` is seconds since the epoch."""

    seq: int
    at: float
    event: Event


def name_of(event: Event) -> str:
    return type(event).__name__


class UnknownEvent(Exception):
    """The log holds an event that this version cannot read; the session is refused."""


def to_fields(event: Event) -> dict[str, Any]:
    """The event as JSON-able fields, defaults left out."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return fields
