"""Sends a turn's requests to engines, through the gates, and reads the replies that they stream."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from app import crash_points
from app.domain.events import GivenIds, OnAbort
from app.domain.reply import ValidatedReply
from app.domain.request import ChatRequest, value_of
from app.errors import ClaimLost
from app.fleet.engines import Answer, OpenStream
from app.sessions.cache import require_open
from app.turn.context import ClaimedTurn, TurnContext
from app.turn.engine_body import EngineBody, IdsOrigin
from app.turn.engine_request import EngineRequest, EngineRequestOptions, PromptIds, options_for
from app.turn.live import LiveStream
from app.turn.placement import EngineChoice
from app.turn.stages import TurnStage
from app.turn.staging import StagedTurn
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import Withheld
from app.upstream.headers import Headers
from app.upstream.streams import STREAM, Push, ReplyStream

if TYPE_CHECKING:
    from app.services import Services


class PreparedTurn(msgspec.Struct, frozen=True):
    """What is sent for a turn: `messages` are all of them, as engines take them. `new` are those that are not stored
    yet, `stored` these as the store keeps them: with references to their images. `odd_arguments`: one of these has a
    call whose arguments are no JSON object. `left_out`: what of the request is not sent (`app.domain.left_out`)."""

    request: EngineRequest
    messages: Sequence[bytes | memoryview]
    new: Sequence[bytes]
    stored: Sequence[bytes]
    prompt: PromptIds | None
    left_out: tuple[str, ...]
    odd_arguments: bool = False


class GeneratedTurn(msgspec.Struct, frozen=True):
    """A validated reply with its body and headers, and what was sent for it: `new`, `stored`, `odd_arguments` and
    `left_out` as in `PreparedTurn`, `given_ids` as in `TurnCommitted`."""

    reply: ValidatedReply
    body: Body
    headers: Headers
    request: EngineRequest
    new: Sequence[bytes]
    stored: Sequence[bytes]
    prompt: PromptIds | None
    options: EngineRequestOptions
    choice: EngineChoice
    left_out: tuple[str, ...]
    odd_arguments: bool = False
    given_ids: GivenIds | None = None


class EngineRefusal(msgspec.Struct, frozen=True):
    """An engine's own error, which is passed to the client."""

    status: int
    headers: Headers
    body: Body


class Dispatch:
    """The requests of one turn. `staged` keeps its tokens, if any are kept; `live` is the client's stream, if it gets
    them as they come, and is told `left_out`."""

    def __init__(self, services: Services, context: TurnContext, claimed: ClaimedTurn) -> None:
        self.staged: StagedTurn | None = None
        self.live: LiveStream | None = None
        self.left_out: tuple[str, ...] = ()
        self._push: Push | None = None
        self._services = services
        self._context = context
        self._claimed = claimed

    @property
    def on_abort(self) -> OnAbort:
        return self._claimed.session.config.on_abort or self._services.settings.abort_policy

    def body(self, turn: PreparedTurn) -> EngineBody:
        """The turn's first request."""
        context = self._context
        options = options_for(self._claimed, context.request, turn.prompt, self._services.settings)
        origin: IdsOrigin = "built" if context.request.ids is None else "client"
        if self.staged is not None:
            options = msgspec.structs.replace(options, own=STREAM)
        native = self.staged is not None and self.staged.is_native
        return EngineBody(
            self._services, context, turn.request, options, turn.messages, turn.prompt, origin, wants_native=native
        )

    async def ask(self, choice: EngineChoice, body: EngineBody) -> Answer:
        """Send the turn's first request; returns the engine's answer. Raises as `Engines.generate`.

        A client's stream gets what comes of this one only: the rest of a reply that is continued is not sent live.
        """
        self.live = self._live(body.options)
        if self.live is not None:
            self._push = self.live.push
            body.change(msgspec.structs.replace(body.options, own=STREAM))
        try:
            answer = await self.send(choice, body)
        finally:
            self._push = None
        if self.staged is not None and self.staged.is_native and not body.is_native:
            self.staged.counters.turns["not_staged"] += 1
            self.staged = None
        if answer.reply.status == 400 and body.options.own not in (b"", STREAM):
            # If the prompt drifted, it may be shorter than the row asked for; engines refuse that.
            body.change(msgspec.structs.replace(body.options, own=b"", first_row=0))
            answer = await self.send(choice, body)
        return answer

    def _live(self, options: EngineRequestOptions) -> LiveStream | None:
        """The client's stream if it is sent while the engine generates. Not if the engines may not stream with ids, if
        a replay payload is needed, which no stream has, or if the generation may be continued by another."""
        context, claimed, settings = self._context, self._claimed, self._services.settings
        live, request = context.waiter.live, context.request
        if live is None or not isinstance(request, ChatRequest):
            return None
        if (request.stream_mode or claimed.session.config.stream_mode) == "whole" or live.mode is not None:
            return None
        dialect = self._services.engines.dialect
        if dialect != "vllm" or settings.replay or options.clients or self.on_abort == "continue":
            return None
        live.go_live(claimed.opened.turn, request.echo, self.left_out)
        return live

    def _open_stream(self, body: EngineBody) -> OpenStream | None:
        """What reads the reply, if it is a stream."""
        if body.options.own != STREAM:
            return None
        staged, push = self.staged, self._push
        if staged is None:
            return lambda engine, version, logprobs_of: ReplyStream(push)
        return lambda engine, version, logprobs_of: staged.stream(push, engine, version, logprobs_of)

    async def send(self, choice: EngineChoice, body: EngineBody) -> Answer:
        """Send one request while the gates are open; returns the engine's answer. Raises as `Engines.generate`."""
        context, services = self._context, self._services
        parent = self._claimed.session.config.parent
        headers = http_headers.to_engine(context.client, context.session_id, services.settings.upstream_api_key, parent)

        async def body_for(engine: str) -> Sequence[bytes | memoryview]:
            if choice.control is not None:
                await choice.control.prepare(engine)
            return await body(engine)

        if crash_points.ARMED:
            crash_points.reach("before_engine")
        while True:
            await self.pass_gate()
            context.stages.marks.append((TurnStage.ENGINE, context.stages.clock()))
            try:
                answer = await services.engines.generate(
                    choice.order,
                    context.request.shape,
                    body_for,
                    headers,
                    context.waiter.grow,
                    rid=self._claimed.rid,
                    version=context.gate.version,
                    may_send=self._may_send,
                    open_stream=self._open_stream(body),
                    path=lambda: body.path,
                )
            except Withheld:
                continue
            context.stages.marks.append((TurnStage.VALIDATE, context.stages.clock()))
            if crash_points.ARMED:
                crash_points.reach("after_engine")
            return msgspec.structs.replace(answer, is_native=body.is_native and answer.reply.status == 200)

    @property
    def has_ended(self) -> bool:
        """Has the engine ended what it streams itself, so that it is the whole reply?"""
        return self.staged is not None and self.staged.has_ended

    async def as_chat(self, answer: Answer, request: EngineRequest, prompt: PromptIds | None) -> Answer:
        """The answer as a chat's, if it is not one. Raises as `NativeRoutes.chat`."""
        if not answer.is_native or prompt is None:
            return answer
        params = self._context.request.params
        offers = value_of(params.get("tool_choice"), "tool_choice") != "none"
        session_id, tools = self._context.session_id, request.tools if offers else None
        return await self._services.native.chat(answer, session_id, params, tools, prompt.text)

    def _may_send(self) -> bool:
        """Check the gates at the last moment, when a connection is ready."""
        if not self._context.gate.take():
            return False
        self._context.flight.engine_asked = True
        return True

    async def pass_gate(self) -> None:
        """Wait while a gate is shut. Before an engine was asked, a turn whose clients are all gone is cancelled here.

        Raises as `GatePass.wait`, SessionClosed, ClaimLost.
        """
        context = self._context
        if context.gate.is_open:
            return
        with contextlib.nullcontext() if context.flight.engine_asked else context.flight.waiting_at_gate():
            context.stages.marks.append((TurnStage.GATE, context.stages.clock()))
            await context.gate.wait()
            context.stages.marks.append((TurnStage.PREPARE, context.stages.clock()))
        await self.require_still_open()

    async def require_still_open(self) -> None:
        """Raises SessionClosed if another process has closed the session while this turn waited at a gate, ClaimLost if
        the store was taken back to a checkpoint."""
        session_id, fence = self._context.session_id, self._claimed.fence
        session = require_open(await self._services.cache.current(session_id), session_id).session
        held = session.open_turns.get(self._claimed.opened.turn)
        if session.version >= fence and (held is None or held.fence != fence):
            raise ClaimLost(f"the claim on session {session_id} was ended while the turn waited at a gate")
