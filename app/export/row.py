"""The input of every shape: one segment of a session, with everything the log and the store know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
import numpy.typing as npt

from app.domain.columns import AlignedColumn
from app.domain.events import TurnCommitted
from app.domain.groups import Root
from app.domain.request import number_of
from app.domain.samples import Age, Sample
from app.domain.session import Session
from workers.codec import describe
from workers.reply import LogprobsOf
from workers.sampling_masks import Masks


class TurnSampling(msgspec.Struct, frozen=True):
    """Turn `turn`'s sampling parameters as its request named them, None where it named none: then the engine's own
    default holds, which may come from the model's `generation_config.json`."""

    turn: int
    logprobs_of: LogprobsOf | Literal["unknown"]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


class _Params(msgspec.Struct, frozen=True):
    temperature: msgspec.Raw = msgspec.Raw(b"null")
    top_k: msgspec.Raw = msgspec.Raw(b"null")
    top_p: msgspec.Raw = msgspec.Raw(b"null")
    min_p: msgspec.Raw = msgspec.Raw(b"null")


describe(_Params)


def sampling_of(event: TurnCommitted, params: bytes) -> TurnSampling:
    """`params` are the request's, raw JSON. What is no number, or none that a row holds, is None."""
    return msgspec.structs.replace(_named(params), turn=event.turn, logprobs_of=event.logprobs_of or "unknown")


@lru_cache(maxsize=16)
def _named(params: bytes) -> TurnSampling:
    """The same of any turn: most requests of a session have the same parameters."""
    named = msgspec.json.decode(params, type=_Params)
    top_k = number_of(named.top_k)
    return TurnSampling(
        turn=0,
        logprobs_of="unknown",
        temperature=_float(named.temperature),
        top_k=top_k if isinstance(top_k, int) else None,
        top_p=_float(named.top_p),
        min_p=_float(named.min_p),
    )


def _float(raw: msgspec.Raw) -> float | None:
    value = number_of(raw)
    return None if value is None else float(value)


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


Links = Mapping[str, Any]
"""A payload as URLs: `row_start`, `shape` of its rows, and `chunks`, each with its first row, rows, dtype, bytes and
hash before compression, and either `url` or, for what is in the database, `frame` as base64."""


class MaskRows(msgspec.Struct, frozen=True):
    """A sampling mask from row `row_start` on: row r has the ids that token r + 1 was drawn from, or none."""

    masks: Masks
    row_start: int


class Top(msgspec.Struct, frozen=True):
    """The k most likely tokens at each of the row's T tokens, most likely first, and the prompt tokens' logprobs.

    `top_ids` (int32) and `top_logprobs` (float32) are [T, k], -1 and -9999.0 where there is no further token.
    `prompt_logprobs` (float32) is [T], 0.0 where `prompt_logprobs_mask` (uint8) is 0.
    """

    top_ids: npt.NDArray[Any]
    top_logprobs: npt.NDArray[Any]
    prompt_logprobs: npt.NDArray[Any]
    prompt_logprobs_mask: npt.NDArray[Any]


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
    are tombstoned, `mask` the sampling mask likewise. `routing_differs`: the rows are the sampled ones, and so many of
    them, of all kinds, are not the newest; None: they are the newest. `is_last`: no later segment of the session is
    live. `advantage` is set if the export asks for one and the session has a reward and a group. `root` is the root of
    the session's rollout, None for the root itself. `rollout_rows`: how many rows the rollout has in this export,
    before any filter and limit leaves some out. `sampling` has one for each of `turns`. `links`: instead of `routing`,
    where the export asks for URLs. `images` are those of `messages`, in their order; None where the export asks for
    none; `stored_images` counts those that its turns brought inline. `top` is there where the export asks for it.
    `annotations` are the JSON values of the session and of the row's turns, None where there are none. `columns` are
    those that the export asks for. `as_of_seq` is the last event that the row shows something of. `age` is there
    where the export masks or keeps stale tokens. `by_turn`: it asks for rewards where turns earned them. `lose`, with
    `explain`: is called once the row is left out, and gives the sampled tokens that are then in no row's loss.
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
    mask: MaskRows | msgspec.UnsetType | None = msgspec.UNSET
    routing_differs: int | None = None
    annotations: Mapping[str, Any] | None = None
    columns: Mapping[str, AlignedColumn | None] | None = None
    as_of_seq: int = 0
    top: Top | None = None
    age: Age | None = None
    by_turn: bool = False
    lose: Callable[[], int] | None = None

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

    @property
    def failed(self) -> Mapping[str, str] | None:
        """Why the rollout failed: `kind` and, if there is one, `message`."""
        told: Mapping[str, str] | None = msgspec.to_builtins(self.session.failed)
        return told

    @property
    def reward_components(self) -> Mapping[str, float]:
        return {} if self.session.reward is None else self.session.reward.components


class Unfit(Exception):
    """The shape cannot hold this row; the message is the reason that `explain` gives, without content."""


Shape = Callable[[Row], Fields]
"""Raises Unfit."""


Column: TypeAlias = "str | Mapping[str, Column]"

Columns = Mapping[str, Column]
"""The types of a shape's columns, which typed containers need before the first row. A column is one of

- `text`, `bytes`, `bool`, `int64`, `float64`: one value;
- `json`: any value, which may contain arrays; a container without such a type stores its JSON text;
- `[int32]`: a numpy array, or a list of numbers, of any type in `ITEMS`; `[text]` is a list of text;
- `[[int32]]`: an array of two dimensions, or a list of arrays of different lengths; likewise `[[[uint8]]]`;
- a mapping from names to columns: a map with those keys.

Any value may be None. An array of rows may be flat, with two dimensions where the column has three. A container with
one type per column casts an array to it, and refuses if that would change a value; flat rows become one layer there.
The other containers keep each array's own type. A row may omit a column (None) but must not add one.
"""

ITEMS = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool", "text"}
)
"""The item types of arrays."""


def depth(column: str) -> tuple[int, str]:
    """The number of dimensions and the item type: `[[int32]]` is (2, "int32"), `text` is (0, "text")."""
    dimensions = len(column) - len(column.lstrip("["))
    return dimensions, column[dimensions : len(column) - dimensions]
