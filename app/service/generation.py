"""From a claim to a sound reply: the prompt, the engine, the judgement, and again where an engine was interrupted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import CompletionRequest
from app.errors import TokenPrefixMismatch, UpstreamInvalid
from app.service.asking import Ask, Outgoing, Prompt, first_ask, outgoing
from app.service.cache import SessionCache
from app.service.claims import RID_CHARACTERS, RID_MARK, Arrival, Opening, Request
from app.service.flights import Flight, Reader
from app.service.gates import Gates
from app.service.judge import Judge, Judged
from app.service.placement import Place, Placement
from app.service.sessions import Clock
from app.service.token_in import Template, TokenIn
from app.settings import Settings
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.engines import Answer, Engines
from app.upstream.headers import Headers
from workers import codec
from workers.codec import Facts


class Taken(msgspec.Struct):
    """A turn that holds its claim, and for whom it works. `received` is the last reply that is being judged.

    `ticket` is its place where turns wait for a gate.
    """

    flight: Flight
    opening: Opening
    request: Request
    template: Template | None
    incoming: Arrival
    client: Headers
    reader: Reader
    ticket: int
    received: Body | None = None


class Generated(msgspec.Struct, frozen=True):
    """A sound reply, and what was sent for it."""

    judged: Judged
    body: Body
    headers: Headers
    sending: Outgoing
    new: Sequence[bytes]
    prompt: Prompt | None
    ask: Ask
    place: Place


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
        cache: SessionCache,
        engines: Engines,
        placement: Placement,
        gates: Gates,
        judge: Judge,
        token_in: TokenIn,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._engines = engines
        self._placement = placement
        self._gates = gates
        self._judge = judge
        self._token_in = token_in
        self._settings = settings
        self._clock = clock

    async def generate(self, taken: Taken) -> Generated | EngineRefusal:
        """Raises Cut, and AppError as the engine, the judge and the prompt's makers do."""
        opening, incoming, request = taken.opening, taken.incoming, taken.request
        requested_at = self._clock()
        sending = outgoing(opening.session, request, self._settings)
        stored = await self._stored_messages(opening)
        new = incoming.new(opening.plan)
        with taken.flight.may_be_cut():
            prompt = await self._prompt(taken, sending)
            text = request.text if isinstance(request, CompletionRequest) else None

            def body(ask: Ask) -> bytes:
                return sending.body(ask, [*stored, *new], text, prompt)

            if self._gates.is_shut(opening.event.adapter):
                await self._gates.wait(opening.event.adapter, taken.ticket)
            place = await self._placement.place(opening)
            ask, answer = await self._ask(taken, place, prompt, body)
        reply = msgspec.structs.replace(answer.reply, headers=http_headers.to_client(answer.reply.headers))
        if reply.status != 200:
            return EngineRefusal(reply.status, reply.headers, reply.body)
        taken.received = reply.body
        _require_own(reply.body, opening.rid)
        judged = await self._judge.judge(
            opening, incoming, new, msgspec.structs.replace(answer, reply=reply), requested_at, ask, prompt
        )
        reach("after_judged")
        await self._require_no_drift(opening, judged, prompt)
        return Generated(judged, reply.body, reply.headers, sending, new, prompt, ask, place)

    async def _stored_messages(self, opening: Opening) -> list[bytes]:
        if opening.plan.base_messages == 0 or opening.event.protocol != "chat":
            return []
        return [await self._cache.messages(opening.live, opening.plan.parent)]

    async def _prompt(self, taken: Taken, sending: Outgoing) -> Prompt | None:
        """The ids to send, if any: the client's own, or those of a chat where there is a tokenizer."""
        if taken.request.ids is not None:
            return await self._token_in.given(taken.opening, taken.request.ids)
        if taken.template is None or not isinstance(taken.incoming, Incoming):
            return None
        return await self._token_in.built(taken.opening, taken.template, taken.incoming, sending)

    async def _ask(
        self, taken: Taken, place: Place, prompt: Prompt | None, body: Callable[[Ask], bytes]
    ) -> tuple[Ask, Answer]:
        """What was asked in the end, and which engine answered how. Raises as `Engines.generate`."""
        opening, grow = taken.opening, taken.reader.grow
        session_id, protocol = opening.session.session_id, opening.event.protocol
        headers = http_headers.to_engine(taken.client, session_id, self._settings.upstream_api_key)
        ask = first_ask(opening, taken.request, prompt, self._settings)
        taken.flight.asked = True
        reach("before_engine")
        answer = await self._engines.generate(place.order, protocol, body(ask), headers, grow)
        reach("after_engine")
        if answer.reply.status == 400 and ask.own:
            # A prompt that drifted may be shorter than the row asked for, which engines refuse.
            ask = msgspec.structs.replace(ask, own=b"", first_row=0)
            answer = await self._engines.generate(place.order, protocol, body(ask), headers, grow)
        return ask, answer

    async def _require_no_drift(self, opening: Opening, judged: Judged, prompt: Prompt | None) -> None:
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


def _require_own(body: Body, rid: str) -> None:
    """Raises UpstreamInvalid for a reply to another of our requests, which an engine sent on this one's connection."""
    found = _REPLY_ID.search(body.beginning(_REPLY_ID_WITHIN))
    if found is not None and found[1] != rid.encode():
        raise UpstreamInvalid("the reply is that of another request")
