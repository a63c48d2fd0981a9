"""Sessions that capture text alone: a vendor's API, or an engine without ids, behind TURNLOG_TEXT_UPSTREAMS.

    create      `capture: "text"` names an upstream   (`Services.text_upstreams`)
    a turn      has a path of its own (`TurnPath`): no gate, placement, staging or control of engines takes part in it

Such turns are in the log as others are, without ids (`TurnCommitted.is_text`), and in no row with tokens: the kernel
knows both, so that sessions stay readable where this feature is off. Their turns are then 503 `no_upstream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from app import crash_points
from app.domain.request import ChatRequest, join_object
from app.errors import GenerationFailed, UpstreamUnauthorized, UpstreamUnreachable
from app.fleet.engines import UNUSABLE, failure, require_status
from app.turn.engine_call import EngineCalls, body_of
from app.turn.in_flight import Claimed, EngineCall, Generated, TurnStage
from app.turn.points import TurnPoints
from app.turn.turns import TurnPath
from app.upstream import headers as http_headers
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.http import NotSent
from app.upstream.text_upstreams import SHORT_KEY, TextUpstream
from workers.reply import Job, ValidatedReply

if TYPE_CHECKING:
    from app.services import Services

ROUTES = {"chat": "/chat/completions", "completions": "/completions"}
"""Below an upstream's base URL."""

HIDDEN = b"(hidden)"
"""In place of an upstream's key, where its answer repeats that."""


def add_to(services: Services) -> TextCalls | None:
    upstreams = services.settings.text_upstreams
    if not upstreams:
        return None
    calls = TextCalls(services, upstreams)
    services.turns.paths["text"] = TurnPath(TurnPoints(), calls)
    services.text_upstreams.update({upstream.name: upstream.model for upstream in upstreams})
    return calls


class TextCalls(EngineCalls):
    """The generations of sessions without ids: the client's parameters and messages as they are, to the one upstream of
    the session, with its own key. No engine is asked, and none of what engines are told goes there."""

    def __init__(self, services: Services, upstreams: Sequence[TextUpstream]) -> None:
        super().__init__(
            points=services.points,
            settings=services.settings,
            clock=services.clock,
            cache=services.cache,
            fleet=services.fleet,
            engines=services.engines,
            native=services.native,
            placement=services.placement,
            token_in=services.token_in,
            validator=services.validator,
            large_bodies=services.large_bodies,
            proofs=services.proofs,
        )
        self._client = services.client
        self._replays_experts = self._takes_rid = False
        self._names_engine_sessions = True  # All parameters are those of `_other_params`.
        self._upstreams = {upstream.name: upstream for upstream in upstreams}

    def _other_params(self, turn: Claimed) -> bytes:
        """The client's alone."""
        return join_object({name: bytes(raw) for name, raw in turn.request.params.items()})

    async def generate(self, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Raises TurnCancelled, UpstreamUnreachable, UpstreamTimeout, UpstreamInvalid, UpstreamUnauthorized, and as
        `ReplyValidator.by_all_rules`."""
        upstream = self._upstreams[turn.session.config.upstream or ""]
        with turn.flight.cancellable():
            answer = turn.answer = await self._asked(turn, call, upstream)
        if answer.status != 200:
            return answer
        turn.received = answer.body
        try:
            reply = await self._validated(turn, call, answer)
        except GenerationFailed as failed:
            answer.status, answer.body = failed.told_status, Body([failed.told])
            if upstream.key is not None:
                _hide(answer, upstream.key)  # a short one too, now that it is an error
            return answer
        if crash_points.ARMED:
            crash_points.reach("after_judged")
        return Generated(answer, reply)

    async def _asked(self, turn: Claimed, call: EngineCall, upstream: TextUpstream) -> EngineReply:
        """The upstream's answer, without its key. Raises as `generate`."""
        stages = turn.flight.stages
        if crash_points.ARMED:
            crash_points.reach("before_engine")
        body = await self._large_bodies.run(turn.large, partial(body_of, call))
        url, headers = upstream.url + ROUTES[call.shape], http_headers.to_vendor(upstream.key)
        stages.marks.append((TurnStage.ENGINE, stages.clock()))
        try:
            answer = await self._client.post(url, body, headers, turn.flight.waiter.grow)
        except NotSent as error:
            raise UpstreamUnreachable(f"cannot connect to {upstream.name}: {error}") from error
        except UNUSABLE as error:
            raise failure(upstream.name, error) from error
        stages.marks.append((TurnStage.VALIDATE, stages.clock()))
        if crash_points.ARMED:
            crash_points.reach("after_engine")
        require_status(upstream.name, answer.status)
        if answer.status == 401:
            raise UpstreamUnauthorized(f"{upstream.name} refused the key that TURNLOG_TEXT_UPSTREAMS has for it")
        answer.headers, answer.engine = http_headers.from_vendor(answer.headers), upstream.name
        if upstream.key is not None:
            _hide(answer, upstream.key)
        return answer

    async def _validated(self, turn: Claimed, call: EngineCall, answer: EngineReply) -> ValidatedReply:
        """As `ReplyValidator.validate`, of a reply that need not have ids."""
        new = list(call.stored)
        work = Job(
            dialect="openai",
            known=None,
            payload_specs=[],
            messages=new,
            headers=answer.headers,
            status=answer.status,
            rid="",
            own=b"",
            protocol=call.shape,
            beginning=turn.request.beginning or b"",
        )
        read = await self._validator.by_all_rules(work, answer, sum(map(len, new)), None)
        self._validator.add_hashes(turn, answer.engine, read.reply)
        return read.reply

    async def finish(self, turn: Claimed, call: EngineCall, generated: Generated) -> None:
        """There are no tokens that could drift."""
        reply = generated.reply
        if reply.calls and isinstance(turn.request, ChatRequest):
            generated.given_ids = await self._large_bodies.run(turn.large, lambda: self._given_ids(turn, reply))


def _hide(answer: EngineReply, key: str) -> None:
    """Proxies and debugging upstreams repeat a request's headers. A short key (`EMPTY`, `ollama`) may be a word of the
    reply, and is hidden in the body of an error alone."""
    is_word = len(key) < SHORT_KEY
    if is_word and answer.status == 200:
        return
    body, secret = answer.body.joined(), key.encode()
    if secret in body:
        answer.body = Body([body.replace(secret, HIDDEN)])
    if is_word:
        return
    answer.headers = [(name, value.replace(key, HIDDEN.decode())) for name, value in answer.headers]
