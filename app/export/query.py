"""What an export is asked for: which sessions it gives rows of, and why it leaves out the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from app.domain.groups import UNKNOWN_STALENESS, has_numbers_only, oldest_version, staleness, too_stale
from app.domain.samples import Truncate
from app.domain.session import Session

if TYPE_CHECKING:
    from app.export.rows import Known


class ExportFilters(msgspec.Struct, frozen=True):
    """Which rows to give; None: any. `since` and `until` are seconds since the epoch of the last commit.

    `max_staleness`: how many weight versions a session's oldest sampled token may be behind `weight_version`; None of
    the latter: what the export's cursor says was the newest.
    """

    session_id: str | None = None
    group_id: str | None = None
    status: Literal["completed", "truncated", "aborted"] | None = None
    session_status: Literal["open", "closed", "erased"] | None = None
    since: float | None = None
    until: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    max_staleness: int | None = None
    weight_version: int | None = None


class ExportQuery(msgspec.Struct, frozen=True):
    """What an export shall hold: which rows, how many, cut to how many tokens and where, with what beside; and how."""

    filters: ExportFilters = ExportFilters()
    limit: int | None = None
    explain: bool = False
    replay: bool = False
    max_seq_len: int | None = None
    advantage: Literal["grpo"] | None = None
    format: str = "ndjson"
    shape: str = "turnlog"
    truncate: Truncate = "turn"


def session_excluded(known: Known, filters: ExportFilters) -> str | None:
    """Why a session that is of the group asked for, if any is, gives no row at all."""
    session = known.session
    if not session.path:
        return "no committed turn"
    if filters.session_status not in (None, session.status):
        return f"session_status is {session.status}"
    committed = known.times[session.path[-1]]
    if filters.since is not None and committed < filters.since:
        return "committed before since"
    if filters.until is not None and committed > filters.until:
        return "committed after until"
    return _reward_excluded(session, filters) or _age_excluded(known, filters)


def _reward_excluded(session: Session, filters: ExportFilters) -> str | None:
    reward = None if session.reward is None else session.reward.reward
    if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
        return "no reward" if reward is None else "reward below min_reward"
    if filters.max_reward is not None and (reward is None or reward > filters.max_reward):
        return "no reward" if reward is None else "reward above max_reward"
    return None


def _age_excluded(known: Known, filters: ExportFilters) -> str | None:
    """A session with a sampled token of unknown age is left out, as one without a reward where a reward is asked for.

    So whatever is given holds no token that is too old.
    """
    live = [known.events[number] for number in known.session.path]
    if filters.max_staleness is None or not any(event.output_tokens for event in live):
        return None
    behind = staleness(filters.weight_version, oldest_version(live))
    if behind is None:
        return f"staleness unknown: {UNKNOWN_STALENESS}"
    if not all(map(has_numbers_only, live)):
        return "staleness unknown: a weight version is no number"
    return too_stale(behind, filters.max_staleness)
