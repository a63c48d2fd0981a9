"""Training rows, groups with their rows, and samples: plain dicts with these fields.

docs/api.md says what they mean; a later server may add fields.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from turnlog.events import BranchCause
from turnlog.parameters import FailureKind

R = TypeVar("R")
"""The type of a row."""

TrainerRow = dict[str, Any]
"""A row in a trainer's shape: docs/export.md has the fields of each."""


class Failed(TypedDict):
    """Why a rollout failed. Lists have no `message`; `erased`: it was deleted with the session's content."""

    kind: FailureKind
    message: NotRequired[str]
    erased: NotRequired[bool]


class TurnReward(TypedDict):
    reward: float
    components: dict[str, float]


class Part(TypedDict):
    """The tokens [start, end) of a row come from one generation of this engine."""

    engine: str
    start: int
    end: int


class Speculative(TypedDict):
    """How often the model verified drafts, how many tokens these had, and how many it took."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int


class TurnSpan(TypedDict):
    """The place of a turn in a row: its new prompt [start, output_start), its output [output_start, end).

    `cached_tokens` of its prompt were in the engine's prefix cache. It and `speculative` are None where the engine does
    not say.
    """

    turn: int
    start: int
    output_start: int
    end: int
    finish_reason: str | None
    engine: str
    dispatched: str | None
    adapter: str | None
    parts: list[Part]
    cached_tokens: int | None
    speculative: Speculative | None


class TurnSampling(TypedDict):
    """A turn's sampling parameters as its request named them, and which distribution its logprobs are of."""

    turn: int
    logprobs_of: Literal["raw", "scaled", "processed", "logits", "unknown"]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


class Provenance(TypedDict):
    engines: list[str]
    dialects: list[str]
    created_at: float
    committed_at: float
    turnlog_version: str


class Pinned(TypedDict):
    model: str | None
    params: dict[str, Any] | None


class PayloadRows(TypedDict):
    """A replay payload: `data` is base64 of little-endian ids of this dtype and shape, rows first."""

    data: str
    row_start: int
    rows: int
    dtype: str
    shape: list[int]


class MaskRows(TypedDict):
    """A sampling mask: row r has the ids [offsets[r], offsets[r + 1]) of `data`, base64 of little-endian ids of this
    dtype. Token `row_start` + r + 1 was drawn from them; none where no engine has sampled it."""

    data: str
    row_start: int
    rows: int
    dtype: str
    offsets: list[int]


class RowImage(TypedDict):
    """An image of message `message`. One sent inline has its hash, type, `size` in bytes and, with `images=inline`, its
    base64; one sent by `url` is `not_stored`."""

    sha256: str | None
    media_type: str | None
    size: int | None
    bytes: str | None
    url: str | None
    not_stored: bool
    message: int
    turn: int


class RowAnnotations(TypedDict):
    """The JSON values of a session and of a row's turns, by their names; a turn's under its number."""

    session: dict[str, Any]
    turns: dict[str, dict[str, Any]]


class Row(TypedDict):
    """A training row of T tokens in the shape `turnlog`.

    `tokens`, `loss_mask`, `sampled_mask`, `logprobs` and `weight_versions` have T entries each. `images` is
    not there with `images=none`, `annotations` where there are none. `columns` and `column_masks` are those asked for,
    T entries each, None where no turn has one. `staleness` and `stale_tokens` are there with `stale=mask` and
    `stale=keep`, the fields after them only with `replay`, the last four only with `top_k`.
    """

    session_id: str
    segment: int
    run: str
    group_id: str | None
    attempt: int | None
    parent_session_id: str | None
    adapter: str | None
    status: Literal["completed", "truncated", "aborted"]
    failed: Failed | None
    final: bool
    as_of_seq: int
    reward: float | None
    reward_components: dict[str, float]
    turn_rewards: dict[str, TurnReward]
    advantage: float | None
    prompt_length: int
    response_length: int
    tokens: list[int]
    loss_mask: list[int]
    sampled_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    weight_version_names: list[str]
    weight_version_regressed: bool
    turns: list[TurnSpan]
    segment_cause: str | None
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    provenance: Provenance
    cursor: str
    rollout_id: str
    rollout_rows: int
    rollout_weight: float
    branch: int
    branch_cause: BranchCause | None
    parent_branch: int | None
    fork_turn: int | None
    agent_id: str | None
    pinned: Pinned | None
    sampling: list[TurnSampling]
    note: str | None
    tags: list[str]
    name: str | None
    generation: int | None
    limit: NotRequired[Literal["turns", "tokens", "context", "seconds"]]
    images: NotRequired[list[RowImage]]
    annotations: NotRequired[RowAnnotations]
    columns: NotRequired[dict[str, list[float] | None]]
    column_masks: NotRequired[dict[str, list[int] | None]]
    staleness: NotRequired[int | None]
    stale_tokens: NotRequired[int | None]
    routed_experts: NotRequired[str | None]
    row_start: NotRequired[int | None]
    rows: NotRequired[int]
    dtype: NotRequired[str | None]
    shape: NotRequired[list[int]]
    indexer_topk: NotRequired[PayloadRows | None]
    sampling_mask: NotRequired[MaskRows | None]
    routing: NotRequired[Literal["sampled"]]
    routing_differs: NotRequired[int]
    tombstoned: NotRequired[list[str]]
    replay_urls: NotRequired[dict[str, Any]]
    top_ids: NotRequired[list[list[int]]]
    top_logprobs: NotRequired[list[list[float]]]
    prompt_logprobs: NotRequired[list[float]]
    prompt_logprobs_mask: NotRequired[list[int]]


class Excluded(TypedDict):
    """With `explain`: what is not in the export, and why. `lost_tokens`: the sampled tokens that are in no row's loss
    for it; None if nobody knows how many."""

    session_id: str
    excluded: str
    lost_tokens: int | None
    segment: int | None
    turn: int | None
    cursor: str


class Statistics(TypedDict):
    """Of a group's rewards; `std` is the sample's (n − 1), 0 for one."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    zero_variance: bool


class LeasedAttempt(TypedDict):
    session_id: str
    attempt: int | None
    reward: float | None
    failed: Failed | None


class LeftOut(TypedDict):
    """A session, segment or turn of a leased group that has no row, and why; `lost_tokens` as in `Excluded`, of a whole
    rollout with `explain` alone."""

    session_id: str
    reason: str
    lost_tokens: int | None
    segment: NotRequired[int]
    turn: NotRequired[int]


class LeasedGroup(TypedDict, Generic[R]):
    """A complete group with its rows, leased until `lease_until`; `handed_out` counts the leases so far."""

    run: str
    group_id: str
    attempts: list[LeasedAttempt]
    lease_until: float
    handed_out: int
    statistics: Statistics | None
    staleness: int | None
    staleness_unknown: str | None
    rows: list[R]
    excluded: list[LeftOut]


class WaitingGroup(TypedDict):
    """With `explain`: a group that was not handed out, and why; the sampled tokens of one that will not be, None if
    nobody knows how many."""

    run: str
    group_id: str
    excluded: str
    lost_tokens: NotRequired[int | None]


class Acknowledged(TypedDict):
    """The groups by outcome. `not_leased`: another consumer has or had it."""

    acknowledged: list[str]
    already: list[str]
    not_leased: list[str]
    unknown: list[str]


class PrefixCache(TypedDict):
    cached_tokens: int
    total_prompt_tokens: int


class SampleFields(TypedDict):
    """What of a sample is no array. `weight_versions` are names, or spans where the server is set so."""

    response: str
    response_length: int
    status: Literal["completed", "truncated", "aborted"]
    weight_versions: list[Any]
    reward: float | None
    spec_info: dict[str, Any]
    prefix_cache_info: PrefixCache
    metadata: dict[str, Any]
