"""Generates a claimed turn's reply and validates it.

prompt ─▶ gate ─▶ placement ─▶ engine ─▶ validation ─▶ (the engine ended it early: gate, engine, …)
            ▲                     │
            └── shut meanwhile ───┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.events import OnAbort
from app.domain.history import Incoming
from app.domain.reply import ValidatedReply
from app.domain.request import ChatRequest
from app.domain.rids import RID_CHARACTERS, RID_MARK
from app.errors import GenerationAborted, TokenPrefixMismatch, UpstreamInvalid
from app.fleet.engines import Answer, EngineChoice
from app.sessions.cache import id_text, require_open
from app.turn.context import ClaimedTurn, TurnContext
from app.turn.continuation import Continuation, GeneratedPart, can_continue
from app.turn.engine_body import EngineBody, IdsOrigin, TakesNoIds
from app.turn.engine_request import EngineRequest, EngineRequestOptions, PromptIds, engine_request, options_for
from app.turn.live import LiveStream
from app.turn.services import TurnServices
from app.turn.session_control import ControlledTurn
from app.turn.stages import TurnStage
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import Withheld
from app.upstream.headers import Headers
from app.upstream.streams import STREAM, Push
from workers import codec
from workers.codec import Facts
from workers.parse_parts import UNKNOWN_VERSION

log = logging.getLogger("turnlog.generation")

FIRST_PAUSE_S = 0.1
"""Pause before a generation is continued that ended at once although no gate is shut; doubled each time."""

EMPTY_TRIES = 5
"""Attempts of this kind in a row: three seconds in all."""


class GeneratedTurn(msgspec.Struct, frozen=True):
    """A validated reply with its body and headers, and what was sent for it. `new` are the messages not stored yet."""

    reply: ValidatedReply
    body: Body
    headers: Headers
    request: EngineRequest
    new: Sequence[bytes]
    prompt: PromptIds | None
    options: EngineRequestOptions
    choice: EngineChoice


class EngineRefusal(msgspec.Struct, frozen=True):
    """An engine's own error, which is passed to the client."""

    status: int
    headers: Headers
    body: Body


class Generation:
    """The generation of one turn. `received` is the body being validated: it is kept if the reply is rejected."""

    def __init__(
        self, services: TurnServices, context: TurnContext, claimed: ClaimedTurn, controlled: ControlledTurn | None
    ) -> None:
        self.received: Body | None = None
        self._services = services
        self._context = context
        self._claimed = claimed
        self._controlled = controlled
        self._requested_at = services.clock()

    async def run(self) -> GeneratedTurn | EngineRefusal:
        """Raises TurnCancelled, and AppError from the engine, the validation and the prompt."""
        context, claimed, services = self._context, self._claimed, self._services
        request, new = await services.large_bodies.run(context.large, self._request)
        messages = [*await self._stored_messages(), *new]
        with context.flight.cancellable():
            prompt = await self._prompt(request)
            await self._pass_gate()
            choice = await services.placement.place(claimed.session, claimed.idle_since)
            if self._controlled is not None:
                choice = await self._controlled.place(choice)
            body, answer = await self._ask_engine(choice, request, messages, prompt)
            options, prompt = body.options, body.prompt
        part = await self._validate(answer, new, options, prompt)
        if isinstance(part, EngineRefusal):
            return part
        generated = GeneratedTurn(
            part.reply, part.answer.reply.body, part.answer.reply.headers, request, new, prompt, options, choice
        )
        if part.reply.result.finish_reason == "abort":
            outcome = await self._after_abort(generated, part, messages)
            if isinstance(outcome, EngineRefusal):
                return outcome
            generated = outcome
        await self._require_no_drift(generated)
        return generated

    # prompt

    def _request(self) -> tuple[EngineRequest, list[bytes]]:
        """The request without its messages, and the messages that are not stored yet."""
        context, claimed, services = self._context, self._claimed, self._services
        request = engine_request(
            claimed.session, context.request, services.settings, context.adapter, services.engines.dialect
        )
        return request, context.history.new(claimed.plan)

    async def _stored_messages(self) -> list[bytes]:
        claimed = self._claimed
        if claimed.plan.base_messages == 0 or self._context.request.shape != "chat":
            return []
        return [await self._services.cache.messages(claimed.entry, claimed.plan.parent)]

    async def _prompt(self, request: EngineRequest) -> PromptIds | None:
        """The token ids to send, if any: the client's own, or those of a chat if there is a tokenizer."""
        context, token_in = self._context, self._services.token_in
        if context.request.ids is not None:
            return await token_in.given(self._claimed, context.request.ids)
        if context.template is None or not isinstance(context.history, Incoming):
            return None
        return await token_in.built(self._claimed, context.template, context.history, request)

    # engine

    async def _ask_engine(
        self, choice: EngineChoice, request: EngineRequest, messages: Sequence[bytes], prompt: PromptIds | None
    ) -> tuple[EngineBody, Answer]:
        """Send the request; returns it as the engine got it, and the engine's answer. Raises as `Engines.generate`."""
        context = self._context
        options = options_for(self._claimed, context.request, prompt, self._services.settings)
        origin: IdsOrigin = "built" if context.request.ids is None else "client"
        body = EngineBody(self._services, context, request, options, messages, prompt, origin)
        live = self._live(options)
        if live is not None:
            body.change(msgspec.structs.replace(options, own=STREAM))
            return body, await self._send(choice, body, live.push)
        answer = await self._send(choice, body)
        if answer.reply.status == 400 and options.own:
            # If the prompt drifted, it may be shorter than the row asked for; engines refuse that.
            body.change(msgspec.structs.replace(options, own=b"", first_row=0))
            answer = await self._send(choice, body)
        return body, answer

    def _live(self, options: EngineRequestOptions) -> LiveStream | None:
        """The client's stream if it is sent while the engine generates. Not if the engines may not stream with ids, if
        a replay payload is needed, which no stream has, or if the generation may be continued by another."""
        context, claimed, settings = self._context, self._claimed, self._services.settings
        live, request = context.waiter.live, context.request
        if live is None or not isinstance(request, ChatRequest):
            return None
        if (request.stream_mode or claimed.session.config.stream_mode) == "whole" or live.mode is not None:
            return None
        dialect = self._services.engines.dialect if settings.upstream_dialect == "auto" else settings.upstream_dialect
        if dialect != "vllm" or settings.replay or options.clients or self._on_abort() == "continue":
            return None
        live.go_live(claimed.opened.turn, request.echo)
        return live

    def _on_abort(self) -> OnAbort:
        return self._claimed.session.config.on_abort or self._services.settings.abort_policy

    async def _send(self, choice: EngineChoice, body: EngineBody, push: Push | None = None) -> Answer:
        """Send one request while the gates are open; returns the engine's answer. Raises as `Engines.generate`."""
        context, services = self._context, self._services
        parent = self._claimed.session.config.parent
        headers = http_headers.to_engine(context.client, context.session_id, services.settings.upstream_api_key, parent)
        reach("before_engine")
        while True:
            await self._pass_gate()
            context.stages.enter(TurnStage.ENGINE)
            try:
                answer = await services.engines.generate(
                    choice,
                    context.request.shape,
                    body,
                    headers,
                    context.waiter.grow,
                    rid=self._claimed.rid,
                    version=context.gate.version,
                    may_send=self._may_send,
                    push=push,
                )
            except Withheld:
                continue
            context.stages.enter(TurnStage.VALIDATE)
            reach("after_engine")
            return answer

    def _may_send(self) -> bool:
        """Check the gates at the last moment, when a connection is ready."""
        if not self._context.gate.take():
            return False
        self._context.flight.engine_asked = True
        return True

    async def _pass_gate(self) -> None:
        """Wait while a gate is shut. Before an engine was asked, a turn whose clients are all gone is cancelled here.

        Raises as `GatePass.wait`, SessionClosed.
        """
        context = self._context
        if context.gate.is_open:
            return
        with contextlib.nullcontext() if context.flight.engine_asked else context.flight.waiting_at_gate():
            context.stages.enter(TurnStage.GATE)
            await context.gate.wait()
            context.stages.enter(TurnStage.PREPARE)
        await self._require_still_open()

    async def _require_still_open(self) -> None:
        """Raises SessionClosed if another process has closed the session while this turn waited at a gate."""
        session_id = self._context.session_id
        require_open(await self._services.cache.current(session_id), session_id)

    # validation

    async def _validate(
        self, answer: Answer, new: Sequence[bytes], options: EngineRequestOptions, prompt: PromptIds | None
    ) -> GeneratedPart | EngineRefusal:
        """Validate one generation. Raises as `ReplyValidator.validate`."""
        reply = msgspec.structs.replace(answer.reply, headers=http_headers.to_client(answer.reply.headers))
        if reply.status != 200:
            return EngineRefusal(reply.status, reply.headers, reply.body)
        _require_own_rid(reply.body, self._claimed.rid)
        answer = msgspec.structs.replace(answer, reply=reply)
        validated = await self._validate_body(answer, new, options, prompt)
        reach("after_judged")
        version = _reported_version(answer, validated)
        self._services.engines.seen(answer.engine, version, answer.known, validated.result.dialect)
        return GeneratedPart(answer, validated)

    async def _validate_body(
        self, answer: Answer, new: Sequence[bytes], options: EngineRequestOptions, prompt: PromptIds | None
    ) -> ValidatedReply:
        self.received = answer.reply.body
        try:
            return await self._services.validator.validate(
                self._claimed, self._context.history, new, answer, self._requested_at, options, prompt
            )
        except TokenPrefixMismatch:
            # The engine may have been restarted with other settings since it was asked whether it takes ids.
            self._services.engines.forget_ids_field(answer.engine)
            raise

    async def _require_no_drift(self, generated: GeneratedTurn) -> None:
        """Raises TokenPrefixMismatch if the prompt must continue the stored tokens but does not.

        It must if it was built on them, or if the session rejects drift.
        """
        claimed, result = self._claimed, generated.reply.result
        parent = decide.token_parent(claimed.session, claimed.plan)
        if parent is None or result.base:
            return
        if claimed.session.config.on_drift != "reject" and not (
            generated.prompt is not None and generated.prompt.extends
        ):
            return
        at = await self._services.token_in.first_difference(
            claimed, parent, lambda: memoryview(codec.unpack(result.facts, Facts).suffix_ids).cast("i")
        )
        raise TokenPrefixMismatch(
            f"the prompt's {result.suffix_tokens} tokens do not continue the {parent.token_count} stored ones: "
            f"they differ at position {at}"
        )

    # a generation that an engine ended early

    async def _after_abort(
        self, generated: GeneratedTurn, first: GeneratedPart, messages: Sequence[bytes]
    ) -> GeneratedTurn | EngineRefusal:
        """Handle a generation that an engine ended early, by the session's policy.

        It is continued only if a gate was shut since it was sent: a driver that has enough samples ends the others for
        good. `messages` are the messages that were sent. Raises GenerationAborted, and as `run`.
        """
        request, settings, policy = self._context.request, self._services.settings, self._on_abort()
        if policy == "fail":
            raise GenerationAborted(f"{first.answer.engine} ended the generation before its time")
        if policy == "return" or not await self._context.gate.was_shut():
            return generated
        engine, engines = first.answer.engine, self._services.engines
        if not can_continue(request) or (request.shape == "chat" and engines.takes_no_ids(engine)):
            engines.warn_of_aborts(engine)
            return generated
        ids = generated.prompt.text if generated.prompt is not None else await self._reported_ids(first.reply)
        continuation = Continuation(request, settings, ids, generated.options, first)
        choice = await self._continue(generated, continuation, messages)
        if isinstance(choice, EngineRefusal):
            return choice
        if continuation.newest is first and not continuation.is_complete:
            return generated
        answer = await continuation.join()
        self._context.waiter.grow(len(answer.reply.body))
        validated = await self._validate_body(answer, generated.new, generated.options, generated.prompt)
        reply = msgspec.structs.replace(validated, parts=continuation.parts(), weight_versions=continuation.versions())
        body, headers = answer.reply.body, answer.reply.headers
        return msgspec.structs.replace(generated, reply=reply, body=body, headers=headers, choice=choice)

    async def _continue(
        self, generated: GeneratedTurn, continuation: Continuation, messages: Sequence[bytes]
    ) -> EngineChoice | EngineRefusal:
        """Continue the generation after each pause, until it is complete or ended for good; returns the last engine
        choice.

        An engine may still be ending generations when the gate has opened. A part without tokens is retried after a
        pause, a limited number of times. All parts use the turn's rid, so that they can be aborted: SGLang forgets a
        request before it answers it. Raises TurnCancelled, and as `run`.
        """
        context = self._context
        misses, choice = 0, generated.choice
        while not continuation.is_complete:
            request, prompt, options = (
                continuation.request(generated.request),
                continuation.prompt(),
                continuation.options(),
            )
            context.stages.enter(TurnStage.GATE)
            with context.flight.cancellable():
                if misses:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (misses - 1))
                await context.gate.wait()
                context.stages.enter(TurnStage.PREPARE)
                await self._require_still_open()
                choice = await self._place_again(choice, continuation.newest.answer.engine)
                body = EngineBody(self._services, context, request, options, messages, prompt, "continued")
                try:
                    answer = await self._send(choice, body)
                except TakesNoIds as engine:
                    self._services.engines.warn_of_aborts(str(engine))
                    break
            part = await self._validate(answer, (), body.options, body.prompt)
            if isinstance(part, EngineRefusal):
                return part
            await continuation.add(part)
            if await context.gate.was_shut():
                misses = 0
            elif misses == EMPTY_TRIES or part.reply.result.output_tokens:
                break
            else:
                misses += 1
        return choice

    async def _place_again(self, choice: EngineChoice, engine: str) -> EngineChoice:
        """Prefer the engine that has the tokens so far in its cache, if it still accepts turns.

        Raises as `Placement.place`.
        """
        claimed, services = self._claimed, self._services
        order = services.engines.order(claimed.session.session_id, engine)
        if choice.control is not None:
            return msgspec.structs.replace(choice, order=order)
        again = await services.placement.place(claimed.session, claimed.idle_since)
        return msgspec.structs.replace(again, order=order, away=again.away or choice.away)

    async def _reported_ids(self, reply: ValidatedReply) -> bytes:
        """The prompt's ids as text, as reported by the engine that tokenised it. Raises SessionUnreadable."""
        claimed = self._claimed
        suffix = id_text(codec.unpack(reply.result.facts, Facts).suffix_ids)
        parent = decide.token_parent(claimed.session, claimed.plan)
        if parent is None or not reply.result.base:
            return suffix
        stored = await self._services.cache.tokens(claimed.entry, parent.number)
        return b",".join(filter(None, (stored, suffix)))


_REPLY_ID = re.compile(rb'"id"\s*:\s*"(?:chatcmpl-|cmpl-)?(%b[0-9a-f]{%d})"' % (RID_MARK.encode(), RID_CHARACTERS))
_REPLY_ID_WITHIN = 512
"""An engine begins a reply with its id, which is made of the turn's `rid`; only the first bytes are searched."""


def _reported_version(answer: Answer, reply: ValidatedReply) -> str | None:
    """The weight version at the end of the reply, if it differs from the one known at dispatch."""
    spans = reply.weight_versions
    return spans[-1].version if spans and spans[-1].version not in (UNKNOWN_VERSION, answer.dispatched) else None


def _require_own_rid(body: Body, rid: str) -> None:
    """Raises UpstreamInvalid for the reply to another of our requests, sent on this one's connection."""
    found = _REPLY_ID.search(body.beginning(_REPLY_ID_WITHIN))
    if found is not None and found[1] != rid.encode():
        raise UpstreamInvalid("the reply is that of another request")
