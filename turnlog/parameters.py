"""The parameters of exports, of the training feed and of all events, for both clients and the command line.

The server's models are in `app/export/query.py`, `app/export/feed.py` and `app/api/events.py`; its defaults apply to
parameters that are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict


class RowParameters(TypedDict, total=False):
    shape: Annotated[str, "turnlog, or a trainer's: slime, verl, skyrl, trl, …"]
    max_staleness: Annotated[int, "At most this many weight versions behind."]
    weight_version: Annotated[int, "The current weight version; default: the newest."]
    max_seq_len: Annotated[int, "Cut rows to at most this many tokens."]
    truncate: Annotated[Literal["turn", "token"], "turn (default: at a turn's end), token (inside one)."]
    branches: Annotated[
        Literal["kept", "main", "longest", "all"], "Leaves that become rows; default: all but superseded ones."
    ]
    loss: Annotated[Literal["once", "every"], "once (default: a token is in one row's loss), every (in each)."]
    explain: Annotated[bool, "Also give a line for each excluded row, with the reason."]


class ExportParameters(RowParameters, total=False):
    """The parameters of `GET /export` but for `format`."""

    session_id: Annotated[str, "Only this session."]
    group_id: Annotated[str, "Only this group."]
    status: Annotated[Literal["completed", "truncated", "aborted"], "Rows: completed, truncated, aborted."]
    session_status: Annotated[Literal["open", "closed", "erased"], "Sessions: open, closed, erased."]
    since: Annotated[float | str, "Seconds since the epoch, or ISO 8601."]
    until: Annotated[float | str, "Seconds since the epoch, or ISO 8601."]
    min_reward: Annotated[float, "Only sessions with at least this reward."]
    max_reward: Annotated[float, "Only sessions with at most this reward."]
    advantage: Annotated[Literal["grpo"], "grpo: add each rollout's advantage over its group."]
    replay: Annotated[bool | Literal["urls"], "Include replay payloads."]
    url_s: Annotated[int, "With replay=urls: how many seconds a URL is valid."]
    limit: Annotated[int, "At most this many rows."]
    cursor: Annotated[str, "Resume after an earlier export, or after one of its rows."]


class EventParameters(TypedDict, total=False):
    """The parameters of `GET /events`."""

    after: Annotated[str, "Only events after this position; end: only new ones."]
    follow: Annotated[bool, "Also new events, as they are committed."]
    limit: Annotated[int, "At most this many events."]
    type: Annotated[Sequence[str], "Only events of these types."]
    session_id: Annotated[str, "Only this session."]
    group_id: Annotated[str, "Only this group's sessions, agents included."]


class FeedParameters(RowParameters, total=False):
    """The parameters of `GET /export/groups` but for `consumer`."""

    size: int
    lease_s: float
    attempts: int
    new_only: bool
