"""Goes on from tokens that exist already: those of a generation that an engine ended early or could not end, and those
that an earlier turn with the same request has staged.

It stands around the plain generation (`points.around_engine`), and calls that where no tokens are staged.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from app.domain import decide
from app.domain.events import OnAbort
from app.domain.request import value_of
from app.errors import GenerationAborted, TokenPrefixMismatch, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable
from app.features.resume.continuation import Continuation, GeneratedPart, can_continue
from app.features.resume.staging import StagedTurn, Staging
from app.sessions.cache import id_text
from app.turn.engine_call import TakesNoIds
from app.turn.in_flight import Claimed, EngineCall, Generated, TurnStage
from app.turn.points import Generate
from app.upstream.client import EngineReply
from app.upstream.streams import STREAM
from workers import codec
from workers.reply import ValidatedReply

if TYPE_CHECKING:
    from app.features.gates.pauses import Pauses
    from app.services import Services

FIRST_PAUSE_S = 0.1
"""Pause before a generation is continued that ended at once although no gate is shut; doubled each time."""

EMPTY_TRIES = 5
"""Attempts of this kind in a row: three seconds in all."""


class Resume:
    """The turns of this process that go on from tokens that exist already."""

    def __init__(self, services: Services, staging: Staging) -> None:
        self._services = services
        self._staging = staging
        self._calls = services.engine_calls
        pauses: Pauses | None = services.features.get("gates")
        self._gates = None if pauses is None else pauses.gates

    async def around(self, generate: Generate, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Generate the turn, with whatever goes on from earlier tokens. Raises as `generate`, GenerationAborted."""
        if self._staging.is_on:
            staged = self._staging.begin(turn, call, self._services.engines.dialect)
            if staged is not None:
                return await self._staged(turn, call, staged)
        generated = await generate(turn, call)
        if isinstance(generated, Generated) and generated.reply.finish_reason == "abort":
            return await self._ended_early(turn, call, None, GeneratedPart(generated.answer, generated.reply))
        return generated

    def on_abort(self, turn: Claimed) -> OnAbort:
        return turn.session.config.on_abort or self._services.settings.abort_policy

    async def _was_shut(self, turn: Claimed) -> bool:
        """Was a gate shut since the turn's request was sent? Raises StoreUnavailable."""
        return self._gates is not None and await self._gates.was_shut(turn.flight)

    def _is_late(self, turn: Claimed) -> bool:
        """Is the turn's time over? What an engine ends then is not continued."""
        limits = self._services.points.limits
        return limits is not None and limits.is_late(turn)

    # a turn that is staged

    async def _staged(self, turn: Claimed, call: EngineCall, staged: StagedTurn) -> Generated | EngineReply:
        call.stream, call.wants_native, call.open_stream = STREAM, staged.is_native, staged.stream
        try:
            restored = await self._restored(turn, call, staged)
            return await self._generated(turn, call, staged) if restored is None else restored
        except (UpstreamUnreachable, UpstreamTimeout):
            if call.open_stream is not None:
                await staged.end_part()
            raise
        finally:
            await staged.settled()

    async def _generated(self, turn: Claimed, call: EngineCall, staged: StagedTurn) -> Generated | EngineReply:
        """As the plain generation; what had come of it when its engine died is continued elsewhere."""
        is_cut = False
        keeper: StagedTurn | None = staged
        with turn.flight.cancellable():
            await self._calls.place(turn)
            try:
                answer = await self._calls.ask(turn, call)
            except UpstreamUnreachable as error:
                answer, is_cut = _cut(turn, keeper, error), True
            if staged.is_native and not call.is_native:
                staged.counters.turns["not_staged"] += 1
                keeper = call.open_stream = None
            elif not is_cut and staged.has_ended:
                answer = await self._as_chat(turn, call, answer)
        generated = await self._calls.validate(turn, call, answer, call.stored)
        if isinstance(generated, Generated) and generated.reply.finish_reason == "abort":
            part = GeneratedPart(generated.answer, generated.reply, is_cut)
            return await self._ended_early(turn, call, keeper, part)
        return generated

    async def _restored(self, turn: Claimed, call: EngineCall, staged: StagedTurn) -> Generated | EngineReply | None:
        """Go on from what an earlier turn with the same request has staged; None if there is nothing to go on from."""
        answers = await staged.restore()
        if not answers:
            return None
        try:
            first, *rest = answers
            reply = await self._calls.validate_body(turn, call, first, call.stored)
            ids = call.ids.text if call.ids is not None else await self._reported_ids(turn, reply)
            part = GeneratedPart(first, reply, is_cut=True)
            continuation = Continuation(turn.request, self._services.settings, ids, call, part)
            for answer in rest:
                reply = await self._calls.validate_body(turn, continuation.next_call(), answer, ())
                await continuation.add(GeneratedPart(answer, reply, is_cut=True))
        except (UpstreamInvalid, TokenPrefixMismatch) as error:
            turn.received = None
            await staged.drop(str(error))
            return None
        staged.restored(continuation.tokens)
        with turn.flight.cancellable():
            await self._calls.place(turn)
        try:
            return await self._continued(turn, call, staged, continuation)
        except TakesNoIds as engine:
            await staged.drop(f"{engine} does not accept token ids")
            return None

    # a generation that an engine ended early

    async def _ended_early(
        self, turn: Claimed, call: EngineCall, staged: StagedTurn | None, first: GeneratedPart
    ) -> Generated | EngineReply:
        """Handle a generation that an engine ended early, by the session's policy, or that it could not end."""
        try:
            continued = await self._after_abort(turn, call, staged, first)
        except TakesNoIds as engine:
            raise UpstreamUnreachable(f"{first.answer.engine} died, and {engine} does not accept token ids") from engine
        if continued is not None:
            return continued
        if not first.answer.is_native:
            return Generated(first.answer, first.reply)
        answer = await self._as_chat(turn, call, first.answer)
        return Generated(answer, await self._calls.validate_body(turn, call, answer, call.stored))

    async def _after_abort(
        self, turn: Claimed, call: EngineCall, staged: StagedTurn | None, first: GeneratedPart
    ) -> Generated | EngineReply | None:
        """What came of continuing the turn; None if it was not. An aborted generation is only if a gate was shut since
        it was sent: a driver that has enough samples ends the others for good. Raises GenerationAborted, TakesNoIds for
        one that is cut."""
        services, policy = self._services, self.on_abort(turn)
        if not first.is_cut:
            if self._is_late(turn):
                return None
            if policy == "fail":
                raise GenerationAborted(f"{first.answer.engine} ended the generation early")
            if policy == "return" or not await self._was_shut(turn):
                return None
            engine, is_chat = first.answer.engine, turn.request.shape == "chat"
            if not can_continue(turn.request) or (is_chat and services.engines.takes_no_ids(engine)):
                services.engines.warn_of_aborts(engine)
                return None
        ids = call.prompt.text if call.prompt is not None else await self._reported_ids(turn, first.reply)
        continuation = Continuation(turn.request, services.settings, ids, call, first)
        return await self._continued(turn, call, staged, continuation)

    async def _continued(
        self, turn: Claimed, call: EngineCall, staged: StagedTurn | None, continuation: Continuation
    ) -> Generated | EngineReply | None:
        """Generate the rest of the turn; None if nothing was added to its first part. Raises as `_continue`."""
        refusal = await self._continue(turn, staged, continuation)
        if refusal is not None:
            return refusal
        if continuation.newest is continuation.first and not continuation.is_complete:
            return None
        answer = await self._as_chat(turn, call, await continuation.join())
        turn.flight.waiter.grow(answer.body.size)
        reply = await self._calls.validate_body(turn, call, answer, call.stored)
        joined = msgspec.structs.replace(
            reply,
            parts=continuation.parts(),
            weight_versions=continuation.versions(),
            speculative=continuation.speculative(),
        )
        return Generated(answer, joined)

    async def _continue(
        self, turn: Claimed, staged: StagedTurn | None, continuation: Continuation
    ) -> EngineReply | None:
        """Continue the generation after each pause, until it is complete or ended for good. An engine's own error, with
        which it refuses, is returned.

        An engine may still be ending generations when the gate has opened. A part without tokens is retried after a
        pause, a limited number of times, and so is one whose engine has died. All parts use the turn's rid, so that
        they can be aborted: SGLang forgets a request before it answers it. Raises TurnCancelled, TakesNoIds where the
        last part was cut, and as `EngineCalls.generate`.
        """
        misses = 0
        while not continuation.is_complete:
            if staged is not None:
                await staged.end_part()
            try:
                part = await self._rest(turn, staged, continuation, misses)
            except UpstreamUnreachable:
                if staged is None or misses == EMPTY_TRIES:
                    raise
                misses += 1
                continue
            except TakesNoIds as engine:
                if continuation.newest.is_cut:
                    raise
                self._services.engines.warn_of_aborts(str(engine))
                break
            if isinstance(part, EngineReply):
                return part
            await continuation.add(part)
            if self._is_late(turn):
                break
            if part.is_cut or await self._was_shut(turn):
                misses = 0
            elif misses == EMPTY_TRIES or part.reply.output_tokens:
                break
            else:
                misses += 1
        return None

    async def _rest(
        self, turn: Claimed, staged: StagedTurn | None, continuation: Continuation, misses: int
    ) -> GeneratedPart | EngineReply:
        """The next part, or what has come of it until its engine died; an engine's own error is returned as it is.
        `misses` were in vain before it."""
        call, flight, is_cut = continuation.next_call(), turn.flight, False
        stages = flight.stages
        stages.marks.append((TurnStage.GATE, stages.clock()))
        with flight.cancellable():
            if misses:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (misses - 1))
            for gate in self._services.points.before_engine:
                if (wait := gate(flight)) is not None:
                    await wait(flight)
            stages.marks.append((TurnStage.PREPARE, stages.clock()))
            await self._calls.require_still_open(turn)
            await self._place_again(turn, continuation.newest.answer.engine)
            try:
                answer = await self._calls.send(turn, call)
            except UpstreamUnreachable as error:
                answer, is_cut = _cut(turn, staged, error), True
        generated = await self._calls.validate(turn, call, answer, ())
        if isinstance(generated, EngineReply):
            return generated
        return GeneratedPart(generated.answer, generated.reply, is_cut)

    async def _place_again(self, turn: Claimed, engine: str) -> None:
        """Prefer the engine that has the tokens so far in its cache, if it still accepts turns.

        Raises as `Placement.place`.
        """
        services, choice = self._services, turn.choice
        assert choice is not None
        order = services.engines.order(turn.flight.run, turn.flight.session_id, engine)
        if choice.control is None:
            again = await services.placement.place(turn)
            choice.away = again.away or choice.away
        choice.order = order

    async def _as_chat(self, turn: Claimed, call: EngineCall, answer: EngineReply) -> EngineReply:
        """The answer as a chat's, if it is not one. Raises as `NativeRoutes.chat`."""
        params = turn.request.params
        if not answer.is_native or call.prompt is None:
            return answer
        offers = value_of(params.get("tool_choice"), "tool_choice") != "none"
        tools = call.tools if offers else None
        flight, prompt = turn.flight, call.prompt.text
        return await self._services.native.chat(answer, flight.run, flight.session_id, params, tools, prompt)

    async def _reported_ids(self, turn: Claimed, reply: ValidatedReply) -> bytes:
        """The prompt's ids as text, as reported by the engine that tokenised it. Raises SessionUnreadable."""
        suffix = id_text(codec.unpack_tokens(reply.tokens, reply.exchange).suffix_ids)
        parent = decide.token_parent(turn.session, turn.plan)
        if parent is None or not reply.base:
            return suffix
        stored = await self._services.cache.tokens(turn.entry, parent.number)
        return b",".join(filter(None, (stored, suffix)))


def _cut(turn: Claimed, staged: StagedTurn | None, error: UpstreamUnreachable) -> EngineReply:
    """What had come when the engine died. Raises `error` if there is nothing, and where the client has got some of it
    live: it would get no more, so it gets the error, and its retry goes on."""
    live = turn.flight.waiter.live
    has_begun = live is not None and live.begun
    answer = None if staged is None or has_begun else staged.cut()
    if answer is None:
        raise error
    return answer
