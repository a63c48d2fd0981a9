"""A row's most likely tokens and the logprobs of its prompts, from what its turns have stored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from app.domain.samples import Inconsistent, Sample, TurnSpan
from app.export.row import Top
from workers.codec import TopLogprobs
from workers.top_logprobs import NO_ID, NO_LOGPROB, unpacked


def top_of(sample: Sample, turns: Mapping[int, TopLogprobs | None], k: int) -> Top:
    """`turns` are those of the sample that have any. Raises CorruptContent, Inconsistent."""
    count = len(sample.tokens)
    top = Top(
        np.full((count, k), NO_ID, np.int32),
        np.full((count, k), NO_LOGPROB, np.float32),
        np.zeros(count, np.float32),
        np.zeros(count, np.uint8),
    )
    for span in sample.turns:
        if (stored := turns.get(span.turn)) is not None:
            _add(top, span, stored, k)
    return top


def _add(top: Top, span: TurnSpan, stored: TopLogprobs, k: int) -> None:
    if stored.output is not None:
        ids, logprobs = unpacked(stored.output)
        # A turn may be cut, and its last token trimmed by the next one.
        kept = span.end - span.output_start
        _require(len(ids) >= kept, span)
        width = min(k, ids.shape[1])
        top.top_ids[span.output_start : span.end, :width] = ids[:kept, :width]
        top.top_logprobs[span.output_start : span.end, :width] = logprobs[:kept, :width]
    given = np.frombuffer(stored.prompt_logprobs, "<f4")
    _require(len(given) <= span.output_start - span.start, span)
    place = slice(span.output_start - len(given), span.output_start)
    top.prompt_logprobs[place], top.prompt_logprobs_mask[place] = given, 1
    if stored.prompt is not None:
        ids, logprobs = unpacked(stored.prompt)
        _require(len(ids) == len(given), span)
        width = min(k, ids.shape[1])
        top.top_ids[place, :width] = ids[:, :width]
        top.top_logprobs[place, :width] = logprobs[:, :width]


def _require(holds: bool, span: TurnSpan) -> None:
    if not holds:
        raise Inconsistent(f"turn {span.turn}: the most likely tokens are not as many as its tokens")
