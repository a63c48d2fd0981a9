"""From a claim to a sound reply: the prompt, the engine, the judgement, and again where an engine was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import CompletionRequest
from app.domain.rids import RID_CHARACTERS, RID_MARK
from app.errors import GenerationAborted, TokenPrefixMismatch, UpstreamInvalid
from app.fleet.engines import Answer, Engines
from app.fleet.gates import Closings, Gates
from app.sessions.cache import SessionCache, id_text
from app.sessions.lifecycle import Clock
from app.settings import Settings
from app.turn.claims import ClaimedTurn, Request, RequestHistory
from app.turn.continuation import Generation, Unfinished, can_go_on
from app.turn.engine_request import EngineRequest, EngineRequestOptions, Prompt, engine_request, options_for
from app.turn.in_flight import InFlightTurn, Waiter
from app.turn.large_bodies import LargeBodies
from app.turn.placement import EngineChoice, Placement
from app.turn.session_control import ControlledTurn
from app.turn.stages import Stages, TurnStage
from app.turn.token_in import Template, TokenIn
from app.turn.validation import ReplyValidator, ValidatedReply
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import Withheld
from app.upstream.headers import Headers
from workers import codec
from workers.codec import Facts
from workers.parse_parts import UNKNOWN_VERSION

log = logging.getLogger("turnlog.generation")

FIRST_PAUSE_S = 0.1
"""Before an interrupted generation is sent again that was ended at once though no gate is shut; doubled each time."""

EMPTY_TRIES = 5
"""How often in a row that is done: three seconds in all."""


class TurnContext(msgspec.Struct):
    """A turn that holds its claim, and for whom it works. `received` is the last reply that is being judged.

    `stages` is what it does now, `ticket` its place where turns wait for a gate, `passed` the gates as they were when
    it was last sent, `control` what its client asks of the engine beside it. `large` is the size of a request
    that is not put together on the loop, else 0.
    """

    flight: InFlightTurn
    opening: ClaimedTurn
    request: Request
    template: Template | None
    incoming: RequestHistory
    client: Headers
    reader: Waiter
    stages: Stages
    ticket: int
    control: ControlledTurn | None = None
    large: int = 0
    received: Body | None = None
    passed: Closings = (0, 0)


class GeneratedTurn(msgspec.Struct, frozen=True):
    """A sound reply, and what was sent for it."""

    judged: ValidatedReply
    body: Body
    headers: Headers
    sending: EngineRequest
    new: Sequence[bytes]
    prompt: Prompt | None
    ask: EngineRequestOptions
    place: EngineChoice


class EngineRefusal(msgspec.Struct, frozen=True):
    """An engine's own error, which passes to the client."""

    status: int
    headers: Headers
    body: Body


class Generator:
    """`clock` gives seconds since the epoch."""

    def __init__(
        self,
        *,
        large_bodies: LargeBodies,
        cache: SessionCache,
        engines: Engines,
        placement: Placement,
        gates: Gates,
        judge: ReplyValidator,
        token_in: TokenIn,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._large_bodies = large_bodies
        self._cache = cache
        self._engines = engines
        self._placement = placement
        self._gates = gates
        self._judge = judge
        self._token_in = token_in
        self._settings = settings
        self._clock = clock
        self._told: set[str] = set()

    async def generate(self, taken: TurnContext) -> GeneratedTurn | EngineRefusal:
        """Raises Cut, and AppError as the engine, the judge and the prompt's makers do."""
        opening, request = taken.opening, taken.request
        requested_at = self._clock()
        adapter = opening.event.adapter
        dialect = self._engines.dialect
        sending = await self._large_bodies.run(
            taken.large, lambda: engine_request(opening.session, request, self._settings, adapter, dialect)
        )
        stored = await self._stored_messages(opening)
        new = await self._large_bodies.run(taken.large, lambda: taken.incoming.new(opening.plan))
        with taken.flight.may_be_cut():
            prompt = await self._prompt(taken, sending)
            text = request.text if isinstance(request, CompletionRequest) else None

            def body(ask: EngineRequestOptions) -> bytes:
                return sending.body(ask, [*stored, *new], text, prompt)

            await self._pass_gates(taken)
            place = await self._placement.place(opening)
            if taken.control is not None:
                place = await taken.control.place(place)
            ask, answer = await self._ask(taken, place, prompt, body)
        one = await self._judged(taken, answer, new, requested_at, ask, prompt)
        if isinstance(one, EngineRefusal):
            return one
        made = GeneratedTurn(
            one.judged, one.answer.reply.body, one.answer.reply.headers, sending, new, prompt, ask, place
        )
        if one.judged.reply.finish_reason == "abort":
            found = await self._after_abort(taken, made, one, [*stored, *new], requested_at)
            if isinstance(found, EngineRefusal):
                return found
            made = found
        await self._require_no_drift(opening, made.judged, prompt)
        return made

    async def _judged(
        self,
        taken: TurnContext,
        answer: Answer,
        new: Sequence[bytes],
        requested_at: float,
        ask: EngineRequestOptions,
        prompt: Prompt | None,
    ) -> Generation | EngineRefusal:
        """One generation, if it is sound. Raises as `Judge.judge`."""
        opening = taken.opening
        reply = msgspec.structs.replace(answer.reply, headers=http_headers.to_client(answer.reply.headers))
        if reply.status != 200:
            return EngineRefusal(reply.status, reply.headers, reply.body)
        taken.received = reply.body
        _require_own(reply.body, opening.rid)
        answer = msgspec.structs.replace(answer, reply=reply)
        judged = await self._judge.judge(opening, taken.incoming, new, answer, requested_at, ask, prompt)
        reach("after_judged")
        self._engines.seen(answer.engine, _own_version(answer, judged), answer.known, judged.reply.dialect)
        return Generation(answer, judged)

    async def _after_abort(
        self,
        taken: TurnContext,
        made: GeneratedTurn,
        first: Generation,
        messages: Sequence[bytes],
        requested_at: float,
    ) -> GeneratedTurn | EngineRefusal:
        """What becomes of a generation that an engine ended, by the session's policy.

        It goes on only if a gate was shut since it passed them: a driver that has enough samples ends the others for
        good. `messages` are those that were sent. Raises GenerationAborted, and as `generate`.
        """
        opening, request = taken.opening, taken.request
        policy = opening.session.config.on_abort or self._settings.abort_policy
        if policy == "fail":
            raise GenerationAborted(f"{first.answer.engine} ended the generation before its time")
        if policy == "return" or not await self._gates.shut_since(opening.event.adapter, taken.passed):
            return made
        if not can_go_on(request, first.judged):
            if first.answer.engine not in self._told:
                self._told.add(first.answer.engine)
                log.warning("%s aborted a generation that cannot be continued: docs/fleet.md", first.answer.engine)
            return made
        ids = made.prompt.text if made.prompt is not None else await self._reported_ids(opening, first.judged)
        unfinished = Unfinished(request, self._settings, ids, made.ask, first)
        place = await self._go_on(taken, made, unfinished, messages)
        if isinstance(place, EngineRefusal):
            return place
        answer = await unfinished.joined()
        taken.reader.grow(len(answer.reply.body))
        taken.received = answer.reply.body
        judged = await self._judge.judge(opening, taken.incoming, made.new, answer, requested_at, made.ask, made.prompt)
        reply = msgspec.structs.replace(judged.reply, parts=unfinished.parts(), weight_versions=unfinished.versions())
        judged = msgspec.structs.replace(judged, reply=reply)
        body, headers = answer.reply.body, answer.reply.headers
        return msgspec.structs.replace(made, judged=judged, body=body, headers=headers, place=place)

    async def _go_on(
        self, taken: TurnContext, made: GeneratedTurn, unfinished: Unfinished, messages: Sequence[bytes]
    ) -> EngineChoice | EngineRefusal:
        """Generate what is left behind each gate, until it is whole, or was ended for good; where it was at last.

        An engine may still be ending generations when the gate is open again: one of no tokens is tried again, after
        a while, and not for ever. All parts have the turn's rid, by which they can be aborted: SGLang forgets a
        request before it answers it. Raises Cut, and as `generate`.
        """
        opening, adapter = taken.opening, taken.opening.event.adapter
        misses, place = 0, made.place
        while not unfinished.is_over:
            sending, prompt, ask = unfinished.sending(made.sending), unfinished.prompt(), unfinished.ask()
            taken.stages.enter(TurnStage.GATE)
            with taken.flight.may_be_cut():
                if misses:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (misses - 1))
                await self._gates.wait(adapter, taken.ticket)
                taken.stages.enter(TurnStage.PREPARE)
                await self._require_still_open(opening)
                place = await self._place_again(opening, place, unfinished.newest.answer.engine)
                answer = await self._sent(taken, place, sending.body(ask, messages, None, prompt), ask.rid)
            one = await self._judged(taken, answer, (), made.judged.reply.requested_at, ask, prompt)
            if isinstance(one, EngineRefusal):
                return one
            await unfinished.add(one)
            if await self._gates.shut_since(adapter, taken.passed):
                misses = 0
            elif misses == EMPTY_TRIES or one.judged.reply.output_tokens:
                break
            else:
                misses += 1
        return place

    async def _place_again(self, opening: ClaimedTurn, place: EngineChoice, engine: str) -> EngineChoice:
        """The engine that has the tokens so far in its cache comes first, if it may still get turns.

        Raises as `Placement.place`.
        """
        order = self._engines.order(opening.session.session_id, engine)
        if place.control is not None:
            return msgspec.structs.replace(place, order=order)
        again = await self._placement.place(opening)
        return msgspec.structs.replace(again, order=order, away=again.away or place.away)

    async def _require_still_open(self, opening: ClaimedTurn) -> None:
        """Raises SessionClosed: another process may have closed the session while this turn waited at a gate."""
        session_id = opening.session.session_id
        live = await self._cache.current(session_id)
        decide.require_open(live.session if live else None, session_id)

    async def _reported_ids(self, opening: ClaimedTurn, judged: ValidatedReply) -> bytes:
        """The prompt's ids as text, where the engine made them itself. Raises SessionUnreadable."""
        suffix = id_text(codec.unpack(judged.facts, Facts).suffix_ids)
        parent = decide.token_parent(opening.session, opening.plan)
        if parent is None or not judged.reply.base:
            return suffix
        stored = await self._cache.tokens(opening.live, parent.number)
        return b",".join(filter(None, (stored, suffix)))

    async def _stored_messages(self, opening: ClaimedTurn) -> list[bytes]:
        if opening.plan.base_messages == 0 or opening.event.protocol != "chat":
            return []
        return [await self._cache.messages(opening.live, opening.plan.parent)]

    async def _prompt(self, taken: TurnContext, sending: EngineRequest) -> Prompt | None:
        """The ids to send, if any: the client's own, or those of a chat where there is a tokenizer."""
        if taken.request.ids is not None:
            return await self._token_in.given(taken.opening, taken.request.ids)
        if taken.template is None or not isinstance(taken.incoming, Incoming):
            return None
        return await self._token_in.built(taken.opening, taken.template, taken.incoming, sending)

    async def _ask(
        self,
        taken: TurnContext,
        place: EngineChoice,
        prompt: Prompt | None,
        body: Callable[[EngineRequestOptions], bytes],
    ) -> tuple[EngineRequestOptions, Answer]:
        """What was asked in the end, and which engine answered how. Raises as `Engines.generate`."""
        ask = options_for(taken.opening, taken.request, prompt, self._settings)
        answer = await self._sent(taken, place, await self._large_bodies.run(taken.large, lambda: body(ask)), ask.rid)
        if answer.reply.status == 400 and ask.own:
            # A prompt that drifted may be shorter than the row asked for, which engines refuse.
            ask = msgspec.structs.replace(ask, own=b"", first_row=0)
            answer = await self._sent(
                taken, place, await self._large_bodies.run(taken.large, lambda: body(ask)), ask.rid
            )
        return ask, answer

    async def _sent(self, taken: TurnContext, place: EngineChoice, body: bytes, rid: str) -> Answer:
        opening, event = taken.opening, taken.opening.event
        headers = http_headers.to_engine(taken.client, opening.session.session_id, self._settings.upstream_api_key)
        prepare = None if place.control is None else place.control.prepare

        def may_send() -> bool:
            may = self._gates.may_pass(event.adapter)
            if may:
                taken.flight.asked = True
                taken.passed = self._gates.closings(event.adapter)
            return may

        reach("before_engine")
        while True:
            await self._pass_gates(taken)
            taken.stages.enter(TurnStage.ENGINE)
            try:
                answer = await self._engines.generate(
                    place.order,
                    event.protocol,
                    body,
                    headers,
                    taken.reader.grow,
                    rid=rid,
                    version=self._gates.version(event.adapter),
                    prepare=prepare,
                    may_send=may_send,
                )
            except Withheld:
                continue
            taken.stages.enter(TurnStage.VALIDATE)
            reach("after_engine")
            return answer

    async def _pass_gates(self, taken: TurnContext) -> None:
        """As long as no engine was asked, nobody waits here for a client that is gone.

        Raises as `Gates.wait`, SessionClosed.
        """
        adapter = taken.opening.event.adapter
        if not self._gates.may_pass(adapter):
            with contextlib.nullcontext() if taken.flight.asked else taken.flight.held():
                taken.stages.enter(TurnStage.GATE)
                await self._gates.wait(adapter, taken.ticket)
                taken.stages.enter(TurnStage.PREPARE)
            await self._require_still_open(taken.opening)

    async def _require_no_drift(self, opening: ClaimedTurn, judged: ValidatedReply, prompt: Prompt | None) -> None:
        """Raises TokenPrefixMismatch where the prompt does not continue the stored tokens but should.

        It should where it was built on them, and where the session rejects drift.
        """
        parent = decide.token_parent(opening.session, opening.plan)
        if parent is None or judged.reply.base:
            return
        if opening.session.config.on_drift != "reject" and not (prompt is not None and prompt.extends):
            return
        at = await self._token_in.first_difference(
            opening, parent, lambda: memoryview(codec.unpack(judged.facts, Facts).suffix_ids).cast("i")
        )
        raise TokenPrefixMismatch(
            f"the prompt's {judged.reply.suffix_tokens} tokens do not continue the {parent.token_count} stored ones: "
            f"they differ at position {at}"
        )


_REPLY_ID = re.compile(rb'"id"\s*:\s*"(%b[0-9a-f]{%d})"' % (RID_MARK.encode(), RID_CHARACTERS))
_REPLY_ID_WITHIN = 512
"""SGLang begins a reply with its id, which is the request's `rid`."""


def _own_version(answer: Answer, judged: ValidatedReply) -> str | None:
    """The weight version that the engine told at the end, if it is another than what the turn was stamped with."""
    spans = judged.reply.weight_versions
    return spans[-1].version if spans and spans[-1].version not in (UNKNOWN_VERSION, answer.dispatched) else None


def _require_own(body: Body, rid: str) -> None:
    """Raises UpstreamInvalid for a reply to another of our requests, which an engine sent on this one's connection."""
    found = _REPLY_ID.search(body.beginning(_REPLY_ID_WITHIN))
    if found is not None and found[1] != rid.encode():
        raise UpstreamInvalid("the reply is that of another request")
