"""The client for rollout code and trainers, synchronous and asynchronous, over httpx and numpy.

A name is imported when it is asked for: the command line takes only the parts that a command needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnlog.client.names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("turnlog.client.names"), name)
