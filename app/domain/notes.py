"""A session's tags, or the names of its annotations, as one text, in which a database finds a single one: a line feed
before, between and behind them.

None has a line feed itself (`app.domain.patterns`).
"""

from __future__ import annotations

from collections.abc import Sequence

_MARK = "\n"


def joined(tags: Sequence[str]) -> str | None:
    """None for no tags."""
    return marked(_MARK.join(tags)) if tags else None


def marked(tag: str) -> str:
    """What the text of a session's tags contains if, and only if, the session has this tag."""
    return f"{_MARK}{tag}{_MARK}"


def parted(text: str | None) -> list[str]:
    """The tags of a text from `joined`."""
    return text.strip(_MARK).split(_MARK) if text else []
