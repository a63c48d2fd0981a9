"""Reads a branch's tokens for the page, as a trainer gets them: with their texts, their entropy, how they spread over
the colours, and the least likely ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from sqlalchemy import Connection, select

from app.domain.branches import BranchRow, branch_rows, place_of, row_of, turns_left_out
from app.domain.columns import AlignedColumn, Column, align, unpack
from app.domain.events import TurnCommitted
from app.domain.samples import Array, Inconsistent, Sample, Segment, TurnSpan, TurnTokens, sample
from app.domain.session import Session
from app.sessions.conversation import unknown_branch
from app.sessions.session_at import session_at
from app.sessions.tree_view import COPIED
from app.store.content import load_frames, unpack_tokens
from app.store.damage import SPAN
from app.store.ports import Database, of_session
from app.store.schema import annotation_columns
from app.store.sessions import Frames
from workers import codec
from workers.codec import CorruptContent, Exchange, TopLogprobs
from workers.join_text import token_texts
from workers.parse_json import Fields, Rejected, is_null, object_at
from workers.top_logprobs import unpacked

if TYPE_CHECKING:
    from app.features.page.tokenizer import Decode

TEXT_TURNS = 128
"""Maximum number of turns whose stored replies are read for the texts of one reply."""

MAX_BRANCHES = 40
"""Branches without a row are listed up to this number of branches; each costs a walk through its turns."""

MAX_COLUMNS = 16
"""Columns that one page of tokens has; further names are left out."""

LEAST = 30
"""How many of the least likely tokens are listed."""

BEFORE, AFTER = 12, 6
"""Tokens around each of them."""

LOGPROB_EDGES = [math.log(share) for share in (0.001, 0.01, 0.05, 0.2, 0.5, 0.9)]
ENTROPY_EDGES = [0.01, 0.1, 0.3, 0.7, 1.2, 2.0]
CLASSES = 7

_CHOICES = msgspec.json.Decoder(list[msgspec.Raw])


class TokenRow(NamedTuple):
    """A token at position `at` of the row. `version` is an index into the view's `versions`, -1 where not sampled.

    `entropy` in nats is that of the stored most likely tokens, all others taken as one; null where none are stored.
    """

    at: int
    id: int
    sampled: int
    loss_mask: int
    logprob: float | None
    entropy: float | None
    version: int
    turn: int


class BranchTokens(msgspec.Struct, frozen=True):
    """`cause` says why the branch began; `prompt_tokens` is where its first sampled token may be.

    `exported`: it is a row of an export.
    """

    branch: int
    cause: str | None
    tokens: int
    prompt_tokens: int
    exported: bool


TEXT_ONLY = 'this session was created with capture "text": it has no tokens'


class TurnRange(msgspec.Struct, frozen=True):
    """A turn's own tokens are [start, end); its sampled tokens begin at `output_start`. `masked`: why these are not in
    the row's loss. `trimmed` more were sampled, which the next prompt does not have."""

    turn: int
    start: int
    output_start: int
    end: int
    masked: str | None
    trimmed: int
    finish_reason: str | None


class Share(msgspec.Struct):
    """Sampled tokens of the session, and the turns that have them: in this row's loss (TRAINED), or why not. `at`: the
    place in the row that they would follow, of tokens that no row has."""

    reason: str
    at: int | None
    tokens: int = 0
    turns: list[int] = []


TRAINED = "trained"
TRIMMED = "trimmed"
ELSEWHERE = "in other rows"


class Boundary(msgspec.Struct, frozen=True):
    """Tokens sampled from token `at` on have this weight version."""

    at: int
    version: str


class Scale(msgspec.Struct, frozen=True):
    """How the row's tokens spread: counts[i] of them are from edges[i - 1] on and below edges[i].

    A column has CLASSES classes of one width, or one where all its numbers are equal.
    """

    kind: Literal["logprob", "entropy", "column"]
    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    mean: float


class Unlikely(msgspec.Struct, frozen=True):
    """A sampled token, and the text around it, as far as it is known."""

    at: int
    turn: int
    logprob: float
    id: int
    text: str | None
    before: str
    after: str


class Outline(msgspec.Struct, frozen=True):
    """What there is to say of the whole row: its scales, its LEAST least likely sampled tokens, and the `shares` of all
    tokens that the session has sampled: each is in one of them."""

    sampled: int
    shares: Sequence[Share]
    scales: Sequence[Scale]
    least: Sequence[Unlikely]


class TokenView(msgspec.Struct, frozen=True):
    """Tokens from `start` on of the `total` of branch `branch`, which is null if there is none.

    `branches` are those that are rows of an export, this one, and others up to MAX_BRANCHES. `texts` has one text per
    token; it is null if neither a tokenizer (`tokenizer`: there is one) nor the engine gives any. `columns` have one
    number per token, or null, by their names; one that was written again since is not in a view of the past. `error`
    says why they cannot be read.
    """

    branch: int | None
    branches: Sequence[BranchTokens]
    total: int = 0
    start: int = 0
    tokens: Sequence[TokenRow] = ()
    texts: Sequence[str | None] | None = None
    tokenizer: bool = False
    versions: Sequence[str] = ()
    turns: Sequence[TurnRange] = ()
    boundaries: Sequence[Boundary] = ()
    columns: Mapping[str, Sequence[float | None]] = {}
    outline: Outline | None = None
    error: str | None = None


class Asked(NamedTuple):
    """`limit` tokens from position `start` on, of the sampled ones alone where `sampled`, with the row's outline."""

    start: int
    limit: int
    sampled: bool = False
    outline: bool = False


class _Row(NamedTuple):
    """A row, and for each of its tokens the entropy, NaN where it is not known."""

    sample: Sample
    entropies: Array


class TokenViews:
    """Reads token views. `decode` is there if there is a tokenizer."""

    def __init__(self, database: Database, decode: Decode | None) -> None:
        self._database = database
        self._decode = decode

    async def at(self, session_id: str, seq: int | None, branch: int | None, asked: Asked) -> TokenView:
        """Tokens of a branch (None: that of the newest turn) after event `seq`.

        Raises as `session_at`, and NotFound for an unknown branch.
        """
        state = await session_at(self._database, session_id, seq)
        session = state.session
        if session.leaf is None:
            return TokenView(None, [])
        branch = session.leaf.branch if branch is None else branch
        if session.is_text:
            return TokenView(branch, [], error=TEXT_ONLY)
        try:
            row, branches, lost = await asyncio.to_thread(_row_and_branches, session, branch)
        except KeyError:
            raise unknown_branch(session, branch) from None
        turns = [state.turn(number)[1] for number in row.turns]
        frames = await of_session(self._database, session_id, load_frames, row.turns, exchange=False)
        try:
            made = await asyncio.to_thread(_sample, session, row, turns, frames)
            shown = _shown(made.sample, asked)
            columns = await self._columns(session, made.sample, shown, whole=asked.outline)
        except (CorruptContent, Inconsistent) as error:
            return TokenView(branch, branches, error=str(error))
        counts = {turn.turn: turn.output_tokens for turn in turns}
        least = await asyncio.to_thread(_least, made.sample) if asked.outline else shown[:0]
        total = len(made.sample.tokens)
        windows = [np.arange(max(0, at - BEFORE), min(total, at + AFTER + 1)) for at in least.tolist()]
        wanted = np.unique(np.concatenate([*windows, shown])).astype(np.int64)
        texts = await self._texts(session_id, made.sample, counts, wanted)
        view = await asyncio.to_thread(_view, made, counts, lost.masked, shown, texts, columns)
        outline = None
        if asked.outline:
            outline = await asyncio.to_thread(_outline, session, made, lost, least, texts, columns)
        has_tokenizer = self._decode is not None
        return replace(
            view, branch=branch, branches=branches, start=asked.start, tokenizer=has_tokenizer, outline=outline
        )

    async def _columns(self, session: Session, made: Sample, shown: Array, *, whole: bool) -> dict[str, AlignedColumn]:
        """The columns of the shown tokens' turns, or of all, by name. Raises CorruptContent."""
        written = {
            said.seq: (turn, name, said.column)
            for turn in sorted({span.turn for span in _spans_of(made, shown, whole)} & session.annotations.keys())
            for name, said in session.annotations[turn].items()
            if said.column is not None
        }
        names = list(dict.fromkeys(name for _, name, _ in written.values()))[:MAX_COLUMNS]
        if not names:
            return {}
        wanted = [seq for seq, (_, name, _) in written.items() if name in names]
        data = await of_session(self._database, session.session_id, _load_columns, wanted)

        def aligned() -> dict[str, AlignedColumn]:
            by_name: dict[str, dict[int, Column]] = {name: {} for name in names}
            for seq, frame in data.items():
                turn, name, ref = written[seq]
                by_name[name][turn] = unpack(frame, ref)
            rows = {name: align(made.turns, columns) for name, columns in by_name.items()}
            return {name: row for name, row in rows.items() if row is not None}

        return await asyncio.to_thread(aligned)

    async def _texts(self, session_id: str, made: Sample, counts: Mapping[int, int], wanted: Array) -> dict[int, str]:
        """The texts of these positions, in order, as far as they are known. `counts`: output tokens by turn."""
        decode = self._decode
        if decode is not None:
            ids = dict(zip(wanted.tolist(), made.tokens[wanted].tolist(), strict=True))
            known = await asyncio.to_thread(lambda: {one: decode([one]) for one in set(ids.values())})
            return {at: known[one] for at, one in ids.items()}
        spans = [span for span in _spans_of(made, wanted) if wanted[-1] >= span.output_start][:TEXT_TURNS]
        numbers = [span.turn for span in spans]
        frames = await of_session(self._database, session_id, load_frames, numbers, tokens=False)
        return await asyncio.to_thread(_texts_of_spans, spans, counts, frames, set(wanted.tolist()))


class _Lost(NamedTuple):
    """Why turns are not in a row's loss, and those of them that are `gone`: in no row. `trimmed`: of each turn in the
    loss of another row, how many of its tokens the next prompt there does not have."""

    masked: Mapping[int, str]
    gone: Collection[int]
    trimmed: Mapping[int, int]


def _row_and_branches(session: Session, branch: int) -> tuple[BranchRow, list[BranchTokens], _Lost]:
    """The row of a branch, the branches to choose from, and what the row has not in its loss. Raises KeyError."""
    rows = {row.leaf.branch: row for row in branch_rows(session)}
    exported = set(rows)
    gone = {turn.number: why.partition(":")[0] for turn, why in turns_left_out(session, list(rows.values()), "kept")}
    masked = gone | dict.fromkeys(range(1, session.context_turns + 1), COPIED)
    trimmed: dict[int, int] = {}
    for one, row in rows.items():
        if one != branch:
            masked |= dict.fromkeys(row.in_loss, f"in the loss of branch {one}")
            for turn, after in pairwise(map(session.turn, row.turns)):
                if turn.number in row.in_loss:
                    trimmed[turn.number] = turn.token_count - after.base_tokens
    if branch not in rows:
        rows[branch] = row_of(session, branch)
    for other in range(session.branches):
        if len(rows) >= MAX_BRANCHES:
            break
        if other not in rows:
            rows[other] = row_of(session, other)
    branches = []
    for one, row in sorted(rows.items()):
        first, leaf = session.turn(row.turns[0]), row.leaf
        prompt_tokens, cause = first.token_count - first.output_tokens, place_of(session, leaf).cause
        branches.append(BranchTokens(leaf.branch, cause, leaf.token_count, prompt_tokens, one in exported))
    return rows[branch], branches, _Lost(masked, gone.keys(), trimmed)


def _sample(session: Session, row: BranchRow, turns: Sequence[TurnCommitted], frames: Frames) -> _Row:
    """The same sample that an export makes. Raises CorruptContent, Inconsistent."""
    tokens = unpack_tokens(frames, row.turns)
    content = {}
    for turn in turns:
        stored = tokens[turn.turn]
        content[turn.turn] = TurnTokens(turn, stored.suffix_ids, stored.output_ids, stored.logprobs)
    made = sample(Segment(row, place_of(session, row.leaf), turns, cut=False), content)
    return _Row(made, _entropies(made, {number: stored.top for number, stored in tokens.items()}))


def _entropies(made: Sample, tops: Mapping[int, TopLogprobs | None]) -> Array:
    entropies = np.full(len(made.tokens), np.nan)
    for span in made.turns:
        top = tops.get(span.turn)
        if top is None or top.output is None:
            continue
        # A turn may be cut, and its last token trimmed by the next one.
        logprobs = unpacked(top.output)[1][: span.end - span.output_start].astype(np.float64)
        shares = np.exp(logprobs)
        rest = np.clip(1 - shares.sum(axis=1), 1e-12, None)
        entropy = -(shares * logprobs).sum(axis=1) - rest * np.log(rest)
        entropies[span.output_start : span.output_start + len(entropy)] = entropy
    return entropies


def _shown(made: Sample, asked: Asked) -> Array:
    """The positions that are asked for, in order."""
    if asked.sampled:
        return np.flatnonzero(made.sampled_mask[asked.start :])[: asked.limit] + asked.start
    return np.arange(asked.start, max(asked.start, min(asked.start + asked.limit, len(made.tokens))))


def _spans_of(made: Sample, positions: Array, whole: bool = False) -> list[TurnSpan]:
    """The turns that have any of these positions, which are in order; or all turns."""
    if whole:
        return list(made.turns)
    ends = np.searchsorted(positions, [span.end for span in made.turns]).tolist()
    begins = np.searchsorted(positions, [span.start for span in made.turns]).tolist()
    return [span for span, begin, end in zip(made.turns, begins, ends, strict=True) if end > begin]


def _least(made: Sample) -> Array:
    """The positions of the least likely sampled tokens, the least likely first."""
    sampled = np.flatnonzero(made.sampled_mask)
    return sampled[np.argsort(made.logprobs[sampled], kind="stable")[:LEAST]]


def _view(
    made: _Row,
    counts: Mapping[int, int],
    masked: Mapping[int, str],
    shown: Array,
    texts: Mapping[int, str],
    columns: Mapping[str, AlignedColumn],
) -> TokenView:
    whole = made.sample
    versions = list(dict.fromkeys(span.version for span in whole.version_spans))
    by_token = np.full(len(whole.tokens), -1, np.int32)
    turns = np.zeros(len(whole.tokens), np.int32)
    for span in whole.version_spans:
        by_token[span.start : span.end] = versions.index(span.version)
    for turn in whole.turns:
        turns[turn.start : turn.end] = turn.turn
    boundaries: list[Boundary] = []
    for span in whole.version_spans:
        if span.end > span.start and (not boundaries or boundaries[-1].version != span.version):
            boundaries.append(Boundary(span.start, span.version))
    places = shown.tolist()
    arrays = (whole.tokens, whole.sampled_mask, whole.loss_mask, whole.logprobs, made.entropies, by_token, turns)
    rows = zip(places, *(array[shown].tolist() for array in arrays), strict=True)
    return TokenView(
        branch=None,
        branches=(),
        total=len(whole.tokens),
        tokens=[
            TokenRow(
                *(at, token, sampled, masked),
                logprob if sampled else None,
                None if math.isnan(entropy) else round(entropy, 5),
                *(version, turn),
            )
            for at, token, sampled, masked, logprob, entropy, version, turn in rows
        ],
        texts=[texts.get(at) for at in places] if texts.keys() & set(places) else None,
        versions=versions,
        turns=[
            TurnRange(
                *(span.turn, span.start, span.output_start, span.end, masked.get(span.turn)),
                trimmed=counts[span.turn] - (span.end - span.output_start),
                finish_reason=span.finish_reason,
            )
            for span in whole.turns
        ],
        boundaries=boundaries,
        columns={
            name: [
                value if there else None
                for value, there in zip(column.values[shown].tolist(), column.mask[shown], strict=True)
            ]
            for name, column in columns.items()
        },
    )


def _shares(session: Session, made: Sample, lost: _Lost) -> list[Share]:
    """What has become of each token that the session has sampled, the trained ones first."""
    shares: dict[tuple[str, int | None], Share] = {(TRAINED, None): Share(TRAINED, None)}

    def add(reason: str, turn: int, tokens: int, at: int | None = None) -> None:
        if tokens:
            share = shares.setdefault((reason, at), Share(reason, at))
            share.tokens += tokens
            share.turns.append(turn)

    spans = {span.turn: span for span in made.turns}
    ends = [*(after.start for after in made.turns[1:]), len(made.tokens)]
    # Of a turn that the row has, where the next one begins; of one that is gone, where it would have begun.
    places = {0: 0, **{span.turn: end for span, end in zip(made.turns, ends, strict=True)}}
    for turn in session.every_turn:
        number, count, reason = turn.number, turn.output_tokens, lost.masked.get(turn.number)
        if (span := spans.get(number)) is not None:
            kept = span.end - span.output_start
            add(reason or TRAINED, number, kept)
            add(TRIMMED, number, count - kept)
        elif number in lost.gone:
            if turn.parent in places:
                places[number] = places[turn.parent]
            add(reason or "", number, count, places.get(number))
        elif reason == COPIED:
            add(COPIED, number, count)
        else:
            trimmed = lost.trimmed.get(number, 0)
            add(ELSEWHERE, number, count - trimmed)
            add(TRIMMED, number, trimmed)
    return list(shares.values())


def _outline(
    session: Session,
    made: _Row,
    lost: _Lost,
    least: Array,
    texts: Mapping[int, str],
    columns: Mapping[str, AlignedColumn],
) -> Outline:
    whole = made.sample
    is_sampled = whole.sampled_mask == 1
    scales = [_scale("logprob", "logprob", whole.logprobs[is_sampled], LOGPROB_EDGES)]
    scales.append(_scale("entropy", "entropy", made.entropies[~np.isnan(made.entropies)], ENTROPY_EDGES))
    scales += [_scale("column", name, column.values[column.mask == 1]) for name, column in columns.items()]

    def text(start: int, end: int) -> str:
        return "".join(texts.get(at, "") for at in range(start, end))

    turn_of = np.searchsorted([span.end for span in whole.turns], least, side="right").tolist()
    return Outline(
        sampled=int(whole.sampled_mask.sum()),
        shares=_shares(session, whole, lost),
        scales=[scale for scale in scales if scale is not None],
        least=[
            Unlikely(
                at=at,
                turn=whole.turns[place].turn,
                logprob=float(whole.logprobs[at]),
                id=int(whole.tokens[at]),
                text=texts.get(at),
                before=text(max(0, at - BEFORE), at),
                after=text(at + 1, at + AFTER + 1),
            )
            for at, place in zip(least.tolist(), turn_of, strict=True)
        ],
    )


def _scale(
    kind: Literal["logprob", "entropy", "column"], name: str, values: Array, edges: Sequence[float] = ()
) -> Scale | None:
    """None where there is no number."""
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if not edges and low < high:
        edges = np.linspace(low, high, CLASSES + 1)[1:-1].tolist()
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    return Scale(kind, name, edges, counts.tolist(), float(values.mean()))


def _load_columns(connection: Connection, session_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
    """The frames that these events wrote, without those that were replaced since."""
    query = select(annotation_columns.c.seq, annotation_columns.c.data).where(
        annotation_columns.c.session_id == session_id
    )
    parts = (seqs[at : at + SPAN] for at in range(0, len(seqs), SPAN))
    return {
        seq: data for part in parts for seq, data in connection.execute(query.where(annotation_columns.c.seq.in_(part)))
    }


def _texts_of_spans(
    spans: Sequence[TurnSpan], counts: Mapping[int, int], frames: Frames, wanted: set[int]
) -> dict[int, str]:
    """The texts of sampled tokens from the engine's stored replies."""
    return {
        at: text.decode(errors="replace")
        for span in spans
        for at, text in enumerate(
            _texts_of(frames.get(span.turn, (None, None))[1], counts[span.turn]), span.output_start
        )
        if at in wanted and at < span.end
    }


def _texts_of(frame: bytes | None, count: int) -> Sequence[bytes]:
    """The texts in a stored reply; empty if it has none or is damaged, since only people read them."""
    try:
        exchange = codec.unpack(frame, Exchange)
        root = object_at(codec.paste(exchange, memoryview(b"").cast("i"), {}), "the body")
        choice = object_at(_CHOICES.decode(root.get("choices", b"[]"))[0], "choices[0]")
        return token_texts(_fields(choice, "meta_info"), _fields(choice, "logprobs"), count) or ()
    except (CorruptContent, Rejected, msgspec.MsgspecError, IndexError):
        return ()


def _fields(home: Fields, name: str) -> Fields:
    raw = home.get(name)
    return {} if raw is None or is_null(raw) else object_at(raw, name)
