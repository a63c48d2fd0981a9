"""The comparator for `metadata.tito_session_mismatch`: stored ids against a full rendering of the same messages.

The kinds and the fields `type`, `segment_index`, `expected_text`, `actual_text`, `detail` are those of miles'
`TokenSeqComparator`; the positions of a difference (`expected_start`, `actual_start` and lengths, in tokens) are added.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_SHOWN = 8
"""How many segments the description of a structural difference shows, from the first difference on."""


class ComparedSegment(msgspec.Struct, frozen=True):
    """Ids `[start, end)` of a sequence: one special token, or everything between two."""

    start: int
    end: int
    special: bool


class Comparator:
    """Compares sequences of one tokenizer. Another BPE encoding of the same text is no difference."""

    def __init__(
        self, opening: array[int], stops: frozenset[int], special: frozenset[int], decode: Callable[[array[int]], str]
    ) -> None:
        """`opening`: the ids that an assistant's message begins with. `stops`: ids that end a generation."""
        self._opening = opening
        self._stops = stops
        self._special = special
        self._decode = decode
        role = itertools.takewhile(lambda token: token not in special, opening[1:])
        self._role = decode(array("i", role))

    def differences(self, expected: array[int], actual: array[int]) -> list[dict[str, Any]]:
        """Differences between `actual`, which ends with a reply, and `expected`, rendered without a generation prompt.

        Only differences in text count. `special_token_count`: the segments differ, so nothing more can be compared.
        `special_token_type`, `non_assistant_text`: the prompt differs. `assistant_text`: the template renders the reply
        differently from what the policy wrote, for example without reasoning.
        """
        expected, actual = self._without_end(expected), self._without_end(actual)
        segments, actual_segments = self._segments(expected), self._segments(actual)
        if [segment.special for segment in segments] != [segment.special for segment in actual_segments]:
            return [self._structure(expected, segments, actual, actual_segments)]
        mismatches = []
        in_assistant = self._in_assistant(expected, segments)
        for index, (ours, theirs, assistant) in enumerate(zip(segments, actual_segments, in_assistant, strict=True)):
            one, other = expected[ours.start : ours.end], actual[theirs.start : theirs.end]
            if one == other:
                continue
            texts = self._decode(one), self._decode(other)
            if ours.special:
                mismatches.append(_mismatch("special_token_type", index, texts, (ours, theirs)))
            elif texts[0] != texts[1]:
                kind = "assistant_text" if assistant else "non_assistant_text"
                mismatches.append(_mismatch(kind, index, texts, (ours, theirs)))
        return mismatches

    def _without_end(self, ids: array[int]) -> array[int]:
        """Without the end of the last message, which a generation may have in another way, or not at all."""
        last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in self._special), None)
        return ids if last is None or ids[last] not in self._stops else ids[:last]

    def _segments(self, ids: array[int]) -> list[ComparedSegment]:
        segments: list[ComparedSegment] = []
        start = 0
        for index, token in enumerate(ids):
            if token in self._special:
                if index > start:
                    segments.append(ComparedSegment(start, index, False))
                segments.append(ComparedSegment(index, index + 1, True))
                start = index + 1
        if start < len(ids):
            segments.append(ComparedSegment(start, len(ids), False))
        return segments

    def _in_assistant(self, ids: array[int], segments: list[ComparedSegment]) -> Iterator[bool]:
        """For each segment: is it inside an assistant's message?"""
        opening = self._opening
        inside = opened = False
        for segment in segments:
            if segment.special:
                token = ids[segment.start]
                opened = bool(opening) and token == opening[0]
                inside = (opened and not self._role) or (inside and token not in self._stops)
            elif opened and self._role:
                head = ids[segment.start : segment.start + 2 * len(opening)]
                inside, opened = self._decode(head).startswith(self._role), False
            yield inside

    def _structure(
        self, expected: array[int], ours: list[ComparedSegment], actual: array[int], theirs: list[ComparedSegment]
    ) -> dict[str, Any]:
        """The structural difference, from the first segment with another special token, or with none."""
        pairs = enumerate(zip(ours, theirs, strict=False))
        unlike = (
            index
            for index, (one, other) in pairs
            if one.special != other.special or (one.special and expected[one.start] != actual[other.start])
        )
        index = next(unlike, min(len(ours), len(theirs)))
        here = ComparedSegment(_start(ours, index, expected), len(expected), True)
        there = ComparedSegment(_start(theirs, index, actual), len(actual), True)
        texts = self._outline(expected, ours[index:]), self._outline(actual, theirs[index:])
        detail = f"{len(ours)} segments expected, {len(theirs)} found, the first difference at segment {index}"
        return {**_mismatch("special_token_count", -1, texts, (here, there)), "detail": detail}

    def _outline(self, ids: array[int], segments: list[ComparedSegment]) -> str:
        return " ".join(
            f"[{self._decode(ids[segment.start : segment.end])}]"
            if segment.special
            else f"({segment.end - segment.start} tokens)"
            for segment in segments[:_SHOWN]
        )


def _start(segments: list[ComparedSegment], index: int, ids: array[int]) -> int:
    return segments[index].start if index < len(segments) else len(ids)


def _mismatch(
    kind: str, index: int, texts: tuple[str, str], places: tuple[ComparedSegment, ComparedSegment]
) -> dict[str, Any]:
    expected, actual = places
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": texts[0],
        "actual_text": texts[1],
        "detail": "",
        "expected_start": expected.start,
        "expected_length": expected.end - expected.start,
        "actual_start": actual.start,
        "actual_length": actual.end - actual.start,
    }
