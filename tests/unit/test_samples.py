"""`samples` against a naive reading: whole prompts as lists, a segment where one does not begin with what was."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from helpers.amounts import cases
from helpers.log import float64, int32
from hypothesis import given, settings
from hypothesis import strategies as st
from making import SESSION, Book, Made, assistant, samples, user

from app.domain.branches import turns_left_out
from app.domain.samples import Inconsistent, Sample, Truncate, aged, is_stale, sample
from app.export.lost import Ledger
from app.export.query import ExportQuery
from app.export.rows import Known, SessionRows
from app.store.content import StoredSession


def naive(book: Book) -> list[dict[str, Any]]:
    runs: list[list[int]] = []
    for number in book.session.path:
        made = book.made[number]
        before = book.made[runs[-1][-1]] if runs else None
        known = [] if before is None else (before.prompt + before.output)
        known = known[: len(known) - made.trimmed]
        joins = bool(known) and made.joined and made.prompt[: len(known)] == known
        runs[-1].append(number) if joins else runs.append([number])
    return [_naive(book, index, run) for index, run in enumerate(runs)]


def _naive(book: Book, segment: int, run: list[int]) -> dict[str, Any]:
    last = book.made[run[-1]]
    tokens = last.prompt + last.output
    mask, logprobs, version = [0] * len(tokens), [0.0] * len(tokens), [""] * len(tokens)
    for made, after in zip(map(book.made.__getitem__, run), [*map(book.made.__getitem__, run[1:]), None], strict=True):
        at = len(made.prompt)
        made = without_last(made, 0 if after is None else after.trimmed)
        mask[at : at + len(made.output)] = [1] * len(made.output)
        logprobs[at : at + len(made.output)] = made.logprobs
        for name, start, end in made.spans:
            version[at + start : at + end] = [name] * (end - start)
    return {
        "segment": segment,
        "tokens": tokens,
        "loss_mask": mask,
        "sampled_mask": mask,
        "logprobs": logprobs,
        "versions": version,
        "prompt_length": mask.index(1) if 1 in mask else len(tokens),
        "status": named([book.made[number].finish_reason for number in run]),
        "last_status": named([last.finish_reason]),
        "turns": run,
    }


def named(reasons: list[str | None]) -> str:
    if "abort" in reasons:
        return "aborted"
    return "truncated" if "length" in reasons else "completed"


def without_last(made: Made, count: int) -> Made:
    """A turn less the last tokens of its output."""
    kept = len(made.output) - count
    spans = tuple((name, start, min(end, kept)) for name, start, end in made.spans if start < kept)
    return msgspec.structs.replace(made, output=made.output[:kept], logprobs=made.logprobs[:kept], spans=spans)


def plain(sample: Sample) -> dict[str, Any]:
    def name(value: int) -> str:
        if value < 0:
            return ""
        return sample.weight_version_names[value] if sample.weight_version_names else str(value)

    assert len(sample.tokens) == len(sample.logprobs) == sample.prompt_length + sample.response_length
    return {
        "segment": sample.segment,
        "tokens": list(sample.tokens),
        "loss_mask": list(sample.loss_mask),
        "sampled_mask": list(sample.sampled_mask),
        "logprobs": list(sample.logprobs),
        "versions": [name(value) for value in sample.weight_versions],
        "prompt_length": sample.prompt_length,
        "status": sample.status,
        "last_status": sample.last_status,
        "turns": [span.turn for span in sample.turns],
    }


def test_drift_begins_a_segment_with_its_cause_and_parent() -> None:
    book = Book()
    book.turn([user("a")], assistant("x"), prompt=[1], output=[2])
    book.turn([*book.made[1].history, user("b")], assistant("y"), prompt=[1, 9], output=[3])
    first, second = samples(book.session, book.content)
    assert (first.cause, second.cause, second.parent_turn, second.segment) == (None, "drift", 1, 1)


@pytest.mark.parametrize("field", ["suffix_ids", "output_ids", "logprobs"])
def test_content_that_does_not_add_up_is_refused(field: str) -> None:
    book = Book()
    book.turn([user("a")], assistant("x"), prompt=[1, 2], output=[2, 3])
    short = float64([-1.0]) if field == "logprobs" else int32([1])
    content = {1: msgspec.structs.replace(book.content[1], **{field: short})}
    with pytest.raises(Inconsistent):
        samples(book.session, content)


@settings(max_examples=cases(300), deadline=None)
@given(st.data())
def test_samples_agree_with_a_naive_reading(data: st.DataObject) -> None:
    book = Book(window=3, on_divergence="segment")
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)
    for number in range(data.draw(st.integers(0, 5))):
        live = book.session.path
        before = book.made[live[-1]] if live else None
        history = before.history if before else []
        step = data.draw(st.sampled_from(["extend", "extend", "trim", "drift", "retry", "diverge"]))
        messages = {
            "retry": [*history[:-2], user(f"r{number}")],
            "diverge": [assistant("nowhere"), user(f"d{number}")],
        }.get(step, [*history, user(f"u{number}")])
        plan = book.plan(messages)
        parent = book.made[plan.parent] if plan.parent and plan.base_messages else None
        base = parent.prompt + parent.output if parent else []
        trimmed = int(step == "trim" and before is not None and bool(before.output) and len(base) > 1)
        prompt = [*(base[:-1] if trimmed or step == "drift" else base), *data.draw(ids)]
        output = data.draw(st.just([]) | ids)
        cut = data.draw(st.integers(0, len(output)))
        name = st.sampled_from(["1", "20", "default"])
        versions = [
            span for span in [(data.draw(name), 0, cut), (data.draw(name), cut, len(output))] if span[1] < span[2]
        ]
        reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
        book.turn(
            messages,
            assistant(f"y{number}"),
            prompt=prompt,
            output=output,
            versions=versions,
            finish_reason=reason,
            trimmed=trimmed,
        )
    assert [plain(sample) for sample in samples(book.session, book.content)] == naive(book)
    limit = data.draw(st.integers(1, 24))
    assert_cut(book, limit)
    for most in (None, limit):
        assert_counted(book, most, data.draw(st.sampled_from(["turn", "token"])))


def assert_counted(book: Book, limit: int | None, truncate: Truncate) -> None:
    """What was sampled is trained or lost: rows are cut, what prompts do not have is trimmed, what is old is masked."""
    known = Known(book.session, {number: turn.event for number, turn in book.content.items()}, {})
    query = ExportQuery(max_seq_len=limit, truncate=truncate)
    rows = SessionRows(StoredSession(SESSION, "open", None), known, query, "kept", "")
    ledger = Ledger(known, rows, partial(is_stale, current=20, most=5))
    masks = [aged(sample(one, book.content), 20, 5, masks=True)[0].loss_mask for one in rows.segments]
    lost = {turn.number: ledger.sampled[turn.number] for turn, _ in turns_left_out(book.session, rows.rows, None)}
    fitting = {segment.row.leaf.number for segment in rows.segments}
    parts = [one for row in rows.rows if row.leaf.number in fitting for one in ledger.shortened(row)]
    whole = [ledger.lose(row) for row in rows.rows if row.leaf.number not in fitting]
    sampled = sum(len(made.output) for made in book.made.values())
    trained = sum(int(mask.sum()) for mask in masks)
    assert trained + sum(lost.values()) + sum(one.lost_tokens or 0 for one in parts) + sum(whole) == sampled
    assert ledger.rest() == trained + sum(lost.values()) + sum(one.lost_tokens or 0 for one in parts)
    if limit is None:
        after = [book.made[turn.number].trimmed for turn in book.session.turns if turn.number not in lost]
        told = [one.lost_tokens for one in parts if one.reason.startswith("trimmed: ")]
        assert sum(filter(None, told)) == sum(after)


def assert_cut(book: Book, limit: int) -> None:
    """A cut inside a turn gives each segment's beginning: whole turns, then what fits of the next one's output."""
    cut = {sample.segment: sample for sample in samples(book.session, book.content, limit, "token")}
    by_turn = {sample.segment: sample for sample in samples(book.session, book.content, limit)}
    for whole in samples(book.session, book.content):
        turns = [book.content[span.turn].event for span in whole.turns]
        fits = [turn for turn in turns if turn.base_tokens + turn.suffix_tokens + turn.output_tokens <= limit]
        over = turns[len(fits)] if len(fits) < len(turns) else None
        if over is None or over.base_tokens + over.suffix_tokens >= limit:
            assert (whole.segment in cut) == bool(fits)
            if fits:
                assert plain(cut[whole.segment]) == plain(by_turn[whole.segment])
            continue
        found = cut[whole.segment]
        assert len(found.tokens) == limit
        assert [span.turn for span in found.turns] == [turn.turn for turn in [*fits, over]]
        assert (found.turns[-1].end, found.turns[-1].finish_reason) == (limit, over.finish_reason)
        assert found.last_status == "truncated"
        assert found.status == ("aborted" if any(turn.finish_reason == "abort" for turn in fits) else "truncated")
        # All but the cut turn's own output stand as in the whole sample; a later turn may have trimmed its last token.
        same = min(limit, whole.turns[len(fits)].end)
        for name in ("tokens", "loss_mask", "sampled_mask", "logprobs"):
            assert list(getattr(found, name)[:same]) == list(getattr(whole, name)[:same])
        versions = [span.version for span in found.version_spans for _ in range(span.end - span.start)]
        assert (
            versions
            == [span.version for span in whole.version_spans for _ in range(span.end - span.start)][: len(versions)]
        )
        assert len(versions) == int(found.sampled_mask.sum())
