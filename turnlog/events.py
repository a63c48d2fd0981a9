"""The events of sessions, as the server gives them.

`type` tells which one it is. In the events of all sessions each also has `session_id` and `position`. Fields that have
their default are left out: `app/domain/events.py` has the defaults.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

BranchCause = Literal["start", "retry", "fork", "root", "agent", "compaction", "drift"]


class _Event(TypedDict):
    """`seq` counts a session's events from 1 without a gap; `at` is in seconds since the epoch."""

    seq: int
    at: float
    session_id: NotRequired[str]
    position: NotRequired[str]


class SessionCreated(_Event):
    """`config` is what was given at the creation, without defaults."""

    type: Literal["SessionCreated"]
    config: dict[str, Any]
    body_hash: str
    metadata: NotRequired[dict[str, Any] | None]
    fork: NotRequired[dict[str, Any] | None]
    budget: NotRequired[str | None]
    name: NotRequired[str | None]
    generation: NotRequired[int | None]


class TurnOpened(_Event):
    type: Literal["TurnOpened"]
    turn: int
    parent: int
    incarnation: int
    body_hash: str
    retry_key: NotRequired[str | None]
    protocol: NotRequired[str]
    adapter: NotRequired[str | None]
    agent_id: NotRequired[str | None]
    history: NotRequired[Literal["linear", "tree"] | None]
    reserved: NotRequired[int | None]
    retry_count: NotRequired[int]


class VersionSpan(TypedDict):
    """The output tokens [start, end) were sampled by this weight version."""

    version: str
    start: int
    end: int


class TurnCommitted(_Event):
    """Lengths are in tokens: the prompt is `base_tokens` of the parent's and `suffix_tokens` of its own."""

    type: Literal["TurnCommitted"]
    turn: int
    parent: int
    fence: int
    segment: int
    base_messages: int
    new_messages: int
    message_hashes: list[str]
    client_hash: str
    base_tokens: int
    suffix_tokens: int
    output_tokens: int
    tokens_hash: str
    tokens_text_bytes: int
    body_hash: str
    content_hash: str
    params: int
    dialect: Literal["sglang", "vllm", "openai"]
    engine: str
    weight_versions: list[VersionSpan]
    requested_at: float
    tools: NotRequired[int | None]
    finish_reason: NotRequired[str | None]
    retry_key: NotRequired[str | None]
    new_blobs: NotRequired[list[dict[str, Any]]]
    segment_cause: NotRequired[Literal["drift", "divergence"] | None]
    protocol: NotRequired[str]
    choice_index: NotRequired[int]
    payloads: NotRequired[list[dict[str, Any]]]
    trimmed: NotRequired[int]
    cached_tokens: NotRequired[int | None]
    sent_ids: NotRequired[bool]
    adapter: NotRequired[str | None]
    dispatched: NotRequired[str | None]
    parts: NotRequired[list[Any]]
    timing: NotRequired[list[int] | None]
    branch: NotRequired[int | None]
    branch_cause: NotRequired[BranchCause | None]
    carries: NotRequired[int | None]
    agent_id: NotRequired[str | None]
    echo: NotRequired[int | None]
    calls_hash: NotRequired[str | None]
    bare_hash: NotRequired[str | None]
    logprobs_of: NotRequired[Literal["raw", "scaled", "processed", "logits"] | None]
    given_ids: NotRequired[list[Any] | None]
    odd_ids: NotRequired[bool]
    odd_arguments: NotRequired[bool]
    images: NotRequired[list[int]]
    left_out: NotRequired[list[str]]
    limit: NotRequired[Literal["turns", "tokens", "context", "seconds"] | None]
    speculative: NotRequired[dict[str, int] | None]


class TurnRejected(_Event):
    """The engine's reply was refused, or the engine answered with an error."""

    type: Literal["TurnRejected"]
    turn: int
    fence: int
    reason: str
    status: NotRequired[int | None]
    detail: NotRequired[str | None]
    reply_bytes: NotRequired[int | None]
    kept_bytes: NotRequired[int | None]


class TurnAbandoned(_Event):
    type: Literal["TurnAbandoned"]
    turn: int
    fence: int
    reason: Literal["owner_dead", "not_released", "session_closed", "disconnect", "restored"]


class ReplyUndelivered(_Event):
    type: Literal["ReplyUndelivered"]
    turn: int
    is_unknown: NotRequired[bool]


class ReplyRedelivered(_Event):
    type: Literal["ReplyRedelivered"]
    turn: int


class LimitReached(_Event):
    """A limit refused a request that continues `turn` (0: none), or ended its generation: `sampled` tokens in vain."""

    type: Literal["LimitReached"]
    limit: Literal["turns", "tokens", "context", "seconds"]
    turn: int
    sampled: NotRequired[int]


class RolledBack(_Event):
    type: Literal["RolledBack"]
    to_turn: int
    discarded: list[int]


class BlobsTombstoned(_Event):
    type: Literal["BlobsTombstoned"]
    turns: list[int]
    freed: list[tuple[int, int]]
    reason: NotRequired[Literal["window", "closed", "budget"]]
    own: NotRequired[list[int]]


class RewardAssigned(_Event):
    """Of the session, or of one turn."""

    type: Literal["RewardAssigned"]
    reward: float
    components: NotRequired[dict[str, float]]
    turn: NotRequired[int | None]
    of_root: NotRequired[bool]
    components_erased: NotRequired[bool]


class ColumnRef(TypedDict):
    dtype: Literal["float32", "int32"]
    over: Literal["output", "own"]
    length: int
    hash: str
    absent: NotRequired[int]


class AnnotationWritten(_Event):
    """What `writer` says of the session or a turn: a value or a column; without either it was removed."""

    type: Literal["AnnotationWritten"]
    name: str
    turn: NotRequired[int | None]
    value: NotRequired[Any]
    column: NotRequired[ColumnRef | None]
    size: NotRequired[int]
    writer: NotRequired[str | None]
    erased: NotRequired[bool]


class RolloutJoined(_Event):
    """A parent that the session's line names was created after it: its rollout's root is now `root`."""

    type: Literal["RolloutJoined"]
    root: str
    has_limits: NotRequired[bool]


class AffinityBound(_Event):
    type: Literal["AffinityBound"]
    engine: str
    cause: NotRequired[Literal["first", "listed", "draining", "dead", "expired", "control"]]
    control: NotRequired[str | None]


class AffinityReleased(_Event):
    type: Literal["AffinityReleased"]
    reason: NotRequired[Literal["closed", "expired"]]


class SessionClosed(_Event):
    type: Literal["SessionClosed"]
    reason: NotRequired[Literal["deleted", "idle", "root", "finished"]]


class SessionRestored(_Event):
    """The store was taken back to a checkpoint, in which this session ended with event `to_seq`; 0: it was created
    later. Turns of after that event are undone: in no row, and continued by nobody."""

    type: Literal["SessionRestored"]
    checkpoint: str
    to_seq: int


class SessionErased(_Event):
    type: Literal["SessionErased"]


Event = (
    SessionCreated
    | TurnOpened
    | TurnCommitted
    | TurnRejected
    | TurnAbandoned
    | ReplyUndelivered
    | ReplyRedelivered
    | RolledBack
    | LimitReached
    | BlobsTombstoned
    | RewardAssigned
    | AnnotationWritten
    | RolloutJoined
    | AffinityBound
    | AffinityReleased
    | SessionClosed
    | SessionRestored
    | SessionErased
)


class UnreadableEvent(TypedDict):
    """In the events of all sessions: an event that cannot be read, and why. What is not known is None."""

    error: str
    position: str
    session_id: str | None
    seq: int | None
    type: str | None
    at: float | None
