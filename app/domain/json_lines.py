"""JSON that goes into a line of its own: of JSONL, or of an event stream."""

from __future__ import annotations


def in_one_line(raw: bytes) -> bytes:
    """The same JSON without line breaks, which can only stand between its tokens."""
    return raw.replace(b"\n", b" ").replace(b"\r", b" ")
