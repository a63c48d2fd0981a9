"""What is noted of a turn at its end, on the event loop: a few numbers and names, and content only if it is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from app.errors import AppError
from app.features.otel.sending import SpanSender
from app.features.otel.spans import Attributes, NotedSpan
from app.turn.in_flight import Claimed, TurnStage

if TYPE_CHECKING:
    from app.services import Services
    from app.store.log import VoidedClaim

REQUEST_PARAMETERS = {
    "model": "gen_ai.request.model",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Fields of a request and the attributes that hold them: numbers, and the model's name. Stop sequences are content."""


class TracedTurns:
    """Notes turns and closed sessions for `sender`. A retry that is given a stored reply is no turn."""

    def __init__(self, services: Services, sender: SpanSender, *, with_content: bool) -> None:
        self._services = services
        self._sender = sender
        self._with_content = with_content
        self._closing: set[asyncio.Task[None]] = set()

    def ended(self, turn: Claimed) -> None:
        """Note a turn that had its claim; what is kept of it holds nothing of its body or its reply but content."""
        self._sender.put(self._noted(turn))

    def session_closed(self, session_id: str, ended: Sequence[VoidedClaim]) -> None:
        """Note a session, which has to be read for that."""
        task = asyncio.create_task(self._note_session(session_id), name="turnlog-otel-session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing)
        await self._sender.stop()

    def _noted(self, turn: Claimed) -> NotedSpan:
        opened, session, flight, marks = turn.opened, turn.session, turn.flight, turn.flight.stages.marks
        now, elapsed = self._services.clock(), flight.stages.clock()
        times = [(stage, now - (elapsed - at)) for stage, at in marks]
        ended = now
        if times[-1][0] is TurnStage.REPLY:  # it is on disk since then
            ended = times.pop()[1]
        failure = _failure(turn, times)
        parent = (flight.session_id, opened.parent) if opened.parent else None
        fork = session.fork
        if fork is not None and 0 < opened.parent <= fork.turns:  # a copy, which has no span
            parent = (fork.session, fork.turn) if opened.parent == fork.turns else None
        content = None
        if self._with_content:
            message = None if turn.generated is None or failure else turn.generated.reply.message
            content = [bytes(raw) for raw in ([] if turn.call is None else turn.call.stored)], message
        return NotedSpan(
            session_id=flight.session_id,
            turn=opened.turn,
            began=times[0][1],
            ended=ended,
            attributes=self._attributes(turn),
            parent=parent,
            traceparent=next((value for name, value in flight.headers if name == "traceparent"), None),
            stages=[(stage.name.lower(), at) for stage, at in times],
            content=content,
            **failure,
        )

    def _attributes(self, turn: Claimed) -> Attributes:
        opened, request = turn.opened, turn.request
        reply = None if turn.generated is None else turn.generated.reply
        engine, dialect = "", str(self._services.engines.dialect)
        of_reply: dict[str, Any] = {}
        if reply is not None:
            engine, dialect = reply.engine, reply.dialect
            versions = tuple(dict.fromkeys(span.version for span in reply.weight_versions))
            of_reply = {
                "gen_ai.usage.input_tokens": reply.base + reply.suffix_tokens,
                "gen_ai.usage.output_tokens": reply.output_tokens,
                "turnlog.new_prompt_tokens": reply.suffix_tokens,
                "gen_ai.usage.cache_read.input_tokens": reply.cached_tokens,
                "gen_ai.response.finish_reasons": None if reply.finish_reason is None else (reply.finish_reason,),
                "turnlog.weight_versions": versions or None,
            }
        elif turn.answer is not None:
            engine = turn.answer.engine
        address = urlsplit(engine)
        port = (address.port or (443 if address.scheme == "https" else 80)) if address.hostname else None
        return _given(
            {
                "gen_ai.operation.name": "chat" if request.shape == "chat" else "text_completion",
                "turnlog.turn": opened.turn,
                "turnlog.protocol": opened.protocol,
                "turnlog.parent_turn": opened.parent or None,
                "gen_ai.agent.id": opened.agent_id,
                "turnlog.adapter": opened.adapter,
                **_parameters(request.params),
                "gen_ai.request.stream": request.stream or None,
                **of_reply,
                "gen_ai.provider.name": dialect if dialect != "auto" else "_OTHER",
                "server.address": address.hostname or None,
                "server.port": port,
                "turnlog.upstream": engine if engine and not address.hostname else None,
                "turnlog.group_id": turn.session.config.group_id,
                "turnlog.attempt": turn.session.config.attempt,
            }
        )

    async def _note_session(self, session_id: str) -> None:
        try:
            entry = await self._services.cache.get(session_id)
        except AppError:
            return  # What cannot be read has no span either.
        if entry is None or entry.session.closed_at is None:
            return
        session = entry.session
        config = session.config
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "turnlog.turns": session.turns.count,
            "turnlog.reward": None if session.reward is None else session.reward.reward,
            "turnlog.group_id": config.group_id,
            "turnlog.attempt": config.attempt,
        }
        self._sender.put(
            NotedSpan(
                session_id,
                0,
                session.created_at,
                session.closed_at or session.created_at,
                _given(attributes),
                None if config.parent is None else (config.parent, 0),
            )
        )


def _failure(turn: Claimed, stages: Sequence[tuple[TurnStage, float]]) -> dict[str, Any]:
    """What ended the turn without a commit: `error`, `reason` and `failed` of `NotedSpan`; empty if it committed."""
    last = len(stages) - 1
    if turn.flight.stages.marks[-1][0] is TurnStage.REPLY:
        return {}
    if turn.failure is not None:
        error, reason = turn.failure
        return {"error": error, "reason": reason, "failed": last}
    if turn.generated is None and turn.answer is not None:  # an engine's own error, which is passed on
        asked = [place for place, (stage, _) in enumerate(stages) if stage is TurnStage.ENGINE]
        status = turn.answer.status
        return {"error": str(status), "reason": f"the engine answered {status}", "failed": asked[-1]}
    return {"error": "_OTHER", "failed": last}


def _given(attributes: Mapping[str, Any]) -> Attributes:
    """Those that there are."""
    return {name: value for name, value in attributes.items() if value is not None}


def _parameters(params: Mapping[str, Any]) -> Attributes:
    """The request's parameters that are of the kind that their attribute has."""
    attributes: Attributes = {}
    for name, attribute in REQUEST_PARAMETERS.items():
        if (raw := params.get(name)) is None:
            continue
        value = msgspec.json.decode(raw)
        wanted = str if name == "model" else (int, float)
        if isinstance(value, wanted) and not isinstance(value, bool):
            attributes[attribute] = value
    return attributes
