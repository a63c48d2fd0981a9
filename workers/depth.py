"""Measures how deep JSON nests, from its text alone: without recursion, and including duplicate keys."""

from __future__ import annotations

import re

from workers import scan

MAX_DEPTH = 100
"""Templates, schemas and replies stay far below; a deeper body is rejected."""

LONG = 64 << 10
"""A regular expression holds the GIL while it runs: seconds on a longer text."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Does this JSON nest deeper than `limit`? For invalid JSON the answer may be wrong."""
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
