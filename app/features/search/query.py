"""What a client searches for: words, phrases, alternatives and exclusions; and where they are in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from app.errors import InvalidRequest
from app.features.search.text import words_of

MAX_TERMS = 32

_TERM = re.compile(r'(-?)"([^"]*)"?|(\S+)')

SNIPPET = 160
"""Characters of a snippet, about; a third of them stand before the first match."""

MAX_MARKS = 20


class Query(msgspec.Struct, frozen=True):
    """Every one of `needed` must match, each a list of alternatives; none of `excluded` may. A term is one or several
    words, one behind the other, with a space between them."""

    needed: tuple[tuple[str, ...], ...]
    excluded: tuple[str, ...] = ()


def parse(text: str) -> Query:
    """Raises InvalidRequest: no word, only exclusions, or too many terms."""
    needed: list[tuple[str, ...]] = []
    excluded: list[str] = []
    alternative = False
    for match in _TERM.finditer(text):
        minus, phrase, plain = match[1], match[2], match[3]
        if plain == "OR":
            alternative = bool(needed)
            continue
        if plain is not None and plain.startswith("-") and len(plain) > 1:
            minus, plain = "-", plain[1:]
        term = words_of(phrase if plain is None else plain)
        if not term:
            continue
        if minus:
            excluded.append(term)
        elif alternative:
            needed[-1] = (*needed[-1], term)
        else:
            needed.append((term,))
        alternative = False
    if not needed:
        raise InvalidRequest("q needs a word to search for: letters or digits, not only excluded ones")
    if sum(map(len, needed)) + len(excluded) > MAX_TERMS:
        raise InvalidRequest(f"q has more than {MAX_TERMS} words and phrases")
    return Query(tuple(needed), tuple(excluded))


class Snippet(msgspec.Struct, frozen=True):
    """A part of a text. `marks` are [start, end) of what matches in it, in characters."""

    text: str
    marks: Sequence[tuple[int, int]]


def snippet(text: str, query: Query | None) -> Snippet:
    """The surroundings of the first match; without a query the beginning."""
    ranges = [] if query is None else _found(text, query)
    start = max(0, ranges[0][0] - SNIPPET // 3) if ranges else 0
    end = min(len(text), start + SNIPPET)
    before, behind = "… " if start else "", " …" if end < len(text) else ""
    shift = len(before) - start
    marks = [(a + shift, min(b, end) + shift) for a, b in ranges if start <= a < end][:MAX_MARKS]
    return Snippet(before + text[start:end] + behind, marks)


def _found(text: str, query: Query) -> list[tuple[int, int]]:
    terms = [term for alternatives in query.needed for term in alternatives]
    words = (r"[\W_]+".join(map(re.escape, term.split())) for term in sorted(terms, key=len, reverse=True))
    pattern = rf"(?<![^\W_])(?:{'|'.join(words)})(?![^\W_])"
    return [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]
