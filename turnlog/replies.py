"""What the server answers about sessions, groups, checkpoints and gates: plain dicts with these fields.

docs/api.md says what they mean. Lengths are in tokens, times in seconds since the epoch; a later server may add fields.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from turnlog.events import BranchCause, VersionSpan
from turnlog.parameters import Limits, SessionState, SessionStatus
from turnlog.rows import Failed, Part, Statistics, TurnReward


class ErrorFields(TypedDict):
    """`code` is stable; `message` holds ids, lengths and limits, never content."""

    message: str
    type: str
    code: str
    param: None


class Error(TypedDict):
    """An error, as the OpenAI SDKs read it."""

    error: ErrorFields


class CreatedSession(TypedDict):
    """`base_url` is a path on this server, `url` the session's whole address, without `/v1`; `token` is present if the
    server requires tokens."""

    session_id: str
    base_url: str
    url: str
    token: NotRequired[str]


class ForkedSessions(TypedDict):
    sessions: list[CreatedSession]


class Rewarded(TypedDict):
    """`seq` is that of the event that assigned the reward."""

    session_id: str
    seq: int


class Annotated(TypedDict):
    """`seq` is that of the event that holds the annotation; `turn` is null for one of the session."""

    session_id: str
    turn: int | None
    name: str
    seq: int


class ListedAnnotation(TypedDict):
    """What event `seq` says of a turn, or of the session (`turn` is null): a JSON value, or a column of `length`
    numbers over the turn's sampled (`output`) or new tokens (`own`), of which `absent` are null. `size` is in bytes."""

    turn: int | None
    name: str
    seq: int
    at: float
    writer: str | None
    size: int
    dtype: NotRequired[Literal["float32", "int32"]]
    over: NotRequired[Literal["output", "own"]]
    length: NotRequired[int]
    absent: NotRequired[int]


class Annotation(ListedAnnotation):
    """An annotation with its `value`, or with the `values` of its column."""

    session_id: str
    value: NotRequired[Any]
    values: NotRequired[list[float | None]]


class Annotations(TypedDict):
    session_id: str
    annotations: list[ListedAnnotation]


class SaidAnnotation(TypedDict):
    """An annotation of `size` bytes with its `value`; of a column what it is, not its numbers."""

    name: str
    seq: int
    at: float
    writer: str | None
    size: int
    value: NotRequired[Any]
    dtype: NotRequired[Literal["float32", "int32"]]
    over: NotRequired[Literal["output", "own"]]
    length: NotRequired[int]
    absent: NotRequired[int]


class SaidMessage(TypedDict):
    """A message that turn `turn` of agent `agent_id` brought, with its index in the conversation. `sampled`: an engine
    generated it. If `message` is null, `error` says why. `reward` and `annotations` are those of the turn.
    """

    index: int
    turn: int
    agent_id: str | None
    sampled: bool
    message: dict[str, Any] | None
    error: NotRequired[str]
    reward: NotRequired[TurnReward]
    annotations: NotRequired[list[SaidAnnotation]]


class SaidPage(TypedDict):
    """A page of the conversation up to turn `turn`, the oldest message first; `turn` is null where there is none.

    `reward` and `annotations` are the session's. A session's own token is given neither, nor those of its turns.
    """

    session_id: str
    status: SessionStatus
    branch: int | None
    turn: int | None
    messages: list[SaidMessage]
    next_cursor: str | None
    reward: NotRequired[TurnReward | None]
    annotations: NotRequired[list[SaidAnnotation]]


class Finished(TypedDict):
    """The session that was finished; `name` and `generation` are null where no client had named it."""

    session_id: str | None
    name: str | None
    generation: int | None


class ListedSession(TypedDict):
    """`version` is the number of the last event. `state` is the status, or what an open session is doing.

    `engine_errors` counts turns that ended without a commit and requests that limits refused, `tool_errors` the failed
    calls whose results its turns brought, but for discarded ones.
    """

    session_id: str
    version: int
    status: SessionStatus
    turns: int
    group_id: str | None
    reward: float | None
    created_at: float
    updated_at: float
    state: SessionState
    attempt: int | None
    weight_version: int | None
    staleness: int | None
    engine: str | None
    running_since: float | None
    closed_at: float | None
    note: str | None
    tags: list[str]
    name: str | None
    generation: int | None
    run: str
    evaluation: bool
    engine_errors: int
    tool_errors: int
    failed: Failed | None


class SessionPage(TypedDict):
    """With `count`, `total` is the number of matches up to 100,000, beyond which `total_is_exact` is false. With a
    metadata filter both are those of this page, which may be short though more pages follow. With `tasks`, `tasks` has
    by session how its first turn's request begins, at most 600 characters."""

    sessions: list[ListedSession]
    next_cursor: str | None
    total: NotRequired[int]
    total_is_exact: NotRequired[bool]
    tasks: NotRequired[dict[str, str]]


class ListedGroup(TypedDict):
    """`sessions` counts the rollouts, by their root sessions, without those that are erased or replaced. `group_size`:
    how many attempts it waits for, `arrived`: how many it has. `std` is the sample's (n − 1). `zero_variance`: there
    are several rewards, and all are equal. `missing_attempts`: the lowest attempts that no session has, erased ones
    included. `complete` is a group that the feed may lease."""

    run: str
    group_id: str
    group_size: int | None
    arrived: int
    sessions: int
    closed: int
    failed: int
    rewarded: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_variance: bool
    missing_attempts: list[int]
    state: Literal["open", "complete", "leased", "acknowledged"]
    evaluation: bool


class GroupPage(TypedDict):
    groups: list[ListedGroup]
    next_cursor: str | None


class RunLimits(TypedDict):
    """Sessions that may be open at a time, and sampled tokens in all; null: no limit."""

    live: int | None
    tokens: int | None


class RunSessions(TypedDict):
    """Sessions by status."""

    open: int
    closed: int
    erased: int


class RunGroups(TypedDict):
    """`handed_out` at least once; acknowledged groups count in all three."""

    complete: int
    handed_out: int
    acknowledged: int


class RunVersions(TypedDict):
    """The newest weight version of a turn, and the oldest that an open session is at; null where there is none."""

    newest: int | None
    oldest_live: int | None


class ListedRun(TypedDict):
    """`turns`, `engine_errors` and `tool_errors` are the sums of its sessions' rows. Of rollouts for training, by their
    root sessions: `reward` of those that have not failed, null without one, and `failed`, how many have, by the kind.
    `first_at`: when the first session was created; `last_at`: when one changed last."""

    run: str
    status: Literal["open", "closed", "erasing"]
    limits: RunLimits
    metadata: dict[str, Any] | None
    note: str | None
    sessions: RunSessions
    turns: int
    engine_errors: int
    tool_errors: int
    groups: RunGroups
    reward: Statistics | None
    failed: dict[str, int]
    weight_versions: RunVersions
    first_at: float | None
    last_at: float | None


class RunPage(TypedDict):
    runs: list[ListedRun]
    next_cursor: str | None


class RunTokenCounts(TypedDict):
    """Of committed turns, discarded ones too: the lengths of their prompts, and what was sampled."""

    prompt: int
    generated: int


class Run(ListedRun):
    """`errors` counts the engine errors by their reason: that of the event that ended a turn, or `limit_…` of a request
    that a limit refused."""

    tokens: RunTokenCounts
    errors: dict[str, int]


class SearchHit(TypedDict):
    """A message that matches. `message` counts from 0 in the conversation that ends with the turn's reply. `marks` are
    [start, end) of what matches in `snippet`, in Unicode characters."""

    session_id: str
    turn: int
    message: int
    role: str
    tools: list[str]
    finish_reason: str | None
    at: float
    status: SessionStatus
    run: str
    group_id: str | None
    snippet: str
    marks: list[tuple[int, int]]


class SearchPage(TypedDict):
    """`is_current`: the index has all that was committed before the search began."""

    hits: list[SearchHit]
    next_cursor: str | None
    is_current: bool


class Attempt(TypedDict):
    """A rollout of a group, by its root; `finished`: all of it is closed and rewarded, or it has failed. `replaced`: a
    later session has its attempt's place, since it has no reward. `group_size` is what the session named."""

    session_id: str
    attempt: int | None
    reward: float | None
    status: SessionStatus
    finished: bool
    group_size: int | None
    created_at: float
    updated_at: float
    replaced: bool
    evaluation: bool
    engine_errors: int
    tool_errors: int
    failed: Failed | None


class Group(TypedDict):
    """`group_size`: how many attempts it waits for, `arrived`: how many it has, `missing_attempts`: the lowest that no
    session has. `complete`: they are there, and each rollout that is neither erased nor replaced is finished.
    `evaluation`: it has only evaluations; in any other group evaluations count for nothing."""

    run: str
    group_id: str
    group_size: int | None
    arrived: int
    attempts: list[Attempt]
    missing_attempts: list[int]
    statistics: Statistics | None
    complete: bool
    evaluation: bool


class TreeTurn(TypedDict):
    """A turn of the tree. `parent` is the turn whose messages it continues, 0 where it begins a conversation. `cause`
    is set where it begins its branch, `carries` where it quotes a turn of another branch. `messages` and `tokens` are
    those of the whole history after it; a turn in flight has neither. `superseded`: a later turn took its place.
    `loss_branches`: whose rows have its sampled tokens in their loss; `reason`: why it is not exported, or in no loss.
    `left_out`: what of its request the engine was not sent."""

    turn: int
    parent: int
    agent_id: str | None
    state: Literal["open", "committed", "undone"]
    branch: int | None
    cause: BranchCause | None
    carries: int | None
    superseded: bool
    messages: int | None
    tokens: int | None
    output_tokens: int | None
    finish_reason: str | None
    weight_versions: list[str]
    exported: bool
    reason: str | None
    loss_branches: list[int]
    left_out: list[str]


class TreeBranch(TypedDict):
    """A branch: it leaves `parent_branch` after turn `fork_turn`, both null where it begins a conversation. `leaf` is
    its newest turn, `turns` counts its own, `tokens` those of the whole sequence. Without a row `reason` says why.
    `title` is how its first message begins; null where that is not read."""

    branch: int
    cause: BranchCause | None
    parent_branch: int | None
    fork_turn: int | None
    agent_id: str | None
    title: str | None
    leaf: int
    turns: int
    tokens: int
    exported: bool
    reason: str | None


class Tree(TypedDict):
    """Turns in the order of their commits, then those in flight. `main_branch` has the newest turn."""

    session_id: str
    version: int
    status: SessionStatus
    history: Literal["linear", "tree"] | None
    main_branch: int | None
    branches: list[TreeBranch]
    turns: list[TreeTurn]


class StageTimes(TypedDict):
    """Milliseconds in each stage of a turn."""

    gate: float
    claim: float
    prepare: float
    engine: float
    validate: float


class StatePayload(TypedDict):
    kind: str
    rows: int
    tombstoned: bool


class StateTurn(TypedDict):
    """A committed turn, live or discarded (by the event `discarded_by`); `seq` is its commit's."""

    turn: int
    parent: int
    segment: int
    segment_cause: str | None
    live: bool
    opened_at: float | None
    committed_at: float
    seq: int
    fence: int
    engine: str
    dialect: str
    protocol: str
    adapter: str | None
    finish_reason: str | None
    timing: StageTimes | None
    prompt_tokens: int
    base_tokens: int
    suffix_tokens: int
    output_tokens: int
    cached_tokens: int | None
    trimmed: int
    messages: int
    weight_versions: list[VersionSpan]
    dispatched: str | None
    parts: list[Part]
    payloads: list[StatePayload]
    discarded_by: int | None


class FailedTurn(TypedDict):
    turn: int
    fence: int
    opened_at: float | None
    ended_at: float
    reason: str
    status: int | None
    detail: str | None
    kind: Literal["rejected", "abandoned"]
    reply_bytes: int | None
    kept_bytes: int | None


class OpenTurn(TypedDict):
    turn: int
    parent: int
    fence: int
    incarnation: int
    adapter: str | None
    opened_at: float


class Rollback(TypedDict):
    seq: int
    at: float
    to_turn: int
    discarded: list[int]


class RefusedRequest(TypedDict):
    """A request that continues turn `turn` (0: none), refused because the limit is reached."""

    seq: int
    at: float
    turn: int
    limit: Literal["turns", "tokens", "context", "seconds"]


class State(TypedDict):
    """A session after event `seq` of `last_seq`. `tree` is None where there is at most one branch. `annotations` are by
    turn (0: the session's), each with its value, if that has at most 4 KiB.
    """

    session_id: str
    seq: int
    last_seq: int
    status: SessionStatus
    failed: Failed | None
    engine_errors: int
    tool_errors: int
    state: SessionState
    erased: bool
    config: dict[str, Any]
    fork: dict[str, Any] | None
    metadata: dict[str, Any] | None
    created_at: float
    closed_at: float | None
    reward: TurnReward | None
    turn_rewards: dict[str, TurnReward]
    annotations: dict[str, list[SaidAnnotation]]
    note: str | None
    tags: list[str]
    affinity: dict[str, Any] | None
    open_turns: list[OpenTurn]
    tree: Tree | None
    turns: list[StateTurn]
    failed_turns: list[FailedTurn]
    refused: list[RefusedRequest]
    rollbacks: list[Rollback]
    problems: list[dict[str, str]]


class Record(TypedDict):
    """A live turn: the request as sent to the engine, and the engine's reply. `left_out` is what of the client's
    request the engine was not sent, where that is something."""

    left_out: NotRequired[list[str]]

    timestamp: float
    request_timestamp: float
    method: str
    path: str
    status_code: int
    request: dict[str, Any]
    response: dict[str, Any]


class _TokenMetadata(TypedDict):
    accumulated_token_ids: list[int]
    max_trim_tokens: int
    tree: NotRequired[dict[str, Any]]


class SessionMetadata(_TokenMetadata):
    """A session's current state. `accumulated_token_ids` are those of the newest turn, prompt and output."""

    status: SessionStatus
    version: int
    group_id: str | None
    attempt: int | None
    reward: float | None
    tito_session_mismatch: NotRequired[list[dict[str, Any]] | None]


class SamplesMetadata(_TokenMetadata):
    """What a session's samples say of the session; `agent` is the metadata that was sent."""

    tito_session_mismatch: NotRequired[list[dict[str, Any]]]
    agent: NotRequired[dict[str, Any]]


class FinishedSession(TypedDict):
    """A session that takes no more turns. `complete`: its agent came to its end, and no turn is in flight."""

    snapshot_id: str
    complete: bool
    producer_finished: bool
    unfinished_requests: int


class ForkedFrom(TypedDict):
    """The source session and the turn after which the fork begins."""

    session_id: str
    turn: int
    parent_loss: bool


class BudgetUse(TypedDict):
    turns: int
    tokens: int
    seconds: float


class InFlight(TypedDict):
    """Turns that are in flight, and the tokens that these have reserved."""

    turns: int
    tokens: int


class SessionBudget(TypedDict):
    """Limits that hold for the session: its own, or those of its rollout's root `session_id`. `left` has what is
    neither used nor reserved of each limit but `context`."""

    session_id: str
    limits: Limits
    used: BudgetUse
    in_flight: InFlight
    left: dict[str, float]


class SessionGiven(TypedDict):
    """The fields of `POST /sessions`, with their defaults, and the session's note and tags."""

    session_id: str
    group_id: str | None
    attempt: int | None
    group_size: int | None
    metadata: dict[str, Any] | None
    rollback_window: int
    retain: str
    history: str | None
    on_divergence: str
    on_drift: str
    matcher: str
    adapter: str | None
    on_abort: str | None
    stream_mode: str
    params: dict[str, Any] | None
    model: str | None
    params_mode: str
    evaluation: bool | None
    limits: Limits | None
    on_limit: str
    capture: str
    upstream: str | None
    parent_session_id: str | None
    run: str
    note: str | None
    tags: list[str]
    forked_from: NotRequired[ForkedFrom]
    budgets: NotRequired[list[SessionBudget]]
    limit: NotRequired[str | None]


class Records(TypedDict):
    """A session's live turns, its current state, and the arguments of its creation."""

    session_id: str
    records: list[Record]
    metadata: SessionMetadata
    session: SessionGiven


class RunToken(TypedDict):
    """The token of a run: everything within the run, nothing outside."""

    run: str
    token: str


class Checkpoint(TypedDict):
    """A checkpoint of a run, or (`*`) of the whole store. `sessions` and `groups` count what is in it, `erased` the
    sessions whose content has been erased since. One with `restores` keeps what there was before that one was
    restored."""

    run: str
    name: str
    state: Literal["made", "restoring"]
    cut: Literal["now", "drain", "restore"]
    created_at: float
    sessions: int
    groups: int
    restores: str | None
    metadata: dict[str, Any] | None
    erased: int


class CheckpointList(TypedDict):
    checkpoints: list[Checkpoint]


class RestoredStore(TypedDict):
    """The run, or (`*`) the store, is what it was at checkpoint `name`; `before` is the checkpoint of what it was
    instead. `sessions` were changed, of which `undone` had been created later. `erased` are sessions of the checkpoint
    whose content is gone, `unreadable` damaged ones, left as they are. `epoch` is the new one of its exports'
    cursors."""

    run: str
    name: str
    before: str
    epoch: str
    sessions: int
    undone: int
    erased: list[str]
    unreadable: list[str]


class Told(TypedDict):
    """Whether an engine did as told."""

    ok: bool
    error: str | None
    aborted: int


class AdapterState(TypedDict):
    """`held` counts the turns that wait in the answering process, `in_flight` those with a claim in any process."""

    name: str
    paused: bool
    closings: int
    since: float | None
    lease_left_s: float | None
    version: str | None
    held: int
    in_flight: int


class AdapterList(TypedDict):
    adapters: list[AdapterState]


class ToldEngines(TypedDict):
    """How each engine took the order."""

    engines: dict[str, Told]


class PausedAdapter(AdapterState, ToldEngines):
    """`aborted` are the ids of the generations that were aborted."""

    aborted: list[str]
    count: int


class FleetGate(TypedDict):
    """`version` is that of the fleet's log, `weight_version` that of engines that cannot say theirs. Of `paused_runs` a
    gate of their own is shut."""

    paused: bool
    mode: Literal["abort", "in_place", "retract"] | None
    closings: int
    since: float | None
    lease_left_s: float | None
    held: int
    in_flight: int
    paused_adapters: list[str]
    paused_runs: list[str]
    version: int
    weight_version: str | None
    held_for: Literal["drain", "restore"] | None


class ToldFleet(FleetGate, ToldEngines):
    pass


class PublicUrl(TypedDict):
    """What a session's `url` begins with; None: the address that its creation was sent to. `lease_left_s`: None of the
    setting. `needs_token`: whether the server wants a token of those that it does not know."""

    url: str | None
    lease_left_s: float | None
    needs_token: bool


class Regression(TypedDict):
    """An engine's weight version went from `before` back to `after`; noticed at `at`."""

    before: str
    after: str
    at: float


class Engine(TypedDict):
    """An engine: its state in the pool, and its health as seen by the answering process. `run`: it serves that run
    alone."""

    url: str
    run: str | None
    state: Literal["serving", "draining"]
    source: Literal["settings", "admin"]
    health: Literal["unknown", "healthy", "busy", "paused", "dead"]
    since: float | None
    last_error: str | None
    in_flight: int
    dialect: Literal["sglang", "vllm"] | None
    weight_version: str | None
    weight_version_regressed: Regression | None
    sessions: str | None
    token_ids: Literal["input_ids", "kv_transfer_params", "none"] | None
    logprobs_of: Literal["raw", "scaled", "processed", "logits"] | None


class EngineList(TypedDict):
    """`version` counts the events of the fleet's log."""

    engines: list[Engine]
    version: int


class LoraAborted(TypedDict):
    status: str
    aborted: list[str]
    count: int


class LoraResumed(TypedDict):
    status: str


class LoraWaited(TypedDict):
    paused: bool


class TokenCount(TypedDict):
    """Anthropic's; an engine may add fields."""

    input_tokens: int


class Root(TypedDict):
    """Paths on this server."""

    service: str
    page: str
    routes: str
    health: str


class Health(TypedDict):
    """Turns in flight, and counters of the writer and the worker pool. `session_server_instance_id` names the process,
    until it ends. `release` is Turnlog's."""

    status: Literal["ok"]
    release: str
    session_server_instance_id: str
    in_flight: int
    writer: dict[str, int]
    pool: dict[str, int]


class Checks(TypedDict):
    database: bool
    writable: bool
    pool: bool
    engine: bool


class Readiness(TypedDict):
    """`checks` says what is missing. `read_only` is why the store takes no writes; it is ready for reads."""

    status: Literal["ready", "not_ready"]
    checks: Checks
    read_only: str | None
    warnings: list[str]


class SignedIn(TypedDict):
    signed_in: bool


class LogLine(TypedDict):
    """An event with its session and its own fields. `error`: the event cannot be read, and what is not known is null. A
    line of `position` alone: up to there no other event matches."""

    position: str
    session_id: NotRequired[str | None]
    seq: NotRequired[int | None]
    type: NotRequired[str | None]
    at: NotRequired[float | None]
    error: NotRequired[str]


class EventLine(TypedDict):
    """An event of a session's log, and its own fields."""

    seq: int
    type: str
    at: float


class ArchiveAfter(TypedDict):
    """The last root that a request looked at."""

    closed_at: float
    session_id: str


class ArchiveStep(TypedDict):
    """`archived` sessions are in `file`, of `bytes`. `left` rollouts stay: they changed meanwhile, cannot be read, are
    too large, or others of their group must stay. `after` is null at the end."""

    archived: int
    left: int
    bytes: int
    file: str | None
    after: ArchiveAfter | None


class RefusedSession(TypedDict):
    """A session of a file that was not imported."""

    session_id: str
    reason: str


class ImportedFile(TypedDict):
    """Sessions that were written, that were there already, and that were refused."""

    imported: int
    there: int
    refused: list[RefusedSession]
