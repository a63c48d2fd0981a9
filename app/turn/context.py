"""What is fixed for a whole turn: its request as it was read, and its claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.domain.completion import IncomingPrompt
from app.domain.events import TurnOpened
from app.domain.history import Incoming, Plan
from app.domain.request import ChatRequest, CompletionRequest
from app.domain.session import Session
from app.fleet.gates import GatePass
from app.sessions.cache import CacheEntry
from app.turn.in_flight import InFlightTurn, RetryMark, Waiter
from app.turn.stages import Stages
from app.upstream.headers import Headers

Request = ChatRequest | CompletionRequest

RequestHistory = Incoming | IncomingPrompt
"""A request's history: a chat's messages, or a completion's prompt."""


class Template(msgspec.Struct, frozen=True):
    """What a request has its chat template render beside messages: `offered` are those of its `tools` that it shows."""

    tools: Sequence[Any] | None
    choice: Any
    offered: Sequence[Any] | None
    arguments: Mapping[str, Any]


class TurnContext(msgspec.Struct, frozen=True):
    """A request for a turn that has been let in.

    `template` is there where the prompt is rendered here. `adapter` is the turn's, `client` are the client's headers.
    `large` is the size in bytes of a request that is not put together on the event loop, else 0.
    """

    session_id: str
    request: Request
    history: RequestHistory
    template: Template | None
    adapter: str | None
    client: Headers
    mark: RetryMark
    waiter: Waiter
    stages: Stages
    flight: InFlightTurn
    gate: GatePass
    large: int = 0


class ClaimedTurn(msgspec.Struct, frozen=True):
    """A claim that was taken. `session` is the state at the claim; while it stands, its turns cannot change.

    `rid` is the generation's id at the engine, `idle_since` when the session's event before the claim was written.
    """

    entry: CacheEntry
    session: Session
    plan: Plan
    opened: TurnOpened
    fence: int
    rid: str
    idle_since: float
