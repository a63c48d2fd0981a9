"""How deep JSON nests, without a recursion of our own."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_DEPTH = 100
"""Templates, schemas and replies stay far below; past it a body is refused."""


def too_deep(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Does this JSON nest deeper than `limit`? What cannot be decoded cannot be shown not to: True."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    try:
        return nests_deeper(msgspec.json.decode(text), limit)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def nests_deeper(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Does a decoded value nest deeper than `limit`?"""
    level = _containers([value])
    for _ in range(limit):
        level = [child for item in level for child in _containers(item)]
        if not level:
            return False
    return True


def _containers(item: Any) -> list[Any]:
    children = item.values() if isinstance(item, dict) else item
    return [child for child in children if isinstance(child, dict | list)]
