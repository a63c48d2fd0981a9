"""What several shapes have: which rollout a row is, and its rewards, temperatures, images and payloads.

A session's reward is the whole of what it earned; the rewards of its turns say which turn earned which part. So the
rewards of a row's tokens add up to the row's reward, and a trainer that sums them has the number that it has without.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.domain.images import data_url
from app.domain.patterns import MAX_FLOAT32
from app.domain.samples import Array, TurnSpan
from app.export.row import Columns, Fields, Row, TurnContent, Unfit
from workers.codec import describe
from workers.sampling_masks import Masks

IDENTITY: Columns = {
    "session_id": "text",
    "segment": "int64",
    "run": "text",
    "group_id": "text",
    "attempt": "int64",
    "status": "text",
    "failed": "json",
    "final": "bool",
    "cursor": "text",
}
"""Beside a trainer's own columns, so that an export can be resumed."""

ROLLOUT: Columns = {"rollout_id": "text", "rollout_rows": "int64", "rollout_weight": "float64"}
"""For trainers that count rollouts instead of rows."""

SAMPLING: Columns = {"sampling": "json"}
"""Which distribution each turn's logprobs are of."""

ROUTED: Columns = {"routing": "text", "routing_differs": "int64"}
"""Columns beside it in an export of sampled rows of replay payloads."""

LEFT_OUT: Columns = {"images_left_out": "int64"}

BESIDE: Columns = {**IDENTITY, **ROLLOUT, **SAMPLING, **LEFT_OUT}
"""The last columns of a trainer's shape, as `beside` gives them."""


def beside(row: Row) -> Fields:
    return {**identity(row), **rollout(row), **sampling(row), **left_out(row)}


def beside_messages(row: Row) -> Fields:
    """Of a shape with messages, which hold the images themselves with `images=inline`."""
    return {**identity(row), **rollout(row), **sampling(row), **placed_images(row, lambda shown: {})}


def identity(row: Row) -> Fields:
    """`cursor` gives what comes after the row."""
    return {
        "session_id": row.session.session_id,
        "segment": row.sample.segment,
        "run": row.session.config.of_run,
        "group_id": row.group_id,
        "attempt": row.session.config.attempt,
        "status": row.sample.status,
        "failed": row.failed,
        "final": row.final,
        "cursor": row.cursor,
    }


def identity_of(shaped: Fields) -> Fields:
    """The identity that a shaped row has; of a session's row without a segment, of a group's that of its last session.

    Raises KeyError for a row without one.
    """
    fields: Any = shaped
    if "session_ids" in fields:
        return {"session_id": fields["session_ids"][-1], "segment": None, "cursor": fields["cursor"]}
    if "leaves" in fields:
        return {"session_id": fields["session_id"], "segment": None, "cursor": fields["cursor"]}
    if "cursor" not in fields:
        fields = fields.get("extra_fields") or fields.get("extra") or fields["metadata"]["turnlog"]
    return {name: fields[name] for name in ("session_id", "segment", "cursor")}


def rollout(row: Row) -> Fields:
    return {"rollout_id": row.rollout_id, "rollout_rows": row.rollout_rows, "rollout_weight": row.rollout_weight}


def sampling(row: Row) -> Fields:
    sampling = {"sampling": [msgspec.structs.asdict(turn) for turn in row.sampling]}
    if row.routing_differs is None:
        return sampling
    return {**sampling, "routing": "sampled", "routing_differs": row.routing_differs}


def left_out(row: Row) -> Fields:
    """How many stored images the row's turns brought, if any."""
    return {"images_left_out": row.stored_images} if row.stored_images else {}


def placed_images(row: Row, place: Callable[[list[str]], Fields]) -> Fields:
    """What `place` makes of the images of the row's messages, in their order. Without images nothing; where the export
    does not ask for bytes (`images=inline`), how many are left out.

    An image is a URL, which for an inline one is a data URL: TRL's and verl's processors and `datasets` decode both.
    """
    shown = row.images or ()
    if row.stored_images and all(image.bytes is None for image in shown):
        return left_out(row)
    urls = []
    for image in shown:
        if image.bytes is None:
            assert image.url is not None  # of an image without a URL the bytes are stored: it is left out above
            urls.append(image.url)
        else:
            urls.append(data_url(image.media_type or "", image.bytes))
    return place(urls) if urls else {}


class Generation(NamedTuple):
    """A turn of a row: its place in the sample, the messages that it was asked with, raw, and the id of the turn
    before it in the row. `name` is its own id."""

    name: str
    parent: str | None
    turn: TurnContent
    span: TurnSpan
    messages: Sequence[bytes]


def generations(row: Row) -> Iterator[Generation]:
    """The row's turns, oldest first."""
    turns = list(row.turns)
    own = sum(len(turn.messages) + 1 for turn in turns)
    # Of earlier segments. Turns by ids alone have no messages but their own.
    said = [*row.messages[: max(len(row.messages) - own, 0)]]
    parent = None
    for turn, span in zip(turns, row.sample.turns, strict=True):
        said = [*(said if turn.event.base_messages else ()), *turn.messages]
        name = f"{row.session.session_id}.{span.turn}"
        yield Generation(name, parent, turn, span, said)
        said, parent = [*said, turn.message], name


def trained(row: Row) -> Iterator[Generation]:
    """The turns that have a token in the row's loss: in all rows of a session each generation once."""
    mask = row.sample.loss_mask
    return (one for one in generations(row) if mask[one.span.output_start : one.span.end].any())


class _Model(msgspec.Struct, frozen=True):
    model: object = None


describe(_Model)


def model_of(params: bytes) -> str | None:
    """None where the request names none, or none that is text."""
    try:
        named = msgspec.json.decode(params, type=_Model).model
    except msgspec.DecodeError:
        return None
    return named if isinstance(named, str) else None


class _Reply(msgspec.Struct, frozen=True):
    content: str | None = None


describe(_Reply)


def replies(row: Row) -> str:
    """The text of the row's replies, a line after the other. A completion's answer is a text rather than a message."""
    answers = [msgspec.json.decode(turn.message, type=str | _Reply) for turn in row.turns]
    return "\n".join(answer if isinstance(answer, str) else answer.content or "" for answer in answers)


def rollout_number(name: str) -> int:
    """A number that only the rows of this rollout, or session, have: 53 bits of a hash, which JSON holds exactly.

    slime averages the loss over the rows of one rollout before it averages over rollouts; without a number each
    segment of a session would count as a rollout.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) >> 3


def weight_versions(row: Row) -> list[str]:
    """The engines' names, one a turn; a turn during which the weights changed gives each of them, in order."""
    return [span.version for span in row.sample.version_spans]


def advantages(row: Row) -> Array | None:
    """float [T], 0.0 outside the loss: the column `advantages` if the export asks for it, else the row's advantage.

    None without either. Raises Unfit where the column has no value at a token in the loss.
    """
    mask = row.sample.loss_mask
    if row.columns is None or "advantages" not in row.columns:
        return None if row.advantage is None else np.where(mask, row.advantage, 0.0)
    column = row.columns["advantages"]
    lacking = int(np.count_nonzero(mask if column is None else mask > column.mask))
    if lacking:
        raise Unfit(f"the column advantages has no value at {lacking} tokens in the loss")
    return np.zeros(len(mask)) if column is None else np.where(mask, column.values, 0.0)


def turn_rewards(row: Row) -> list[float]:
    """What each turn of the row earned; 0.0 where nothing was assigned, or where the row does not train the turn."""
    mask, given = row.sample.loss_mask, row.session.turn_rewards
    return [
        given[span.turn].reward if span.turn in given and mask[span.output_start : span.end].any() else 0.0
        for span in row.sample.turns
    ]


def token_rewards(row: Row) -> Array | None:
    """float64 [T]: what a turn earned at its last token in the loss, the rest of the row's reward at the row's last.

    None without a reward. Raises Unfit where a float32 cannot hold a token's reward, as trainers keep it.
    """
    if row.reward is None:
        return None
    mask, earned = row.sample.loss_mask, turn_rewards(row)
    rewards = np.zeros(len(mask))
    for span, reward in zip(row.sample.turns, earned, strict=True):
        if reward:
            rewards[span.output_start + np.flatnonzero(mask[span.output_start : span.end])[-1]] = reward
    trained = np.flatnonzero(mask)
    rewards[trained[-1] if trained.size else -1] += row.reward - math.fsum(earned)
    if np.abs(rewards).max() > MAX_FLOAT32:
        raise Unfit("the reward of a token is beyond a float32")
    return rewards


class _Params(msgspec.Struct, frozen=True):
    temperature: float | None = None


describe(_Params)


def temperatures(row: Row) -> list[float]:
    """At which temperature each turn of the row's sample was sampled, for trainers that scale logits by it: where its
    request names none 1.0, OpenAI's default; an engine may be configured to another.

    Raises Unfit for one that is no number.
    """
    named: list[float] = []
    for turn in row.turns:
        try:
            given = msgspec.json.decode(turn.params, type=_Params).temperature
        except msgspec.DecodeError as error:
            raise Unfit(f"turn {turn.event.turn}: the temperature cannot be read as a number") from error
        named.append(1.0 if given is None else given)
    return named


def payload(row: Row, kind: str, dtype: type[np.signedinteger[Any]] = np.int32) -> tuple[Array | None, str | None]:
    """All rows of a replay payload for trainers that want one for every token but the last: ids of [T-1, layers, k], or
    None and why. Never padded.

    Where neither the engine nor the settings tell the shape of a row, rows are flat: [T-1, layers × k]. None and no
    reason where the session had no such payload, or the export does not ask for payloads.
    """
    if kind not in row.routing:
        return None, None
    routing = row.routing[kind]
    if routing is None:
        return None, "tombstoned"
    needed = max(len(row.sample.tokens) - 1, 0)
    ids = routing.ids
    if routing.row_start or len(ids) != needed:
        return None, f"rows {routing.row_start} to {routing.row_start + len(ids)} are there; expected {needed}"
    if ids.size and ids.max() > np.iinfo(dtype).max:
        return None, f"an id exceeds {np.iinfo(dtype).max}"
    return ids.astype(dtype), None


def sampling_mask(row: Row, first: int) -> tuple[Masks | None, str | None]:
    """The sampling mask of the tokens from `first` on, which may be 0, or None and why.

    None and no reason where the session had none, or the export does not ask for payloads.
    """
    if row.mask is msgspec.UNSET:
        return None, None
    if row.mask is None:
        return None, "tombstoned"
    start, rows = row.mask.row_start, len(row.mask.masks)
    tokens = len(row.sample.tokens)
    if start > max(first - 1, 0) or start + rows < tokens - 1:
        return None, f"rows {start} to {start + rows} are there; expected {max(first - 1, 0)} to {tokens - 1}"
    mask = row.mask.masks.part(max(first - 1, 0) - start, tokens - 1 - start)
    return mask if first else Masks.of(np.append(0, mask.lengths), mask.ids), None
