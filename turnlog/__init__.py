"""A small client for rollout code, and the command line.

from turnlog import Turnlog, AsyncTurnlog
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnlog.client import AsyncSession, AsyncTurnlog, Session, Turnlog, TurnlogError

__all__ = ["AsyncSession", "AsyncTurnlog", "Session", "Turnlog", "TurnlogError"]


def __getattr__(name: str) -> Any:
    """The client is imported at first use: `turnlog --help` needs neither httpx nor numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnlog import client

    return getattr(client, name)
