"""Generates a claimed turn's reply and validates it.

prompt ─▶ gate ─▶ placement ─▶ engine ─▶ validation ─▶ (the engine ended it early: gate, engine, …)
            ▲                     │
            └── shut meanwhile ───┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

import msgspec

from app import crash_points
from app.domain import calls, decide
from app.domain.events import GivenIds
from app.domain.history import Incoming
from app.domain.images import Image, take_out
from app.domain.left_out import bounded
from app.domain.reply import ValidatedReply
from app.domain.request import ChatRequest
from app.domain.split import ITEMS
from app.errors import GenerationAborted, TokenPrefixMismatch, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable
from app.fleet.engines import Answer
from app.sessions.cache import id_text
from app.turn.context import ClaimedTurn, TurnContext
from app.turn.continuation import Continuation, GeneratedPart, can_continue
from app.turn.dispatch import Dispatch, EngineRefusal, GeneratedTurn, PreparedTurn
from app.turn.engine_body import EngineBody, TakesNoIds
from app.turn.engine_request import EngineRequest, EngineRequestOptions, PromptIds, engine_request
from app.turn.large_bodies import INLINE_BYTES
from app.turn.placement import EngineChoice
from app.turn.session_control import ControlledTurn
from app.turn.stages import TurnStage
from app.upstream import headers as http_headers
from app.upstream.body import Body
from workers import codec
from workers.parse_parts import UNKNOWN_VERSION

if TYPE_CHECKING:
    from app.services import Services

log = logging.getLogger("turnlog.generation")

FIRST_PAUSE_S = 0.1
"""Pause before a generation is continued that ended at once although no gate is shut; doubled each time."""

EMPTY_TRIES = 5
"""Attempts of this kind in a row: three seconds in all."""


class Generation:
    """The generation of one turn. `received` is the body being validated: it is kept if the reply is rejected."""

    def __init__(
        self, services: Services, context: TurnContext, claimed: ClaimedTurn, controlled: ControlledTurn | None
    ) -> None:
        self.received: Body | None = None
        self._services = services
        self._context = context
        self._claimed = claimed
        self._controlled = controlled
        self._dispatch = Dispatch(services, context, claimed)
        self._requested_at = services.clock()

    async def run(self) -> GeneratedTurn | EngineRefusal:
        """Raises TurnCancelled, and AppError from the engine, the validation and the prompt."""
        try:
            turn = await self._prepared()
            outcome = await self._resumed(turn) or await self._generated(turn)
        except (UpstreamUnreachable, UpstreamTimeout):
            if self._dispatch.staged is not None:
                await self._dispatch.staged.end_part()
            raise
        finally:
            if self._dispatch.staged is not None:
                await self._dispatch.staged.settled()
        if not isinstance(outcome, GeneratedTurn):
            return outcome
        await self._require_no_drift(outcome)
        if not outcome.reply.calls:
            return outcome
        given = await self._services.large_bodies.run(self._context.large, lambda: self._given_ids(outcome.reply))
        return msgspec.structs.replace(outcome, given_ids=given)

    def _given_ids(self, reply: ValidatedReply) -> GivenIds | None:
        request, opened = self._context.request, self._claimed.opened
        if not isinstance(request, ChatRequest):
            return None
        proof = self._services.proofs.of(self._context.session_id, opened.turn)
        return calls.given_ids(reply.calls, opened.protocol, proof, request.messages)

    async def _prepared(self) -> PreparedTurn:
        context, services = self._context, self._services
        request, new, sent, stored = await services.large_bodies.run(context.large, self._request)
        messages = [*await self._stored_messages(), *sent]
        with context.flight.cancellable():
            prompt = await self._prompt(request)
            left_out = (*context.request.left_out, *(() if context.template is None else await self._silent()))
        dialect = services.engines.dialect
        self._dispatch.staged = services.staging.turn(context, self._claimed, request, dialect, prompt)
        self._dispatch.left_out = left_out = bounded(left_out) if left_out else ()
        return PreparedTurn(request, messages, new, stored, prompt, left_out, odd_arguments=sent != new)

    async def _placed(self) -> EngineChoice:
        """The engines to try, once the gates are open."""
        claimed = self._claimed
        await self._dispatch.pass_gate()
        choice = await self._services.placement.place(claimed.session, claimed.idle_since)
        return choice if self._controlled is None else await self._controlled.place(choice)

    async def _generated(self, turn: PreparedTurn) -> GeneratedTurn | EngineRefusal:
        """Generate the turn from its beginning."""
        body = self._dispatch.body(turn)
        with self._context.flight.cancellable():
            choice = await self._placed()
            answer, is_cut = await self._answer(self._dispatch.ask(choice, body))
            if not is_cut and self._dispatch.has_ended:
                answer = await self._dispatch.as_chat(answer, turn.request, body.prompt)
        part = await self._validate(answer, turn.stored, body.options, body.prompt, is_cut=is_cut)
        if isinstance(part, EngineRefusal):
            return part
        generated = _whole(turn, part, body.options, body.prompt, choice)
        if part.reply.result.finish_reason != "abort":
            return generated
        try:
            outcome = await self._after_abort(generated, part, turn)
        except TakesNoIds as engine:
            raise UpstreamUnreachable(f"{part.answer.engine} died, and {engine} takes no token ids") from engine
        if outcome is not generated or not part.answer.is_native:
            return outcome
        part = await self._as_chat(part, turn, body.options, body.prompt)
        return _whole(turn, part, body.options, body.prompt, choice)

    async def _answer(self, sent: Awaitable[Answer]) -> tuple[Answer, bool]:
        """The engine's answer, or what had come of it when the engine died; True then.

        A client that has got some of it live would get no more, so it gets the error, and its retry goes on. Raises as
        `Engines.generate`.
        """
        try:
            return await sent, False
        except UpstreamUnreachable:
            live, staged = self._dispatch.live, self._dispatch.staged
            cut = None if staged is None or (live is not None and live.begun) else staged.cut()
            if cut is None:
                raise
            return cut, True

    # a generation that an earlier turn has left

    async def _resumed(self, turn: PreparedTurn) -> GeneratedTurn | EngineRefusal | None:
        """Go on from what an earlier turn with the same request has staged; None if there is nothing to go on from."""
        staged = self._dispatch.staged
        answers = [] if staged is None else await staged.restore()
        if staged is None or not answers:
            return None
        options = self._dispatch.body(turn).options
        try:
            continuation = await self._restored(turn, options, answers)
        except (UpstreamInvalid, TokenPrefixMismatch) as error:
            self.received = None
            await staged.drop(str(error))
            return None
        staged.restored(continuation.tokens)
        with self._context.flight.cancellable():
            choice = await self._placed()
        generated = _whole(turn, continuation.first, options, turn.prompt, choice)
        try:
            return await self._continued(generated, continuation, turn)
        except TakesNoIds as engine:
            await staged.drop(f"{engine} takes no token ids")
            return None

    async def _restored(
        self, turn: PreparedTurn, options: EngineRequestOptions, answers: Sequence[Answer]
    ) -> Continuation:
        """The generations that an earlier turn has left. Raises as `ReplyValidator.validate`."""
        first, *rest = answers
        validated = await self._validate_body(first, turn.stored, options, turn.prompt)
        part = GeneratedPart(first, validated, is_cut=True)
        ids = turn.prompt.text if turn.prompt is not None else await self._reported_ids(validated)
        continuation = Continuation(self._context.request, self._services.settings, ids, options, part)
        for answer in rest:
            validated = await self._validate_body(answer, (), continuation.options(), continuation.prompt())
            await continuation.add(GeneratedPart(answer, validated, is_cut=True))
        return continuation

    # prompt

    def _request(self) -> tuple[EngineRequest, list[bytes], list[bytes], list[bytes]]:
        """The request without its messages, the messages that are not stored yet, these as engines take them, and as
        they will be stored.

        Raises InvalidRequest.
        """
        context, claimed, services = self._context, self._claimed, self._services
        request = engine_request(
            claimed.session, context.request, services.settings, context.adapter, services.engines.dialect
        )
        new = context.history.new(claimed.plan)
        if request.shape != "chat":
            return request, new, new, new
        stored: list[bytes] = []
        images: list[Image] = []
        for message in new:
            kept, taken = take_out(message)
            stored.append(kept)
            images += taken
        if images:
            request = request.with_images(claimed.session, images)
        return request, new, [calls.sendable(message) for message in new], stored

    async def _stored_messages(self) -> list[bytes | memoryview]:
        claimed = self._claimed
        if claimed.plan.base_messages == 0 or self._context.request.shape != "chat":
            return []
        stored = await self._services.cache.messages(claimed.entry, claimed.plan.parent)
        chain = claimed.session.message_chain(claimed.plan.parent) if claimed.entry.index.has_odd_calls else ()
        if not any(turn.odd_arguments for turn in chain):
            return [stored]
        large = len(stored) if len(stored) > INLINE_BYTES else 0
        return await self._services.large_bodies.run(large, lambda: _sendable(stored))

    async def _prompt(self, request: EngineRequest) -> PromptIds | None:
        """The token ids to send, if any: the client's own, or those of a chat if there is a tokenizer."""
        context, token_in = self._context, self._services.token_in
        if context.request.ids is not None:
            return await token_in.given(self._claimed, context.request.ids)
        if context.template is None or not isinstance(context.history, Incoming):
            return None
        return await token_in.built(self._claimed, context.template, context.history, request)

    async def _silent(self) -> Sequence[str]:
        """The new messages that the template renders as nothing, for `left_out`."""
        history = self._context.history
        if not isinstance(history, Incoming):
            return ()
        return await self._services.token_in.silent(history, self._claimed.plan.base_messages)

    # validation

    async def _validate(
        self,
        answer: Answer,
        new: Sequence[bytes],
        options: EngineRequestOptions,
        prompt: PromptIds | None,
        *,
        is_cut: bool,
    ) -> GeneratedPart | EngineRefusal:
        """Validate one generation. Raises as `ReplyValidator.validate`."""
        reply = msgspec.structs.replace(answer.reply, headers=http_headers.to_client(answer.reply.headers))
        if reply.status != 200:
            return EngineRefusal(reply.status, reply.headers, reply.body)
        engine = self._services.engines.known(answer.engine)
        named = engine.rid_in(reply.body)
        if named not in (None, self._claimed.rid):
            raise UpstreamInvalid("the reply is that of another request")
        answer = msgspec.structs.replace(answer, reply=reply)
        validated = await self._validate_body(answer, new, options, prompt)
        if named is None and engine.lacks_id(reply.body):
            raise UpstreamInvalid("the reply has no id, which this engine gives: it may be that of another request")
        if crash_points.ARMED:
            crash_points.reach("after_judged")
        version = _reported_version(answer, validated)
        self._services.engines.seen(answer.engine, version, answer.known, validated.result.dialect)
        return GeneratedPart(answer, validated, is_cut)

    async def _as_chat(
        self, part: GeneratedPart, turn: PreparedTurn, options: EngineRequestOptions, prompt: PromptIds | None
    ) -> GeneratedPart:
        """An aborted part that is returned. Raises as `Dispatch.as_chat`, `ReplyValidator.validate`."""
        answer = await self._dispatch.as_chat(part.answer, turn.request, prompt)
        return GeneratedPart(answer, await self._validate_body(answer, turn.stored, options, prompt), part.is_cut)

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
            claimed, parent, lambda: memoryview(codec.unpack_facts(result.facts, result.wire).suffix_ids).cast("i")
        )
        raise TokenPrefixMismatch(
            f"the prompt's {result.suffix_tokens} tokens do not continue the {parent.token_count} stored ones: "
            f"they differ at position {at}"
        )

    # a generation that an engine ended early

    async def _after_abort(
        self, generated: GeneratedTurn, first: GeneratedPart, turn: PreparedTurn
    ) -> GeneratedTurn | EngineRefusal:
        """Handle a generation that an engine ended early, by the session's policy, or that it could not end.

        An aborted one is continued only if a gate was shut since it was sent: a driver that has enough samples ends the
        others for good. Raises GenerationAborted, TakesNoIds for one that is cut, and as `run`.
        """
        request, policy = self._context.request, self._dispatch.on_abort
        if not first.is_cut:
            if policy == "fail":
                raise GenerationAborted(f"{first.answer.engine} ended the generation before its time")
            if policy == "return" or not await self._context.gate.was_shut():
                return generated
            engine, engines = first.answer.engine, self._services.engines
            if not can_continue(request) or (request.shape == "chat" and engines.takes_no_ids(engine)):
                engines.warn_of_aborts(engine)
                return generated
        ids = generated.prompt.text if generated.prompt is not None else await self._reported_ids(first.reply)
        continuation = Continuation(request, self._services.settings, ids, generated.options, first)
        return await self._continued(generated, continuation, turn)

    async def _continued(
        self, generated: GeneratedTurn, continuation: Continuation, turn: PreparedTurn
    ) -> GeneratedTurn | EngineRefusal:
        """The turn, with the rest of its generation. Raises as `_continue`."""
        choice = await self._continue(generated, continuation, turn)
        if isinstance(choice, EngineRefusal):
            return choice
        if continuation.newest is continuation.first and not continuation.is_complete:
            return generated
        answer = await self._dispatch.as_chat(await continuation.join(), turn.request, generated.prompt)
        self._context.waiter.grow(len(answer.reply.body))
        validated = await self._validate_body(answer, generated.stored, generated.options, generated.prompt)
        reply = msgspec.structs.replace(validated, parts=continuation.parts(), weight_versions=continuation.versions())
        body, headers = answer.reply.body, answer.reply.headers
        return msgspec.structs.replace(generated, reply=reply, body=body, headers=headers, choice=choice)

    async def _continue(
        self, generated: GeneratedTurn, continuation: Continuation, turn: PreparedTurn
    ) -> EngineChoice | EngineRefusal:
        """Continue the generation after each pause, until it is complete or ended for good; returns the last engine
        choice.

        An engine may still be ending generations when the gate has opened. A part without tokens is retried after a
        pause, a limited number of times, and so is one whose engine has died. All parts use the turn's rid, so that
        they can be aborted: SGLang forgets a request before it answers it. Raises TurnCancelled, TakesNoIds where the
        last part was cut, and as `run`.
        """
        context = self._context
        misses, choice = 0, generated.choice
        while not continuation.is_complete:
            if self._dispatch.staged is not None:
                await self._dispatch.staged.end_part()
            try:
                part, choice = await self._rest(generated, continuation, turn, choice, misses)
            except UpstreamUnreachable:
                if self._dispatch.staged is None or misses == EMPTY_TRIES:
                    raise
                misses += 1
                continue
            except TakesNoIds as engine:
                if continuation.newest.is_cut:
                    raise
                self._services.engines.warn_of_aborts(str(engine))
                break
            if isinstance(part, EngineRefusal):
                return part
            await continuation.add(part)
            if part.is_cut or await context.gate.was_shut():
                misses = 0
            elif misses == EMPTY_TRIES or part.reply.result.output_tokens:
                break
            else:
                misses += 1
        return choice

    async def _rest(
        self,
        generated: GeneratedTurn,
        continuation: Continuation,
        turn: PreparedTurn,
        choice: EngineChoice,
        misses: int,
    ) -> tuple[GeneratedPart | EngineRefusal, EngineChoice]:
        """The next part, or what has come of it until its engine died; `misses` were in vain before it."""
        context = self._context
        request, prompt, options = (
            continuation.request(generated.request),
            continuation.prompt(),
            continuation.options(),
        )
        context.stages.marks.append((TurnStage.GATE, context.stages.clock()))
        with context.flight.cancellable():
            if misses:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (misses - 1))
            await context.gate.wait()
            context.stages.marks.append((TurnStage.PREPARE, context.stages.clock()))
            await self._dispatch.require_still_open()
            choice = await self._place_again(choice, continuation.newest.answer.engine)
            native = continuation.first.answer.is_native
            body = EngineBody(
                self._services, context, request, options, turn.messages, prompt, "continued", wants_native=native
            )
            answer, is_cut = await self._answer(self._dispatch.send(choice, body))
        return await self._validate(answer, (), body.options, body.prompt, is_cut=is_cut), choice

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
        suffix = id_text(codec.unpack_facts(reply.result.facts, reply.result.wire).suffix_ids)
        parent = decide.token_parent(claimed.session, claimed.plan)
        if parent is None or not reply.result.base:
            return suffix
        stored = await self._services.cache.tokens(claimed.entry, parent.number)
        return b",".join(filter(None, (stored, suffix)))


def _sendable(messages: bytes | memoryview) -> list[bytes | memoryview]:
    """Stored messages, joined by commas, as every engine takes them."""
    return [calls.sendable(bytes(raw)) for raw in ITEMS.decode(b"[" + messages + b"]")]


def _whole(
    turn: PreparedTurn,
    part: GeneratedPart,
    options: EngineRequestOptions,
    prompt: PromptIds | None,
    choice: EngineChoice,
) -> GeneratedTurn:
    """The turn, if this part is all of it."""
    reply = part.answer.reply
    return GeneratedTurn(
        part.reply,
        reply.body,
        reply.headers,
        turn.request,
        turn.new,
        turn.stored,
        prompt,
        options,
        choice,
        turn.left_out,
        odd_arguments=turn.odd_arguments,
    )


def _reported_version(answer: Answer, reply: ValidatedReply) -> str | None:
    """The weight version at the end of the reply, if it differs from the one known at dispatch."""
    spans = reply.weight_versions
    return spans[-1].version if spans and spans[-1].version not in (UNKNOWN_VERSION, answer.dispatched) else None
