"""The fixed data of a turn: its parsed request and its claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.domain.completion import IncomingPrompt
from app.domain.events import History, TurnOpened
from app.domain.history import Incoming
from app.domain.request import ChatRequest, CompletionRequest
from app.domain.rules import Plan
from app.domain.session import Session
from app.fleet.gates import GatePass
from app.sessions.cache import CacheEntry
from app.turn.in_flight import Identity, InFlightTurn, Waiter
from app.turn.stages import Stages
from app.upstream.headers import Headers

Request = ChatRequest | CompletionRequest

RequestHistory = Incoming | IncomingPrompt
"""A request's history: a chat's messages, or a completion's prompt."""


class TemplateInputs(msgspec.Struct, frozen=True):
    """What a request's chat template renders besides messages. `offered` are the tools that it shows."""

    tools: Sequence[Any] | None
    choice: Any
    offered: Sequence[Any] | None
    arguments: Mapping[str, Any]


class TurnContext(msgspec.Struct, frozen=True):
    """A parsed and admitted request for a turn.

    `template` is None unless the prompt is rendered here. `adapter` is the turn's LoRA adapter. `client` are the
    client's headers. `history_if_new` becomes the session's where its first turn decides that. `large` is the body's
    size in bytes if it must not be processed on the event loop, else 0.
    """

    session_id: str
    request: Request
    history: RequestHistory
    template: TemplateInputs | None
    adapter: str | None
    client: Headers
    identity: Identity
    history_if_new: History
    waiter: Waiter
    stages: Stages
    flight: InFlightTurn
    gate: GatePass
    large: int = 0


class ClaimedTurn(msgspec.Struct, frozen=True):
    """A session's claim. `session` is its state at the claim; its turns cannot change while the claim stands.

    `rid` is the generation's id at the engine. `idle_since` is the time of the session's last event before the claim.
    `opened_at` is when the claim was taken.
    """

    entry: CacheEntry
    session: Session
    plan: Plan
    opened: TurnOpened
    fence: int
    rid: str
    idle_since: float
    opened_at: float
