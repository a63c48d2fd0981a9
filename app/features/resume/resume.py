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
from app.turn.in_flight import InFlightTurn, TurnStage
from app.turn.points import Generate
from app.upstream.client import EngineReply
from app.upstream.streams import STREAM
from workers import codec
from workers.reply import ValidatedReply

if TYPE_CHECKING:
    from app.features.gates import Paused
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
        paused: Paused | None = services.features.get("gates")
        self._gates = None if paused is None else paused.gates

    async def around(self, generate: Generate, turn: InFlightTurn) -> None:
        """Generate the turn, with whatever goes on from earlier tokens. Raises as `generate`, GenerationAborted."""
        services = self._services
        if self._staging.is_on:
            turn.staged = staged = self._staging.begin(turn, services.engines.dialect)
            if staged is not None:
                await self._staged(turn, staged)
                return
        await generate(turn)
        if turn.reply is not None and turn.reply.finish_reason == "abort":
            await self._ended_early(turn, GeneratedPart(turn.answer, turn.reply))

    def on_abort(self, turn: InFlightTurn) -> OnAbort:
        return turn.session.config.on_abort or self._services.settings.abort_policy

    async def _was_shut(self, turn: InFlightTurn) -> bool:
        """Was a gate shut since the turn's request was sent? Raises StoreUnavailable."""
        return self._gates is not None and await self._gates.was_shut(turn)

    # a turn that is staged

    async def _staged(self, turn: InFlightTurn, staged: StagedTurn) -> None:
        turn.call.stream, turn.call.wants_native = STREAM, staged.is_native
        try:
            if not await self._restored(turn, staged):
                await self._generated(turn, staged)
        except (UpstreamUnreachable, UpstreamTimeout):
            if turn.staged is not None:
                await staged.end_part()
            raise
        finally:
            await staged.settled()

    async def _generated(self, turn: InFlightTurn, staged: StagedTurn) -> None:
        """As the plain generation; what had come of it when its engine died is continued elsewhere."""
        call, is_cut = turn.call, False
        with turn.cancellable():
            await self._calls.place(turn)
            try:
                answer = await self._calls.ask(turn)
            except UpstreamUnreachable as error:
                answer, is_cut = self._cut(turn, error), True
            if staged.is_native and not call.is_native:
                staged.counters.turns["not_staged"] += 1
                turn.staged = None
            elif not is_cut and staged.has_ended:
                answer = await self._as_chat(turn, answer)
        turn.reply = await self._calls.validate(turn, call, answer, turn.stored)
        if turn.reply is not None and turn.reply.finish_reason == "abort":
            await self._ended_early(turn, GeneratedPart(turn.answer, turn.reply, is_cut))

    def _cut(self, turn: InFlightTurn, error: UpstreamUnreachable) -> EngineReply:
        """What had come when the engine died. Raises `error` if there is nothing, and where the client has got some of
        it live: it would get no more, so it gets the error, and its retry goes on."""
        has_begun = turn.live is not None and turn.live.begun
        answer = None if turn.staged is None or has_begun else turn.staged.cut()
        if answer is None:
            raise error
        return answer

    async def _restored(self, turn: InFlightTurn, staged: StagedTurn) -> bool:
        """Go on from what an earlier turn with the same request has staged; False if there is nothing to go on from."""
        answers = await staged.restore()
        if not answers:
            return False
        try:
            first, *rest = answers
            reply = await self._calls.validate_body(turn, turn.call, first, turn.stored)
            ids = turn.prompt.text if turn.prompt is not None else await self._reported_ids(turn, reply)
            part = GeneratedPart(first, reply, is_cut=True)
            continuation = Continuation(turn.request, self._services.settings, ids, turn.call, part)
            for answer in rest:
                reply = await self._calls.validate_body(turn, continuation.next_call(), answer, ())
                await continuation.add(GeneratedPart(answer, reply, is_cut=True))
        except (UpstreamInvalid, TokenPrefixMismatch) as error:
            turn.received = None
            await staged.drop(str(error))
            return False
        staged.restored(continuation.tokens)
        with turn.cancellable():
            await self._calls.place(turn)
        turn.answer, turn.reply = continuation.first.answer, continuation.first.reply
        try:
            await self._continued(turn, continuation)
        except TakesNoIds as engine:
            await staged.drop(f"{engine} takes no token ids")
            turn.reply = None
            return False
        return True

    # a generation that an engine ended early

    async def _ended_early(self, turn: InFlightTurn, first: GeneratedPart) -> None:
        """Handle a generation that an engine ended early, by the session's policy, or that it could not end."""
        try:
            is_whole = not await self._after_abort(turn, first)
        except TakesNoIds as engine:
            raise UpstreamUnreachable(f"{first.answer.engine} died, and {engine} takes no token ids") from engine
        if is_whole and first.answer.is_native:
            answer = await self._as_chat(turn, first.answer)
            turn.answer, turn.reply = answer, await self._calls.validate_body(turn, turn.call, answer, turn.stored)

    async def _after_abort(self, turn: InFlightTurn, first: GeneratedPart) -> bool:
        """Was the turn continued? An aborted generation is only if a gate was shut since it was sent: a driver that has
        enough samples ends the others for good. Raises GenerationAborted, TakesNoIds for one that is cut."""
        services, policy = self._services, self.on_abort(turn)
        if not first.is_cut:
            if _is_late(turn):
                return False
            if policy == "fail":
                raise GenerationAborted(f"{first.answer.engine} ended the generation before its time")
            if policy == "return" or not await self._was_shut(turn):
                return False
            engine, is_chat = first.answer.engine, turn.request.shape == "chat"
            if not can_continue(turn.request) or (is_chat and services.engines.takes_no_ids(engine)):
                services.engines.warn_of_aborts(engine)
                return False
        prompt = turn.call.prompt
        ids = prompt.text if prompt is not None else await self._reported_ids(turn, first.reply)
        return await self._continued(turn, Continuation(turn.request, services.settings, ids, turn.call, first))

    async def _continued(self, turn: InFlightTurn, continuation: Continuation) -> bool:
        """Generate the rest of the turn; False if nothing was added to its first part. Raises as `_continue`."""
        if not await self._continue(turn, continuation):
            return True
        if continuation.newest is continuation.first and not continuation.is_complete:
            return False
        answer = await self._as_chat(turn, await continuation.join())
        turn.waiter.grow(answer.body.size)
        reply = await self._calls.validate_body(turn, turn.call, answer, turn.stored)
        turn.answer = answer
        turn.reply = msgspec.structs.replace(
            reply,
            parts=continuation.parts(),
            weight_versions=continuation.versions(),
            speculative=continuation.speculative(),
        )
        return True

    async def _continue(self, turn: InFlightTurn, continuation: Continuation) -> bool:
        """Continue the generation after each pause, until it is complete or ended for good; False if an engine refused
        with an error of its own, which is the turn's answer then.

        An engine may still be ending generations when the gate has opened. A part without tokens is retried after a
        pause, a limited number of times, and so is one whose engine has died. All parts use the turn's rid, so that
        they can be aborted: SGLang forgets a request before it answers it. Raises TurnCancelled, TakesNoIds where the
        last part was cut, and as `EngineCalls.generate`.
        """
        misses = 0
        while not continuation.is_complete:
            if turn.staged is not None:
                await turn.staged.end_part()
            try:
                part = await self._rest(turn, continuation, misses)
            except UpstreamUnreachable:
                if turn.staged is None or misses == EMPTY_TRIES:
                    raise
                misses += 1
                continue
            except TakesNoIds as engine:
                if continuation.newest.is_cut:
                    raise
                self._services.engines.warn_of_aborts(str(engine))
                break
            if part is None:
                return False
            await continuation.add(part)
            if _is_late(turn):
                break
            if part.is_cut or await self._was_shut(turn):
                misses = 0
            elif misses == EMPTY_TRIES or part.reply.output_tokens:
                break
            else:
                misses += 1
        return True

    async def _rest(self, turn: InFlightTurn, continuation: Continuation, misses: int) -> GeneratedPart | None:
        """The next part, or what has come of it until its engine died; None for an engine's own error. `misses` were in
        vain before it."""
        call, stages, is_cut = continuation.next_call(), turn.stages, False
        stages.marks.append((TurnStage.GATE, stages.clock()))
        with turn.cancellable():
            if misses:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (misses - 1))
            for gate in self._services.points.before_engine:
                if (wait := gate(turn)) is not None:
                    await wait(turn)
            stages.marks.append((TurnStage.PREPARE, stages.clock()))
            await self._calls.require_still_open(turn)
            await self._place_again(turn, continuation.newest.answer.engine)
            try:
                answer = await self._calls.send(turn, call)
            except UpstreamUnreachable as error:
                answer, is_cut = self._cut(turn, error), True
        reply = await self._calls.validate(turn, call, answer, ())
        if reply is None:
            turn.reply = None
            return None
        return GeneratedPart(turn.answer, reply, is_cut)

    async def _place_again(self, turn: InFlightTurn, engine: str) -> None:
        """Prefer the engine that has the tokens so far in its cache, if it still accepts turns.

        Raises as `Placement.place`.
        """
        services, away = self._services, turn.away
        order = services.engines.order(turn.session_id, engine)
        if turn.control is None:
            await services.placement.place(turn)
            turn.away = turn.away or away
        turn.order = order

    async def _as_chat(self, turn: InFlightTurn, answer: EngineReply) -> EngineReply:
        """The answer as a chat's, if it is not one. Raises as `NativeRoutes.chat`."""
        call, params = turn.call, turn.request.params
        if not answer.is_native or call.prompt is None:
            return answer
        offers = value_of(params.get("tool_choice"), "tool_choice") != "none"
        tools = call.tools if offers else None
        return await self._services.native.chat(answer, turn.session_id, params, tools, call.prompt.text)

    async def _reported_ids(self, turn: InFlightTurn, reply: ValidatedReply) -> bytes:
        """The prompt's ids as text, as reported by the engine that tokenised it. Raises SessionUnreadable."""
        suffix = id_text(codec.unpack_tokens(reply.tokens, reply.exchange).suffix_ids)
        parent = decide.token_parent(turn.session, turn.plan)
        if parent is None or not reply.base:
            return suffix
        stored = await self._services.cache.tokens(turn.entry, parent.number)
        return b",".join(filter(None, (stored, suffix)))


def _is_late(turn: InFlightTurn) -> bool:
    return turn.limit is not None and turn.limit.is_late
