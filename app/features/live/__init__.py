"""Live streams: a turn's deltas go to its client before the commit, where the engine can stream with ids.

    a turn     about to be sent to its engine, is asked for as a stream   (`TurnPoints.streaming`)

The client's side of it, which also writes streams of committed turns, is the kernel's (`turn.live`,
`api.client_stream`). Without this feature every stream is made of the committed turn.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.domain.request import ChatRequest
from app.upstream.dialects import asked_for, asks_for_prompt
from app.upstream.streams import IDS_STREAM, STREAM

if TYPE_CHECKING:
    from app.services import Services
    from app.turn.in_flight import Claimed, EngineCall


def add_to(services: Services) -> None:
    services.points.streaming.append(partial(_go_live, services))


def _go_live(services: Services, turn: Claimed, call: EngineCall) -> None:
    """Have the engine stream, as the turn's first request is about to be sent. Not if the engines may not stream with
    ids, if something is needed that their stream does not have, or if the generation may be continued by another."""
    live, request, session = turn.flight.waiter.live, turn.request, turn.session
    if live is None or not isinstance(request, ChatRequest):
        return
    if (request.stream_mode or session.config.stream_mode) == "whole" or live.mode is not None:
        return
    settings, dialect = services.settings, services.engines.dialect
    payloads = asked_for(request.params).union(settings.replay)
    if dialect == "vllm":
        if payloads or asks_for_prompt(call.wish):
            return
    elif dialect != "sglang" or not payloads <= {"routed_experts"} or call.wish is not None or call.wants_native:
        return
    if (session.config.on_abort or settings.abort_policy) == "continue":
        return
    live.go_live(turn.opened.turn, request.echo, call.left_out)
    call.push, call.stream = live.push, STREAM if dialect == "vllm" else IDS_STREAM
