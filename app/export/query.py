"""The parameters of an export (which sessions it gives rows of, and how), and the cursors of its positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from app.domain import cursors
from app.domain.branches import Branches, Loss
from app.domain.groups import OnFailed
from app.domain.patterns import ANNOTATION, MAX_INTEGER, NO_NUL
from app.domain.samples import RoutingOf, Stale, Truncate
from app.domain.selection import Selection
from app.errors import InvalidRequest
from app.store.feed import Position
from workers.top_logprobs import MAX_TOP

Text = Annotated[str | None, Field(pattern=NO_NUL)]
Number = Annotated[float | None, Field(allow_inf_nan=False)]
Count = Annotated[int | None, Field(ge=0, le=MAX_INTEGER)]
Size = Annotated[int | None, Field(ge=1, le=MAX_INTEGER)]
Moment = Annotated[float | None, WithJsonSchema({"type": "string"})]
"""Seconds since the epoch, or ISO 8601 text, UTC if it names no zone."""


_boolean = TypeAdapter(bool)


def _or(word: str) -> tuple[PlainValidator, WithJsonSchema]:
    def read(given: object) -> object:
        if given == word:
            return word
        try:
            return _boolean.validate_python(given)
        except ValidationError:
            raise PydanticCustomError("boolean", f"Input should be a boolean, or {word}") from None

    return PlainValidator(read), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": word}]})


Replay = Annotated[bool | Literal["urls"], *_or("urls")]

Explain = Annotated[bool | Literal["only"], *_or("only")]

_NAME = ANNOTATION[1:-1]

MAX_COLUMNS = 16
"""Columns of one export."""

Images = Literal["inline", "hash", "none"]

Rewards = Literal["total", "turn"]
"""A row's reward as one number, or parts of it where turns earned them."""

MAX_URL_S = 7 * 86400
"""S3 signs for no longer."""


class RowQuery(BaseModel):
    """The parameters that an export and the training feed share.

    `max_staleness`: how many weight versions a sampled token may be behind `weight_version`. If that is None, it is the
    newest of the session's run; an export takes that from its cursor. `stale` says what becomes of older ones.
    """

    model_config = ConfigDict(frozen=True)

    max_staleness: Count = Field(default=None, description="At most this many weight versions behind `weight_version`.")
    weight_version: Count = Field(
        default=None, description="The current weight version; default: the newest of the session's run."
    )
    stale: Stale = Field(
        default="drop",
        description="What becomes of a token that is more than `max_staleness` behind: its session (in the feed its "
        "group) is left out (`drop`), it leaves the loss mask (`mask`), or the row only says how old it is (`keep`).",
    )
    failed: OnFailed = Field(
        default="drop",
        description="Rollouts that failed: their group's advantages leave them out (`drop`), or take the reward that "
        "they have (`keep`), and those without one are left out of the rows.",
    )
    evaluation: bool = Field(default=False, description="Sessions of evaluations too, and their weight versions.")
    branches: Branches | None = Field(
        default=None,
        description="Which leaves of a tree become rows: all but superseded ones (`kept`), the newest turn's (`main`), "
        "the one with the most tokens (`longest`), or every one (`all`). The default is the operator's, else `kept`.",
    )
    loss: Loss = Field(
        default="once", description="Whether a sampled token is in the loss of one row, or of every row that has it."
    )
    shape: str = Field(default="turnlog", description="What a row holds: Turnlog's own, or a trainer's.")
    max_seq_len: Size = Field(default=None, description="Cut rows to at most this many tokens.")
    rewards: Rewards = Field(
        default="total",
        description="A row's reward as one number (`total`), or, in shapes that take one for each token, at the token "
        "that earned it (`turn`).",
    )
    images: Images = Field(
        default="hash",
        description="The images of a row's messages: their bytes too (`inline`), only by their hash, or not at all "
        "(`none`). In messages an image is a reference; with `inline` it is a data URL.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOP,
        description="The k most likely tokens at each token, if the engine was asked for them, and prompts' logprobs.",
    )
    truncate: Truncate = Field(
        default="turn", description="Where `max_seq_len` cuts: after the last whole turn, or inside a turn's output."
    )
    columns: str | None = Field(
        default=None,
        pattern=rf"^{_NAME}(,{_NAME}){{0,{MAX_COLUMNS - 1}}}$",
        description="The columns of numbers that rows have too: names with commas between them.",
    )

    @property
    def column_names(self) -> Sequence[str]:
        return () if self.columns is None else list(dict.fromkeys(self.columns.split(",")))


MAX_RUNS = 100
"""Runs of which a cursor holds the current weight versions."""


class ExportQuery(Selection, RowQuery):
    """Which rows to give (None: any), how many, and in which form."""

    format: str = Field(default="ndjson", description="The format of the reply.")
    explain: Explain = Field(
        default=False, description="Also say what was left out, and why; `only`: without the rows."
    )
    session_id: Text = Field(default=None, description="A session's id.")
    name: Text = Field(default=None, description="The sessions' name.")
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Only this generation of the name.")
    status: Literal["completed", "truncated", "aborted"] | None = Field(default=None, description="Only such.")
    session_status: Literal["open", "closed", "erased"] | None = Field(
        default=None, description="Only rows of such sessions."
    )
    since: Moment = Field(
        default=None,
        description="Only sessions whose last live turn was committed then or later: seconds since the epoch, "
        "or ISO 8601.",
    )
    until: Moment = Field(default=None, description="Only sessions whose last live turn was committed then or before.")
    min_reward: Number = Field(default=None, description="Only sessions with at least this reward.")
    max_reward: Number = Field(default=None, description="Only sessions with at most this reward.")
    limit: Size = Field(default=None, description="Maximum number of rows.")
    replay: Replay = Field(
        default=False, description="Include replay payloads; `urls`: as URLs of the object storage that they are in."
    )
    routing: RoutingOf = Field(
        default="newest",
        description="With `replay`: each token's row of experts and positions as the newest turn has it, or, for the "
        "tokens of each turn, as that turn has it (`sampled`).",
    )
    url_s: int = Field(
        default=3600, ge=1, le=MAX_URL_S, description="With `replay=urls`: how many seconds a URL is valid."
    )
    advantage: Literal["grpo"] | None = Field(
        default=None, description="Compute an advantage for each row within its group."
    )

    @field_validator("since", "until", mode="before")
    @classmethod
    def _moment(cls, value: object, info: ValidationInfo) -> object:
        """Raises InvalidRequest."""
        if not isinstance(value, str):
            return value
        seconds = math.nan
        with suppress(ValueError):
            seconds = float(value)
        if math.isnan(seconds):
            with suppress(ValueError):
                moment = datetime.fromisoformat(value)
                seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if not math.isfinite(seconds):
            raise InvalidRequest(
                f"{info.field_name}={value:.64} is neither seconds since the epoch nor a time of ISO 8601"
            )
        return seconds

    @property
    def mark(self) -> str:
        """Of the filters, in a cursor."""
        return cursors.mark(self, FILTERS)

    @property
    def needs_current(self) -> bool:
        """Must be known which weight version is current in each run?"""
        return self.weight_version is None and (self.max_staleness is not None or self.stale == "keep")


FILTERS = frozenset(
    {
        *Selection.model_fields,
        *("session_id", "name", "generation", "status", "session_status"),
        *("since", "until", "min_reward", "max_reward", "evaluation", "failed"),
    }
)
"""The parameters of an export that say which rows there are, whatever is current; a cursor belongs to them."""


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An export's position. `high` None: up to the time of the request.

    `at` is the position of the last page. `given`: only so many of that page's rows were sent, excluded ones counted.
    `newest` are the largest weight versions by run when the window was fixed, of those that were numbers, so that a
    repeated window gives the same rows; None where the export does not ask for them. `mark` is that of the filters.
    """

    epoch: str
    low: Position
    high: Position | None = None
    at: Position | None = None
    given: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)] | None = None
    newest: dict[cursors.Text, Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]] | None = None
    mark: str = ""

    def encode(self) -> str:
        return cursors.encode(self)

    @property
    def place(self) -> Position:
        """The position after which the export resumes."""
        if self.at is None:
            return self.low
        return self.at if self.given is None else Position(self.at.tx, self.at.position - 1)

    def behind(self, at: Position, number: int = 1, total: int = 1) -> str:
        """The cursor after row `number` of a page's `total` rows; empty if the export has no cursors."""
        if not self.epoch:
            return ""
        return msgspec.structs.replace(self, at=at, given=number if number < total else None).encode()

    def current(self, query: RowQuery, run: str) -> int | None:
        """Which weight version is current in a run: the client's, else the run's newest."""
        return (self.newest or {}).get(run) if query.weight_version is None else query.weight_version


def decode_cursor(text: str) -> Cursor:
    """Raises InvalidRequest."""
    cursor: Cursor = cursors.decode(text, Cursor, "an export")
    return cursor
