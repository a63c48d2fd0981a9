"""A reply's texts and logprobs as deltas that no reader of lines finds too long, cut alike on every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

PIECE = 16 << 10
"""Bytes of a delta: of its text as the event's JSON spells it, in UTF-8 with its escapes, and of its logprobs. Readers
of lines give up at 64 KiB (Go's bufio.Scanner), 128 KiB (aiohttp 3.13) or 512 KiB (aiohttp 3.14)."""

_LONGEST = 6
"""Bytes of a code point: a control character is `\\u0001`."""


class Logprobs(NamedTuple):
    """The logprobs of some tokens, in order. `spelled` are the tokens' bytes, `sizes` those of their entries as JSON,
    `of` gives the entries of the tokens [first, last) as the protocol spells them."""

    spelled: Sequence[bytes]
    sizes: Sequence[int]
    of: Callable[[int, int], Any]


class Piece(NamedTuple):
    """`name` is its text's; a piece without text has only logprobs."""

    name: str
    text: str
    logprobs: Any = None


def text_pieces(text: str) -> list[str]:
    """The text, cut between code points where it is too long for one delta."""
    if len(text) * _LONGEST <= PIECE:
        return [text]
    spelled = msgspec.json.encode(text)[1:-1]
    pieces, start = [], 0
    while start < len(spelled):
        end = len(spelled) if len(spelled) - start <= PIECE else _cut(spelled, start, start + PIECE)
        pieces.append(msgspec.json.decode(b'"%b"' % spelled[start:end], type=str))
        start = end
    return pieces


def _cut(spelled: bytes, start: int, end: int) -> int:
    """The last place up to `end` that is inside no code point and no escape. At `start` none is open."""
    while spelled[end] & 0xC0 == 0x80:
        end -= 1
    slash = spelled.rfind(b"\\", max(start, end + 1 - _LONGEST), end)
    if slash >= 0:
        slashes = slash + 1 - start - len(spelled[start : slash + 1].rstrip(b"\\"))
        length = _LONGEST if spelled[slash + 1] == ord("u") else 2
        if slashes % 2 and slash + length > end:
            return slash
    return end


def pieces_of(texts: Sequence[tuple[str, str]], logprobs: Logprobs | None, is_last: bool = True) -> Iterator[Piece]:
    """The named texts, in the order of their tokens, and all logprobs: those of a text's tokens with it where they can
    be told, the others, such as a parser's marks, without text. `is_last`: no calls come after the last text."""
    if logprobs is None:
        yield from (Piece(name, piece) for name, text in texts for piece in text_pieces(text))
        return
    places: list[tuple[int, int] | None] = []
    stop = len(logprobs.spelled)
    for number, (_, text) in enumerate(reversed(texts)):
        place = tokens_of(text, logprobs.spelled[:stop], is_only=number == 0 and not is_last)
        stop = stop if place is None else place[0]
        places.insert(0, place)
    done = 0
    for (name, text), place in zip(texts, places, strict=True):
        if place is None:
            yield from (Piece(name, piece) for piece in text_pieces(text))
            continue
        yield from _without_text(logprobs, done, place[0])
        for first, last in _runs(logprobs, *place, keeps_characters=True):
            *more, end = text_pieces(b"".join(logprobs.spelled[first:last]).decode())
            yield from (Piece(name, piece) for piece in more)
            yield Piece(name, end, logprobs.of(first, last))
        done = place[1]
    yield from _without_text(logprobs, done, len(logprobs.spelled))


def tokens_of(text: str, spelled: Sequence[bytes], is_only: bool = False) -> tuple[int, int] | None:
    """The last run of whole tokens that makes up this text; None where there is none, as where a parser has changed
    it. `is_only`: nor where the text occurs twice."""
    sought, whole, ends = text.encode(), b"".join(spelled), [0, *accumulate(map(len, spelled))]
    at = whole.rfind(sought)
    if not sought or at not in ends or at + len(sought) not in ends or (is_only and whole.find(sought) != at):
        return None
    # A token without bytes of its own belongs to what is before it.
    return len(ends) - 1 - ends[::-1].index(at), ends.index(at + len(sought))


def _without_text(logprobs: Logprobs, first: int, last: int) -> Iterator[Piece]:
    for start, end in _runs(logprobs, first, last, keeps_characters=False):
        yield Piece("", "", logprobs.of(start, end))


def _runs(logprobs: Logprobs, first: int, last: int, keeps_characters: bool) -> Iterator[tuple[int, int]]:
    """The tokens [first, last) in runs whose entries fit one delta. `keeps_characters`: a character of several tokens
    is not torn, however long their entries are."""
    start, size, begun = first, 0, first
    for place in range(first, last):
        token = logprobs.spelled[place]
        if not keeps_characters or (token and token[0] & 0xC0 != 0x80):
            begun = place
        size += logprobs.sizes[place]
        if size > PIECE and begun > start:
            yield start, begun
            start, size = begun, sum(logprobs.sizes[begun : place + 1])
    if first < last:
        yield start, last
