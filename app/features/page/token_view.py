"""Reads a branch's tokens for the page, as a trainer gets them, with the text that the engine gave for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Connection, select

from app.domain.branches import BranchRow, branch_rows, place_of, row_of
from app.domain.columns import Column, align, unpack
from app.domain.events import TurnCommitted
from app.domain.samples import Array, Inconsistent, Sample, Segment, TurnSpan, TurnTokens, sample
from app.domain.session import Session
from app.features.page.conversation import unknown_branch
from app.sessions.session_at import session_at
from app.store import reads
from app.store.engine import Database
from app.store.reads import Frames
from app.store.schema import annotation_columns
from workers import codec
from workers.codec import CorruptContent, Exchange
from workers.join_text import token_texts
from workers.parse_json import Fields, Rejected, is_null, object_at

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

TEXT_TURNS = 64
"""Maximum number of turns whose stored replies are read for the texts of one page of tokens."""

MAX_BRANCHES = 40
"""Branches without a row are listed up to this number of branches; each costs a walk through its turns."""

MAX_COLUMNS = 16
"""Columns that one page of tokens has; further names are left out."""

_CHOICES = msgspec.json.Decoder(list[msgspec.Raw])


class TokenRow(NamedTuple):
    """A token. `version` is an index into the view's `versions`; -1 if the token was not sampled."""

    id: int
    sampled: int
    loss_mask: int
    logprob: float | None
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


TEXT_ONLY = "this session captures text only: it has no tokens"


class TurnRange(msgspec.Struct, frozen=True):
    """A turn's own tokens are [start, end); its sampled tokens begin at `output_start`."""

    turn: int
    start: int
    output_start: int
    end: int


class Boundary(msgspec.Struct, frozen=True):
    """Tokens sampled from token `at` on have this weight version."""

    at: int
    version: str


class TokenView(msgspec.Struct, frozen=True):
    """Tokens [start, start + len(tokens)) of the `total` of branch `branch`, which is null if there is none.

    `branches` are those that are rows of an export, this one, and others up to MAX_BRANCHES. `texts` has one text per
    token; it is null if neither a tokenizer nor the engine gives any. `columns` have one number per token, or null, by
    their names; one that was written again since is not in a view of the past. `error` says why they cannot be read.
    """

    branch: int | None
    branches: Sequence[BranchTokens]
    total: int
    start: int
    tokens: Sequence[TokenRow]
    texts: Sequence[str | None] | None
    versions: Sequence[str]
    turns: Sequence[TurnRange]
    boundaries: Sequence[Boundary]
    columns: Mapping[str, Sequence[float | None]] = {}
    error: str | None = None


class TokenViews:
    """Reads token views. `prompts` contains the tokenizer, if there is one."""

    def __init__(self, database: Database, prompts: Prompts | None) -> None:
        self._database = database
        self._prompts = prompts

    async def at(self, session_id: str, seq: int | None, branch: int | None, start: int, limit: int) -> TokenView:
        """Tokens of a branch (None: that of the newest turn) after event `seq`.

        Raises as `session_at`, and NotFound for an unknown branch.
        """
        found = await session_at(self._database, session_id, seq)
        session = found.session
        if session.leaf is None:
            return TokenView(None, [], 0, 0, [], None, [], [], [])
        branch = session.leaf.branch if branch is None else branch
        if session.is_text:
            return TokenView(branch, [], 0, start, [], None, [], [], [], error=TEXT_ONLY)
        try:
            row, branches = await asyncio.to_thread(_row_and_branches, session, branch)
        except KeyError:
            raise unknown_branch(session, branch) from None
        turns = [found.turn(number)[1] for number in row.turns]
        frames = await self._frames(session_id, row.turns, exchange=False)
        try:
            made = await asyncio.to_thread(_sample, session, row, turns, frames)
            columns = await self._columns(session, made, start, limit)
        except (CorruptContent, Inconsistent) as error:
            return TokenView(branch, branches, 0, start, [], None, [], [], [], error=str(error))
        counts = {turn.turn: turn.output_tokens for turn in turns}
        texts = await self._texts(session_id, made, counts, start, limit)
        return await asyncio.to_thread(_view, made, branch, branches, start, limit, texts, columns)

    async def _frames(self, session_id: str, numbers: Sequence[int], *, exchange: bool) -> Frames:
        return await self._database.read(
            lambda connection: reads.load_frames(
                connection, session_id, numbers, tokens=not exchange, exchange=exchange
            ),
            session_id=session_id,
        )

    async def _columns(self, session: Session, made: Sample, start: int, limit: int) -> dict[str, list[float | None]]:
        """One number per token of the page, by the names of its turns' columns. Raises CorruptContent."""
        shown = {span.turn for span in made.turns if span.start < start + limit and span.end > start}
        written = {
            said.seq: (turn, name, said.column)
            for turn in sorted(shown & session.annotations.keys())
            for name, said in session.annotations[turn].items()
            if said.column is not None
        }
        names = list(dict.fromkeys(name for _, name, _ in written.values()))[:MAX_COLUMNS]
        if not names:
            return {}
        wanted = [seq for seq, (_, name, _) in written.items() if name in names]
        data = await self._database.read(
            lambda connection: _load_columns(connection, session.session_id, wanted),
            session_id=session.session_id,
        )

        def aligned() -> dict[str, list[float | None]]:
            by_name: dict[str, dict[int, Column]] = {name: {} for name in names}
            for seq, frame in data.items():
                turn, name, ref = written[seq]
                by_name[name][turn] = unpack(frame, ref)
            return {
                name: _numbers(row.values[start : start + limit], row.mask[start : start + limit])
                for name, columns in by_name.items()
                if (row := align(made.turns, columns)) is not None
            }

        return await asyncio.to_thread(aligned)

    async def _texts(
        self, session_id: str, made: Sample, counts: Mapping[int, int], start: int, limit: int
    ) -> list[str | None] | None:
        """One text per token of the page; None if all are unknown. `counts`: output tokens by turn."""
        ids: list[int] = made.tokens[start : start + limit].tolist()
        prompts = self._prompts
        if prompts is not None:
            known = await asyncio.to_thread(lambda: {one: prompts.decode([one]) for one in set(ids)})
            return [known[one] for one in ids]
        end = start + len(ids)
        spans = [span for span in made.turns if span.output_start < end and span.end > start][:TEXT_TURNS]
        frames = await self._frames(session_id, [span.turn for span in spans], exchange=True)
        return await asyncio.to_thread(_texts_of_spans, spans, counts, frames, start, end)


def _row_and_branches(session: Session, branch: int) -> tuple[BranchRow, list[BranchTokens]]:
    """The row of a branch, and the branches to choose from. Raises KeyError."""
    rows = {row.leaf.branch: row for row in branch_rows(session)}
    exported = set(rows)
    if branch not in rows:
        rows[branch] = row_of(session, branch)
    for other in range(session.branches):
        if len(rows) >= MAX_BRANCHES:
            break
        if other not in rows:
            rows[other] = row_of(session, other)
    return rows[branch], [_branch(session, row, one in exported) for one, row in sorted(rows.items())]


def _branch(session: Session, row: BranchRow, exported: bool) -> BranchTokens:
    first, leaf = session.turn(row.turns[0]), row.leaf
    prompt_tokens = first.token_count - first.output_tokens
    return BranchTokens(leaf.branch, place_of(session, leaf).cause, leaf.token_count, prompt_tokens, exported)


def _sample(session: Session, row: BranchRow, turns: Sequence[TurnCommitted], frames: Frames) -> Sample:
    """The same sample that an export makes. Raises CorruptContent, Inconsistent."""
    tokens = reads.unpack_tokens(frames, row.turns)
    content = [
        TurnTokens(turn, tokens[turn.turn].suffix_ids, tokens[turn.turn].output_ids, tokens[turn.turn].logprobs)
        for turn in turns
    ]
    return sample(Segment(row, place_of(session, row.leaf), content, cut=False))


def _view(
    made: Sample,
    branch: int,
    branches: Sequence[BranchTokens],
    start: int,
    limit: int,
    texts: list[str | None] | None,
    columns: Mapping[str, Sequence[float | None]],
) -> TokenView:
    part = slice(start, start + limit)
    versions = list(dict.fromkeys(span.version for span in made.version_spans))
    by_token = np.full(len(made.tokens), -1, np.int32)
    turns = np.zeros(len(made.tokens), np.int32)
    for span in made.version_spans:
        by_token[span.start : span.end] = versions.index(span.version)
    for turn in made.turns:
        turns[turn.start : turn.end] = turn.turn
    tokens = (made.tokens, made.sampled_mask, made.loss_mask, made.logprobs, by_token, turns)
    rows = zip(*(fact[part].tolist() for fact in tokens), strict=True)
    return TokenView(
        branch=branch,
        branches=branches,
        total=len(made.tokens),
        start=start,
        tokens=[
            TokenRow(token, sampled, masked, logprob if sampled else None, version, turn)
            for token, sampled, masked, logprob, version, turn in rows
        ],
        texts=texts,
        versions=versions,
        turns=[TurnRange(span.turn, span.start, span.output_start, span.end) for span in made.turns],
        boundaries=_boundaries(made),
        columns=columns,
    )


def _load_columns(connection: Connection, session_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
    """The frames that these events wrote, without those that were replaced since."""
    query = select(annotation_columns.c.seq, annotation_columns.c.data).where(
        annotation_columns.c.session_id == session_id
    )
    parts = (seqs[at : at + reads.SPAN] for at in range(0, len(seqs), reads.SPAN))
    return {
        seq: data for part in parts for seq, data in connection.execute(query.where(annotation_columns.c.seq.in_(part)))
    }


def _numbers(values: Array, mask: Array) -> list[float | None]:
    return [value if there else None for value, there in zip(values.tolist(), mask, strict=True)]


def _boundaries(made: Sample) -> list[Boundary]:
    found: list[Boundary] = []
    for span in made.version_spans:
        if span.end > span.start and (not found or found[-1].version != span.version):
            found.append(Boundary(span.start, span.version))
    return found


def _texts_of_spans(
    spans: Sequence[TurnSpan], counts: Mapping[int, int], frames: Frames, start: int, end: int
) -> list[str | None] | None:
    """Texts of the tokens [start, end) from the engine's stored replies; None if there are none."""
    texts: list[str | None] = [None] * (end - start)
    for span in spans:
        parts = _texts_of(frames.get(span.turn, (None, None))[1], counts[span.turn])
        for index, text in enumerate(parts, span.output_start):
            if start <= index < min(end, span.end):
                texts[index - start] = text.decode(errors="replace")
    return texts if any(text is not None for text in texts) else None


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
