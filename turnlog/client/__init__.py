"""The client for rollout code and trainers, synchronous and asynchronous, over httpx and numpy."""

from turnlog.client._async.client import AsyncEvents, AsyncExport, AsyncTurnlog
from turnlog.client._async.session import AsyncSession
from turnlog.client._sync.client import Events, Export, Turnlog
from turnlog.client._sync.session import Session
from turnlog.client.replay_urls import fetch_payload
from turnlog.client.samples import Sample, Samples
from turnlog.errors import (
    Conflict,
    EnginesFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotTurnlog,
    PositionGone,
    Restored,
    SessionClosed,
    TurnlogError,
    Unauthorized,
    Unavailable,
    Unreachable,
)

__all__ = [
    "AsyncEvents",
    "AsyncExport",
    "AsyncSession",
    "AsyncTurnlog",
    "Conflict",
    "EnginesFailed",
    "Events",
    "Export",
    "Forbidden",
    "InvalidRequest",
    "NotFound",
    "NotTurnlog",
    "PositionGone",
    "Restored",
    "Sample",
    "Samples",
    "Session",
    "SessionClosed",
    "Turnlog",
    "TurnlogError",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
    "fetch_payload",
]
