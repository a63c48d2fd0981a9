"""How deep JSON nests, from its text alone: no recursion, and nothing that a decoder drops is missed."""

from __future__ import annotations

import re

from workers import scan

MAX_DEPTH = 100
"""Templates, schemas and replies stay far below; past it a body is refused."""

LONG = 64 << 10
"""A regular expression holds the interpreter for as long as it takes: on a longer text that may be seconds."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Does this JSON nest deeper than `limit`? What is not JSON may be said to."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    if len(text) > LONG:
        return scan.extent(text, len(text)).depth > limit
    brackets = _STRING.sub(b"", text).translate(_AS_ONE_KIND, _NOT_BRACKETS)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level, everywhere
    return bool(brackets)
