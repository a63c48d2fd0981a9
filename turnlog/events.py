"""The events of sessions, as the server gives them: made by `python -m ops.event_types`, not edited.

`type` tells which one it is. In the events of all sessions each also has `session_id` and `position`. Fields that have
their default are left out: `app/domain/events.py` has the defaults, and says more of each event.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

BranchCause = Literal["start", "retry", "fork", "root", "agent", "compaction", "drift"]

EventType = Literal[
    "SessionCreated",
    "TurnOpened",
    "TurnCommitted",
    "TurnRejected",
    "TurnAbandoned",
    "ReplyUndelivered",
    "ReplyRedelivered",
    "RolledBack",
    "LimitReached",
    "BlobsTombstoned",
    "RewardAssigned",
    "AnnotationWritten",
    "RolloutJoined",
    "AffinityBound",
    "AffinityReleased",
    "SessionFinished",
    "SessionClosed",
    "SessionRestored",
    "SessionErased",
]


class VersionSpan(TypedDict):
    """Output tokens [start, end) of one turn were sampled under the weight version `version`."""

    version: str
    start: int
    end: int


class ColumnRef(TypedDict):
    """A column: `length` numbers, of which `absent` have no value. `hash` is the stored frame's SHA-256."""

    dtype: Literal["float32", "int32"]
    over: Literal["output", "own"]
    length: int
    hash: str
    absent: NotRequired[int]


class _Event(TypedDict):
    """`seq` counts a session's events from 1 without a gap; `at` is in seconds since the epoch."""

    seq: int
    at: float
    session_id: NotRequired[str]
    position: NotRequired[str]


class SessionCreated(_Event):
    """`config` is what was given at the creation. `body_hash` distinguishes a repeated create from a conflicting
    one."""

    type: Literal["SessionCreated"]
    config: dict[str, Any]
    body_hash: str
    metadata: NotRequired[dict[str, Any] | None]
    fork: NotRequired[dict[str, Any] | None]
    budget: NotRequired[str | None]
    name: NotRequired[str | None]
    generation: NotRequired[int | None]


class TurnOpened(_Event):
    """A claim was taken. Its `seq` is the fence: it only grows, and the turn's commit must name it."""

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


class TurnCommitted(_Event):
    """A turn is part of the session for good. Lengths are in tokens: its prompt is `base_tokens` of its parent's and
    `suffix_tokens` of its own."""

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
    parts: NotRequired[list[list[Any]]]
    timing: NotRequired[list[int] | None]
    branch: NotRequired[int | None]
    branch_cause: NotRequired[BranchCause | None]
    carries: NotRequired[int | None]
    agent_id: NotRequired[str | None]
    echo: NotRequired[int | None]
    calls_hash: NotRequired[str | None]
    bare_hash: NotRequired[str | None]
    logprobs_of: NotRequired[Literal["raw", "scaled", "processed", "logits"] | None]
    left_out: NotRequired[list[str]]
    given_ids: NotRequired[list[Any] | None]
    odd_ids: NotRequired[bool]
    odd_arguments: NotRequired[bool]
    images: NotRequired[list[int]]
    limit: NotRequired[Literal["turns", "tokens", "context", "seconds"] | None]
    speculative: NotRequired[dict[str, int] | None]
    tool_errors: NotRequired[int]


class TurnRejected(_Event):
    """The open turn ended without a commit: the engine failed (`status`) or its reply was invalid."""

    type: Literal["TurnRejected"]
    turn: int
    fence: int
    reason: str
    status: NotRequired[int | None]
    detail: NotRequired[str | None]
    reply_bytes: NotRequired[int | None]
    kept_bytes: NotRequired[int | None]


class TurnAbandoned(_Event):
    """The open turn ended without a reply."""

    type: Literal["TurnAbandoned"]
    turn: int
    fence: int
    reason: Literal["owner_dead", "not_released", "session_closed", "disconnect", "restored"]


class ReplyUndelivered(_Event):
    """The connection that awaited the turn's reply ended before the reply's last byte was handed to the kernel."""

    type: Literal["ReplyUndelivered"]
    turn: int
    is_unknown: NotRequired[bool]


class ReplyRedelivered(_Event):
    """The turn's reply, believed undelivered, was given to a retry: it is not given again without a mark."""

    type: Literal["ReplyRedelivered"]
    turn: int


class RolledBack(_Event):
    """The turns after `to_turn` (0: all) are no longer live, which had `tool_errors`. Stands in the commit of the turn
    that replaces them."""

    type: Literal["RolledBack"]
    to_turn: int
    discarded: list[int]
    tool_errors: NotRequired[int]


class LimitReached(_Event):
    """A limit stood in the way of a request that continues turn `turn` (0: none)."""

    type: Literal["LimitReached"]
    limit: Literal["turns", "tokens", "context", "seconds"]
    turn: int
    sampled: NotRequired[int]
    refused: NotRequired[bool]


class BlobsTombstoned(_Event):
    """The replay payloads of these turns can no longer be read."""

    type: Literal["BlobsTombstoned"]
    turns: list[int]
    freed: list[tuple[int, int]]
    reason: NotRequired[Literal["window", "closed", "budget"]]
    own: NotRequired[list[int]]


class RewardAssigned(_Event):
    """A later assignment replaces an earlier one for the same `turn` (None: the session)."""

    type: Literal["RewardAssigned"]
    reward: float
    components: NotRequired[dict[str, float]]
    turn: NotRequired[int | None]
    of_root: NotRequired[bool]
    components_erased: NotRequired[bool]
    restored: NotRequired[bool]


class AnnotationWritten(_Event):
    """What `writer` says of the session or of its turn `turn`: it replaces what an earlier event says under this
    name."""

    type: Literal["AnnotationWritten"]
    name: str
    turn: NotRequired[int | None]
    value: NotRequired[Any]
    column: NotRequired[ColumnRef | None]
    size: NotRequired[int]
    writer: NotRequired[str | None]
    erased: NotRequired[bool]


class RolloutJoined(_Event):
    """A parent that the session's line names was created after it: its rollout's root is now `root`. `has_limits`: it
    has limits that hold for all of its sessions. `evaluation`: it is one, and so is this session."""

    type: Literal["RolloutJoined"]
    root: str
    has_limits: NotRequired[bool]
    evaluation: NotRequired[bool]


class AffinityBound(_Event):
    """From now on the session's turns go to the engine with this base URL, which has its prefix cached."""

    type: Literal["AffinityBound"]
    engine: str
    cause: NotRequired[Literal["first", "listed", "draining", "dead", "expired", "control"]]
    control: NotRequired[str | None]


class AffinityReleased(_Event):
    """The session is no longer bound to an engine: a client ended it (`closed`), or it expired (`expired`)."""

    type: Literal["AffinityReleased"]
    reason: NotRequired[Literal["closed", "expired"]]


class SessionFinished(_Event):
    """No turn is opened from now on: once those in flight have ended, `snapshot_id` names the samples for good."""

    type: Literal["SessionFinished"]
    snapshot_id: str
    producer_finished: bool


class SessionClosed(_Event):
    """`failed`: its rollout failed, which the root's close also says of the sessions that it closes."""

    type: Literal["SessionClosed"]
    reason: NotRequired[Literal["deleted", "idle", "root", "finished"]]
    failed: NotRequired[dict[str, Any] | None]


class SessionRestored(_Event):
    """The session is again what it was after event `to_seq`: the store was taken back to checkpoint `checkpoint`."""

    type: Literal["SessionRestored"]
    checkpoint: str
    to_seq: int


class SessionErased(_Event):
    """The content is deleted. The events and the id stay, so that the id is never used again."""

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
    | SessionFinished
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
