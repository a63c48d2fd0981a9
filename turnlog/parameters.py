"""The parameters of the server's routes, for both clients and the command line, and how they are checked.

The server's models are in `app/api` and `app/export`; its defaults apply to parameters that are left out or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from turnlog.events import EventType

PAGE, SEARCH_PAGE = 1000, 100
"""The largest pages that the server gives of a list and of a search."""

# fmt: off
TrainerShape = Literal[
    "miles", "slime", "verl", "skyrl", "trl", "trl-async", "openenv", "tinker", "areal", "xtuner", "rllm", "prime-rl",
    "atropos", "tree",
]
# fmt: on
"""The other shapes: a trainer's own, and whole sessions as trees."""

Shape = Literal["turnlog"] | TrainerShape

Branches = Literal["kept", "main", "longest", "all"]
Loss = Literal["once", "every"]
Stale = Literal["drop", "mask", "keep"]
SessionStatus = Literal["open", "closed", "erased", "undone"]
SessionState = Literal["open", "idle", "running", "paused", "closed", "erased", "undone"]
SessionOrder = Literal[
    "created_at", "updated_at", "reward", "turns", "engine_errors", "tool_errors", "staleness", "running_since"
]

Value = str | int | float | bool | None
"""Of a key of the metadata, in a filter."""

FailureKind = Literal["sandbox", "agent", "engine", "timeout", "other"]


class Failure(TypedDict):
    """Why a rollout failed, for a reason that is no reward; a message has at most 4,096 characters."""

    kind: FailureKind
    message: NotRequired[str | None]


class Limits(TypedDict, total=False):
    """What a session or its rollout may use; docs/budgets.md."""

    turns: int | None
    tokens: int | None
    context: int | None
    seconds: float | None
    per: Literal["rollout", "session"] | None


class NewSession(TypedDict, total=False):
    """The fields of `POST /sessions`; docs/api.md describes them."""

    session_id: Annotated[str | None, "Its id; default: random."]
    group_id: Annotated[str | None, "The group that it is an attempt of."]
    attempt: Annotated[int | None, "Which attempt of its group."]
    group_size: Annotated[int | None, "How many attempts its group waits for."]
    metadata: Annotated[Mapping[str, Any] | None, "Repeated in each export row."]
    rollback_window: Annotated[int | None, "Committed turns that a retry may discard."]
    retain: Annotated[Literal["window", "sampled", "all"] | None, "Which replay payloads are kept."]
    history: Annotated[Literal["linear", "tree"] | None, "A tree of turns, or one line of them."]
    on_divergence: Annotated[
        Literal["reject", "segment"] | None, "What happens to a request that does not continue the history."
    ]
    on_drift: Annotated[
        Literal["segment", "reject"] | None, "What happens to a turn whose tokens do not continue the history's."
    ]
    matcher: Annotated[Literal["tolerant", "strict", "role_content_only"] | None, "Which messages count as equal."]
    adapter: Annotated[str | None, "The LoRA adapter of all turns."]
    on_abort: Annotated[
        Literal["return", "continue", "fail"] | None, "What happens to a generation that an engine aborts."
    ]
    stream_mode: Annotated[Literal["whole", "live"] | None, "Streams: after the commit, or as they are generated."]
    params: Annotated[Mapping[str, Any] | None, "Parameters of every request, instead of the client's."]
    model: Annotated[str | None, "The model of every request."]
    params_mode: Annotated[
        Literal["override", "refuse", "default"] | None,
        "Replace what the client sends, refuse it, or fill what it leaves out.",
    ]
    temperature: Annotated[float | None, "Where a request has none."]
    top_p: Annotated[float | None, "Where a request has none."]
    top_k: Annotated[int | None, "Where a request has none."]
    evaluation: Annotated[
        bool | None,
        "Speak the protocol of miles' newer drivers; an evaluation is not trained on and keeps no replay payloads.",
    ]
    limits: Annotated[Limits | None, "Turns, tokens, context and seconds that it may use."]
    on_limit: Annotated[Literal["error", "length"] | None, "What happens to a generation that reaches a limit."]
    capture: Annotated[Literal["tokens", "text"] | None, "Tokens and logprobs, or text alone."]
    upstream: Annotated[str | None, "Of a session of text: its upstream."]
    parent_session_id: Annotated[str | None, "The session whose sub-agent this is."]
    run: Annotated[str | None, "The training run that it belongs to; default: TURNLOG_RUN, else the default run."]


class OfGroups(TypedDict, total=False):
    """Which groups, and of which sessions."""

    group_id: Annotated[str | Sequence[str], "Only this group's; several: of any of these."]
    group_prefix: Annotated[str, "Only those of groups whose id begins with this."]
    metadata: Annotated[Mapping[str, Value | Sequence[Value]], "Values of the metadata, by key; several: any of these."]


class Selection(OfGroups, total=False):
    """Which sessions, in every list, export and archive."""

    run: Annotated[str, "Only this run's."]


class OfSessions(Selection, total=False):
    status: Annotated[SessionStatus, "Only sessions with this status."]
    attempt: Annotated[int, "Only sessions with this attempt number."]
    engine: Annotated[str, "Only sessions that are bound to the engine with this URL."]
    min_reward: Annotated[float, "Only sessions with at least this reward."]
    max_reward: Annotated[float, "Only sessions with at most this reward."]
    unrewarded: Annotated[bool, "Only sessions without a reward."]
    min_staleness: Annotated[int, "At least this many weight versions behind the newest one."]
    tag: Annotated[str, "Only sessions with this tag."]
    annotated: Annotated[str, "Only sessions with an annotation of their own of this name."]
    unannotated: Annotated[str, "Only open and closed sessions without an annotation of this name."]
    name: Annotated[str, "Only sessions with this name."]
    generation: Annotated[int, "Only this generation of the name."]
    evaluation: Annotated[bool, "Only evaluations; false: only others."]
    min_engine_errors: Annotated[int, "Only sessions with at least this many engine errors."]
    min_tool_errors: Annotated[int, "Only sessions with at least this many tool errors."]


class SessionFilters(OfSessions, total=False):
    """The filters and the order of `GET /sessions`."""

    state: Annotated[SessionState, "Instead of status; also running (a turn is in flight), paused (at a gate), idle."]
    prefix: Annotated[str, "Only sessions whose id begins with this."]
    stuck_s: Annotated[float, "A turn has been in flight for longer than this many seconds."]
    sort: Annotated[SessionOrder, "The column by which the sessions are sorted."]
    order: Annotated[Literal["desc", "asc"], "Descending (default) or ascending."]


class SearchFilters(OfSessions, total=False):
    """The parameters of `GET /search` but for `q`."""

    role: Annotated[str, "Only messages of this role."]
    tool: Annotated[str, "Only calls of this tool and their results."]
    finish_reason: Annotated[str, "Only replies with this finish reason."]
    session_id: Annotated[str, "Only this session."]


class CheckpointFilters(TypedDict, total=False):
    """The parameters of `GET /checkpoints`."""

    run: Annotated[str, "Only of this run; *: only those of the whole store."]
    metadata: Annotated[Mapping[str, Value | Sequence[Value]], "Values of the metadata, by key; several: any of these."]


class RowFilters(TypedDict, total=False):
    failed: Annotated[
        Literal["drop", "keep"], "Failed rollouts: advantages drop (default) them, or keep them with their reward."
    ]
    evaluation: Annotated[bool, "Sessions of evaluations too."]
    images: Annotated[Literal["inline", "hash", "none"], "Images: with their bytes, only as their hash, or not at all."]
    max_staleness: Annotated[int, "At most this many weight versions behind."]
    weight_version: Annotated[int, "The current weight version; default: the newest."]
    stale: Annotated[Stale, "Older tokens: drop (default) their session, mask them, or keep them."]
    rewards: Annotated[Literal["total", "turn"], "total (default), turn (at the token that earned it: verl, skyrl)."]
    max_seq_len: Annotated[int, "Cut rows to at most this many tokens."]
    truncate: Annotated[Literal["turn", "token"], "turn (default: at a turn's end), token (inside one)."]
    columns: Annotated[str | Sequence[str], "Columns of numbers that rows have too: names with commas between them."]
    top_k: Annotated[int, "The k most likely tokens at each token, and the prompts' logprobs."]
    branches: Annotated[Branches, "Leaves that become rows; default: all but superseded ones."]
    loss: Annotated[Loss, "once (default: a token is in one row's loss), every (in each)."]


class ExportFilters(Selection, RowFilters, total=False):
    """The parameters of `GET /export` but for `format`, `shape` and `explain`."""

    session_id: Annotated[str, "Only this session."]
    name: Annotated[str, "Only sessions with this name."]
    generation: Annotated[int, "Only this generation of the name."]
    status: Annotated[
        Literal["completed", "truncated", "aborted"], "Only rows with this status: completed, truncated, aborted."
    ]
    session_status: Annotated[
        Literal["open", "closed", "erased"], "Only sessions with this status: open, closed, erased."
    ]
    since: Annotated[float | str, "Seconds since the epoch, or ISO 8601."]
    until: Annotated[float | str, "Seconds since the epoch, or ISO 8601."]
    min_reward: Annotated[float, "Only sessions with at least this reward."]
    max_reward: Annotated[float, "Only sessions with at most this reward."]
    advantage: Annotated[Literal["grpo"], "grpo: add each rollout's advantage over its group."]
    replay: Annotated[bool | Literal["urls"], "Include replay payloads."]
    routing: Annotated[Literal["newest", "sampled"], "Rows of the newest turn, or of the turn that sampled a token."]
    url_s: Annotated[int, "With replay=urls: how many seconds a URL is valid."]
    limit: Annotated[int, "At most this many rows."]
    cursor: Annotated[str, "Resume after an earlier export, or after one of its rows."]


class RowForm(TypedDict, total=False):
    shape: Annotated[Shape, "turnlog, or a trainer's: slime, verl, skyrl, trl, …"]
    explain: Annotated[bool, "Also give a line for each excluded row, with the reason."]


class ExportParameters(RowForm, ExportFilters, total=False):
    """The parameters of `GET /export` but for `format`."""


class FeedFilters(OfGroups, RowFilters, total=False):
    """The parameters of `GET /export/groups` but for `consumer`, `shape` and `explain`."""

    size: Annotated[int, "At most this many groups."]
    lease_s: Annotated[float, "Duration of the lease in seconds."]
    run: Annotated[str, "Only groups of this run; default: TURNLOG_RUN, else the default run. *: of all runs."]
    attempts: Annotated[int, "Only groups of which at least this many attempts have arrived."]
    new_only: Annotated[bool, "Only groups without a lease."]


class FeedParameters(RowForm, FeedFilters, total=False):
    """The parameters of `GET /export/groups` but for `consumer`."""


class EventParameters(Selection, total=False):
    """The parameters of `GET /events`."""

    after: Annotated[str, "Only events after this position; end: only new ones."]
    follow: Annotated[bool, "Also new events, as they are committed."]
    limit: Annotated[int, "At most this many events."]
    type: Annotated[Sequence[EventType], "Only events of these types."]
    session_id: Annotated[str, "Only this session."]
    name: Annotated[str, "Only sessions with this name."]
    generation: Annotated[int, "Only this generation of the name."]


class TreeParameters(TypedDict, total=False):
    """The parameters of `GET /sessions/{id}/tree`."""

    branches: Annotated[Branches, "The branches that become rows."]
    loss: Annotated[Loss, "Whether a turn is in the loss of one row, or of every row that has it."]
