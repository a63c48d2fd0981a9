"""The input of every shape: one segment of a session, with everything the log and the store know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from app.domain.events import TurnCommitted
from app.domain.groups import Root
from app.domain.samples import Sample
from app.domain.session import Session
from app.export.links import Links
from app.export.sampling import TurnSampling

Value = object
"""A field of a shaped row: a numpy array, text, bytes, a number, None, `msgspec.Raw`, or lists and maps of these."""

Fields = Mapping[str, Value]


class TurnContent(msgspec.Struct, frozen=True):
    """A live turn of the segment: when it was committed (seconds since the epoch), and what went over the wire.

    `messages` are the request's new messages, `message` the reply's, `params` and `tools` the request's other fields,
    all raw JSON.
    """

    event: TurnCommitted
    at: float
    messages: Sequence[bytes]
    message: bytes
    params: bytes
    tools: bytes | None


class Routing(msgspec.Struct, frozen=True):
    """A replay payload from row `row_start` on: integer ids of shape [rows, *inner], one row per token but the last."""

    ids: npt.NDArray[Any]
    row_start: int


class Source(msgspec.Struct, frozen=True):
    """Where a row comes from: the engines, dialects and times (seconds since the epoch) of its turns."""

    engines: Sequence[str]
    dialects: Sequence[str]
    created_at: float
    committed_at: float
    turnlog_version: str


class RowImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of message `message`, counted from 0, which turn `turn` brought.

    One that was sent inline has its SHA-256, media type, `size` in bytes and, where the export asks for them, the
    bytes. One that was sent as a `url` is `not_stored`.
    """

    sha256: str | None
    media_type: str | None
    size: int | None
    bytes: bytes | None
    url: str | None
    not_stored: bool
    message: int
    turn: int


class Row(msgspec.Struct, frozen=True):
    """One segment. `messages` is the conversation at its end, raw, as sent and answered; `turns` are the sample's.

    `replay`: the export asks for replay payloads; `routing` holds the rows of each kind that was stored, None if they
    are tombstoned. `is_last`: no later segment of the session is live. `advantage` is set if the export asks for one
    and the session has a reward and a group. `root` is the root of the session's rollout, None for the root itself.
    `rollout_rows`: how many rows the rollout has in this export, before any filter and limit leaves some out.
    `sampling` has one for each of `turns`. `links`: instead of `routing`, where the export asks for URLs. `images` are
    those of `messages`, in their order; None where the export asks for none; `stored_images` counts those that its
    turns brought inline.
    """

    session: Session
    sample: Sample
    turns: Sequence[TurnContent]
    messages: Sequence[bytes]
    metadata: bytes | None
    source: Source
    cursor: str
    is_last: bool
    routing: Mapping[str, Routing | None]
    advantage: float | None = None
    replay: bool = False
    root: Root | None = None
    rollout_rows: int = 1
    sampling: Sequence[TurnSampling] = ()
    links: Mapping[str, Links | None] | None = None
    images: Sequence[RowImage] | None = None
    stored_images: int = 0

    def with_response(self) -> Sample:
        """The sample of a row for which a trainer needs sampled tokens. Raises Unfit."""
        if self.sample.response_length == 0:
            raise Unfit("no token was sampled")
        return self.sample

    @property
    def rollout_id(self) -> str:
        return self.session.session_id if self.root is None else self.root.session_id

    @property
    def rollout_weight(self) -> float:
        """The row's share in its rollout: with it as a weight, a mean over rows counts each rollout once."""
        return 1 / self.rollout_rows

    @property
    def group_id(self) -> str | None:
        """The session's own group, else its root's."""
        own = self.session.config.group_id
        return self.root.group_id if own is None and self.root is not None else own

    @property
    def counted_in(self) -> str | None:
        """The group that counts the session's rollout."""
        return self.root.group_id if self.root is not None and self.root.exists else self.session.config.group_id

    @property
    def final(self) -> bool:
        """No later export will contain more of this segment."""
        return self.session.status != "open" and self.is_last

    @property
    def adapter(self) -> str | None:
        """The session's adapter, else the one of all turns of the row; each turn's own is in its span."""
        if self.session.config.adapter is not None:
            return self.session.config.adapter
        named = {span.adapter for span in self.sample.turns}
        return named.pop() if len(named) == 1 else None

    @property
    def reward(self) -> float | None:
        return None if self.session.reward is None else self.session.reward.reward


class Unfit(Exception):
    """The shape cannot hold this row; the message is the reason that `explain` gives, without content."""


Shape = Callable[[Row], Fields]
"""Raises Unfit."""
