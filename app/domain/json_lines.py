"""JSON in one line, for JSONL or an event stream."""

from __future__ import annotations


def in_one_line(raw: bytes) -> bytes:
    """The same JSON without line breaks, which can only occur between tokens."""
    return raw.replace(b"\n", b" ").replace(b"\r", b" ")
