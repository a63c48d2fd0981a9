"""From a claim to a validated reply: what is sent to an engine, which one, and what it answers.

prompt ─▶ gate ─▶ placement ─▶ engine ─▶ validation
            ▲                     │
            └── shut meanwhile ───┘
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from app import crash_points
from app.domain import calls, decide
from app.domain.events import GivenIds
from app.domain.fleet import Fleet
from app.domain.history import RequestHistory
from app.domain.images import ESCAPED_LETTER, IMAGE_MARK, REFERENCE_MARK, take_out
from app.domain.left_out import bounded
from app.domain.proofs import Proofs
from app.domain.request import (
    FIRST_ROW_NAMES,
    ChatRequest,
    chat_body,
    completion_body,
    hashes_of,
    join_object,
    value_of,
)
from app.domain.session import Session, engine_session_of
from app.domain.split import ITEMS
from app.errors import ClaimLost, GenerationFailed, InvalidRequest, TokenPrefixMismatch, Unsupported, UpstreamInvalid
from app.fleet.engines import Engines, OpenStream
from app.fleet.native import NativeRoutes
from app.fleet.state import FleetState
from app.sessions.cache import SessionCache, require_open
from app.settings import Settings
from app.turn.in_flight import (
    Claimed,
    EngineCall,
    EngineChoice,
    Generated,
    InFlightTurn,
    Request,
    SharedBlob,
    TurnCancelled,
    TurnStage,
)
from app.turn.large_bodies import INLINE_BYTES, LargeBodies
from app.turn.placement import Placement
from app.turn.points import TurnPoints
from app.turn.token_in import TokenIn
from app.turn.validation import ReplyValidator
from app.upstream import headers as http_headers
from app.upstream import inference
from app.upstream.body import Body
from app.upstream.client import EngineReply, Withheld
from app.upstream.dialects import (
    DialectChoice,
    clients_first_row,
    complete,
    for_adapter,
    from_row,
    logprob_wish,
    takes_rid,
    top_needed,
)
from app.upstream.generate import Fields, generate_body
from app.upstream.http import EngineError
from app.upstream.streams import IDS_STREAM, ReplyStream, limit_of
from workers import codec
from workers.reply import UNKNOWN_VERSION, ValidatedReply

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _own_members(dialect: DialectChoice, replay: Collection[str]) -> Mapping[str, msgspec.Raw]:
    """What every chat asks engines for."""
    return {name: msgspec.Raw(raw) for name, raw in complete({}, dialect, replay).items()}


class TakesNoIds(EngineError):
    """The generation cannot be continued at this engine."""


class EngineCalls:
    """Prepares, sends and validates the generations of this process's turns."""

    def __init__(
        self,
        *,
        points: TurnPoints,
        settings: Settings,
        clock: Callable[[], float],
        cache: SessionCache,
        fleet: FleetState,
        engines: Engines,
        native: NativeRoutes,
        placement: Placement,
        token_in: TokenIn,
        validator: ReplyValidator,
        large_bodies: LargeBodies,
        proofs: Proofs,
    ) -> None:
        self._points = points
        self._settings = settings
        self._clock = clock
        self._cache = cache
        self._fleet = fleet
        self._engines = engines
        self._native = native
        self._placement = placement
        self._token_in = token_in
        self._validator = validator
        self._large_bodies = large_bodies
        self._proofs = proofs
        self._dialect = settings.upstream_dialect
        self._replay: Collection[str] = settings.replay
        self._replays_experts = "routed_experts" in settings.replay
        self._names_engine_sessions = settings.engine_session_ids
        self._chat = _own_members(self._dialect, self._replay)
        self._chat_without_replay = _own_members(self._dialect, ())
        self._takes_rid = takes_rid(self._dialect)

    # what is sent

    async def prepare(self, turn: Claimed) -> EngineCall:
        """What is to be sent. Raises InvalidRequest, TokenPrefixMismatch, SessionUnreadable, TurnCancelled."""
        request, plan = turn.request, turn.plan
        if turn.large:
            call = await self._large_bodies.run(turn.large, partial(self._call, turn))
        else:
            call = self._call(turn)
        if plan.base_messages and call.shape == "chat":
            stored = await self._cache.messages(turn.entry, plan.parent)
            history = await self._sendable(turn, stored) if turn.entry.index.has_odd_calls else (stored,)
            call.messages = (*history, *call.messages)
        if request.ids is not None or turn.template is not None:
            await self._add_prompt(turn, call)
        elif turn.request.left_out:
            call.left_out = bounded(turn.request.left_out)
        if self._replays_experts and not turn.session.config.evaluation:
            self._ask_for_rows(turn, call)
        elif FIRST_ROW_NAMES[0] in request.params or FIRST_ROW_NAMES[1] in request.params:
            call.first_row = clients_first_row(request.params)
        return call

    def _call(self, turn: Claimed) -> EngineCall:
        """The request, with its new messages alone. Raises InvalidRequest."""
        request = turn.request
        new = turn.history.new(turn.plan)
        rid = turn.rid if self._takes_rid else ""
        if not isinstance(request, ChatRequest):
            wish = logprob_wish(request.params, "completions")
            params = self._other_params(turn)
            return EngineCall("completions", params, None, (), request.text, rid, wish=wish, new=new, stored=new)
        wish = None
        if turn.flight.adapter is not None or self._names_engine_sessions:
            params, wish = self._other_params(turn), logprob_wish(request.params)
        else:
            # The client's raw fields and the dialect's own members, which take their places.
            asked = request.params
            fields = {**asked, **(self._chat_without_replay if turn.session.config.evaluation else self._chat)}
            if "top_logprobs" in asked or "prompt_logprobs" in asked or "logprob_start_len" in asked:
                wish = logprob_wish(asked)
                if wish is not None:
                    if wish.top:
                        fields["top_logprobs"] = asked["top_logprobs"]
                    needed = top_needed(wish, self._dialect)
                    fields.update((name, msgspec.Raw(raw)) for name, raw in needed.items())
            if self._replays_experts and not turn.session.config.evaluation:
                for name in FIRST_ROW_NAMES:
                    fields.pop(name, None)
            params = msgspec.json.encode(fields)
        tools = request.tools
        call = EngineCall("chat", params, tools, new, None, rid, wish=wish, new=new, stored=new)
        call.tool_errors = calls.failed_results(new)
        if tools is not None or request.echo is not None:
            call.shared = _shared_blobs(turn.session, tools, request.echo)
        for message in new:
            if calls.NAME in message or IMAGE_MARK in message or REFERENCE_MARK in message or ESCAPED_LETTER in message:
                messages = call.messages = [calls.sendable(raw) for raw in new]
                call.odd_arguments = messages != new
                if call.odd_arguments:
                    told = (*request.left_out, *calls.halves_in(new, turn.plan.base_messages))
                    turn.request = msgspec.structs.replace(request, left_out=told)
                call.stored, images = _without_images(turn.session, new)
                call.shared = (*call.shared, *images)
                break
        if request.beginning is not None:
            call.messages = [*call.messages, request.beginning]
        return call

    def _other_params(self, turn: Claimed) -> bytes:
        """The parameters of a completion, of an adapter's turn, or with the name of the engine's session."""
        request, adapter = turn.request, turn.flight.adapter
        replay = () if turn.session.config.evaluation else self._replay
        fields = complete(request.params, self._dialect, replay, request.shape)
        engines = self._engines.dialect
        if adapter is not None:
            fields = for_adapter(fields, adapter, engines)
        if self._names_engine_sessions and request.shape == "chat" and engines != "vllm":
            fields["session_id"] = msgspec.json.encode(engine_session_of(turn.flight.session_id))
        return join_object(fields)

    async def _sendable(self, turn: Claimed, stored: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """Stored messages, joined by commas, as every engine takes them."""
        chain = turn.session.message_chain(turn.plan.parent)
        if not any(earlier.odd_arguments for earlier in chain):
            return (stored,)
        large = len(stored) if len(stored) > INLINE_BYTES else 0
        return await self._large_bodies.run(
            large, lambda: [calls.sendable(bytes(raw)) for raw in ITEMS.decode(b"[" + stored + b"]")]
        )

    async def _add_prompt(self, turn: Claimed, call: EngineCall) -> None:
        """The token ids to send: the client's own, or those of a chat if there is a tokenizer."""
        request, history, token_in = turn.request, turn.history, self._token_in
        left_out, prompt = list(request.left_out), None
        with turn.flight.cancellable():
            if request.ids is not None:
                prompt = await token_in.given(turn, request.ids)
            elif turn.template is not None and isinstance(history, RequestHistory):
                prompt = await token_in.built(turn, call, turn.template, history)
                if request.beginning is not None:
                    dialect = self._engines.dialect
                    prompt = await token_in.begun(turn.template, prompt, request.beginning, dialect)
                left_out += await token_in.silent(history, turn.plan.base_messages)
        call.ids = call.prompt = prompt
        call.origin = "built" if request.ids is None else "client"
        call.left_out = bounded(left_out)

    def _ask_for_rows(self, turn: Claimed, call: EngineCall) -> None:
        """Rows that the parent has are not asked for again, if the operator says that engines keep them."""
        plan = turn.plan
        if not self._settings.replay_incremental:
            return
        before = turn.session.payload(plan.parent, "routed_experts")
        starts_new = not plan.base_messages or (call.ids is not None and call.ids.known is None)
        call.first_row = 0 if before is None or starts_new else before.stop
        call.own = from_row(call.first_row, self._dialect)

    # to an engine and back

    async def generate(self, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Ask an engine and validate its reply. Raises TurnCancelled, and AppError from both."""
        flight = turn.flight
        if flight.cancel_reason is not None:
            raise TurnCancelled
        flight.task = task = asyncio.current_task()
        try:
            await self.place(turn)
            answer = await self.ask(turn, call)
        except asyncio.CancelledError:
            if flight.cancel_reason is None or task is None:
                raise
            task.uncancel()
            raise TurnCancelled from None
        finally:
            flight.task = None
            del task  # In a stream its error's traceback has this frame: it would hold itself, and the turn.
        return await self.validate(turn, call, answer, call.stored)

    async def place(self, turn: Claimed) -> None:
        """Choose the engines to try, once the gates are open. Raises as `before_engine`, NoUpstream, StoreUnavailable,
        SessionClosed, ClaimLost."""
        for gate in self._points.before_engine:
            if (wait := gate(turn.flight)) is not None:
                await self._wait_before_engine(turn, wait)
        turn.choice = await self._placement.place(turn)
        if turn.request.control is not None:
            for placing in self._points.placing:
                await placing(turn, turn.choice)

    async def ask(self, turn: Claimed, call: EngineCall) -> EngineReply:
        """Send the turn's first request; returns the engine's answer. Raises as `Engines.generate`."""
        if turn.flight.waiter.live is not None:
            for streaming in self._points.streaming:
                streaming(turn, call)
        try:
            answer = await self.send(turn, call)
        finally:
            call.push = None  # The rest of a reply that is continued is not sent live.
        if answer.status == 400 and call.own:
            # If the prompt drifted, it may be shorter than the row asked for; engines refuse that.
            call.own, call.first_row = b"", 0
            answer = await self.send(turn, call)
        return answer

    async def send(self, turn: Claimed, call: EngineCall) -> EngineReply:
        """Send one request while the gates are open; returns the engine's answer. Raises as `Engines.generate`."""
        flight, stages, choice = turn.flight, turn.flight.stages, turn.choice
        assert choice is not None
        if crash_points.ARMED:
            crash_points.reach("before_engine")
        headers = http_headers.to_engine(
            flight.headers, flight.session_id, self._settings.upstream_api_key, turn.session.config.parent
        )
        is_asked_anew = False
        while True:
            stages.marks.append((TurnStage.ENGINE, stages.clock()))
            try:
                answer = await self._engines.generate(
                    choice.order,
                    call.shape,
                    partial(self._body, turn, call, choice),
                    headers,
                    flight.waiter.grow,
                    rid=turn.rid,
                    version=None
                    if flight.adapter is None
                    else self._fleet.fleet.adapter_version(flight.run, flight.adapter),
                    may_send=partial(self._may_send, flight),
                    open_stream=_stream_of(call) if call.stream else None,
                    path=None if call.ids is None else lambda: call.path,
                )
            except Withheld:
                for gate in self._points.before_engine:
                    if (wait := gate(flight)) is not None:
                        await self._wait_before_engine(turn, wait)
                continue
            if call.is_inference and answer.status == 403 and not is_asked_anew:
                # The engine was restarted without the route, and no turn saw that; or what is before it refuses this
                # request, and would do so for ever.
                self._engines.forget_ids_field(answer.engine)
                is_asked_anew = True
                continue
            stages.marks.append((TurnStage.VALIDATE, stages.clock()))
            if crash_points.ARMED:
                crash_points.reach("after_engine")
            if call.is_inference and answer.status == 200:
                answer.body = await self._in_shape(call, answer.body)
            answer.is_native = call.is_native and answer.status == 200
            return answer

    async def _body(
        self, turn: Claimed, call: EngineCall, choice: EngineChoice, engine: str
    ) -> Sequence[bytes | memoryview]:
        """The body for this engine, in parts. Raises as `Engines.ids_field`, TakesNoIds, Unsupported."""
        if choice.control is not None:
            await choice.control.prepare(engine)
        if call.wants_native:
            if body := await self._native_body(call, engine):
                return [body]
            call.stream = b""
        if call.stream == IDS_STREAM:
            await self._choose_stream(turn, call, engine)
        call.is_inference = False
        if call.ids is not None and not call.stream and (body := await self._inference_body(turn, call, engine)):
            return [body]
        if call.shape == "completions" and bytes(turn.request.params.get("max_tokens", b"")) == b"null":
            call = msgspec.structs.replace(call, params=await self._with_limit(call, engine))
        elif call.ids is not None and call.shape == "chat":
            await self._choose_ids_field(turn, call, engine)
        if turn.large or call.prompt is not None or call.shape != "chat":
            return await self._large_bodies.run(turn.large, partial(body_of, call))
        return chat_body(call.sent_params, call.tools, call.messages, call.rid, call.own + call.stream, None)

    async def _choose_stream(self, turn: Claimed, call: EngineCall, engine: str) -> None:
        """Where this SGLang streams no ids, the reply comes whole. Raises EngineError."""
        if not (await self._native.info(engine)).streams_ids:
            call.stream = b""
            if turn.flight.waiter.live is not None:
                turn.flight.waiter.live.mode = "whole"

    async def _choose_ids_field(self, turn: Claimed, call: EngineCall, engine: str) -> None:
        """May the engine render the messages instead, if it takes no ids? Raises TakesNoIds, Unsupported."""
        call.ids_field = await self._engines.ids_field(engine, turn.request.params.get("model"))
        call.prompt = call.ids if call.ids_field is not None else None
        if call.ids_field is None and call.origin == "continued":
            raise TakesNoIds(engine)
        if call.ids_field is None and call.origin == "client":
            raise Unsupported(f"input_ids: {engine} does not accept token ids in chats; use /v1/completions")

    async def _inference_body(self, turn: Claimed, call: EngineCall, engine: str) -> bytes | None:
        """The request of vLLM's `/inference/v1/generate`; None if the engine does not take this prompt of ids there.
        Raises EngineError."""
        offer = await self._engines.offer(engine)
        if offer is None or call.ids is None:
            return None
        params: Fields = _FIELDS.decode(call.params)
        if call.shape == "completions":
            if not inference.takes(params):
                return None
            # A client of a token route gets what that route samples with, not the model's own.
            filled = offer.completion if turn.request.protocol == "completions" else {}
            body = partial(inference.completion_body, params, call.ids.text, filled, call.first_row)
        else:
            tools = None if call.tools is None or b"{" not in call.tools else call.tools
            if (rendered := inference.takes_chat(params, tools, offer)) is None:
                return None
            ids, row, messages = call.ids.text, call.first_row, call.messages if tools is not None else ()
            body = partial(_inference_chat, params, tools, ids, rendered, row, messages)
        call.is_inference, call.prompt, call.ids_field = True, call.ids, None
        return await self._large_bodies.run(turn.large, body)

    async def _in_shape(self, call: EngineCall, body: Body) -> Body:
        """The reply of `/inference/v1/generate` as the chat or the completion that the turn is."""
        if call.shape == "chat":
            return inference.as_chat(body)
        large = body.size if body.size > INLINE_BYTES else 0
        return await self._large_bodies.run(large, partial(inference.as_completion, body))

    async def _with_limit(self, call: EngineCall, engine: str) -> bytes:
        """The parameters of a completion without a limit: engines' completions have none for the rest of the model's
        context. Raises EngineError, Unsupported."""
        context = await self._engines.context(engine)
        if context is None or call.ids is None:
            raise Unsupported(f"max_tokens is missing, and {engine} does not report its model's context length")
        # A prompt that is too long is the engine's to refuse.
        rest = max(context - call.ids.text.count(b",") - 1, 1)
        fields = {name: bytes(raw) for name, raw in _FIELDS.decode(call.params).items()}
        return join_object({**fields, "max_tokens": b"%d" % rest})

    async def _native_body(self, call: EngineCall, engine: str) -> bytes | None:
        """The request of `/generate`; None if this engine would not answer it as its chat. Raises EngineError,
        TakesNoIds."""
        params: Fields = _FIELDS.decode(call.params)
        info = await self._native.info(engine)
        call.is_native = call.ids is not None and info.takes(params)
        if call.ids is None or not call.is_native:
            if call.origin == "continued":
                raise TakesNoIds(engine)
            return None
        offers = call.tools is not None and value_of(params.get("tool_choice"), "tool_choice") != "none"
        call.prompt = call.ids
        return generate_body(params, call.ids.text, call.rid, offers_tools=offers)

    def _may_send(self, flight: InFlightTurn) -> bool:
        """Ask the gates at the last moment, when a connection is ready."""
        for may_send in self._points.may_send:
            if not may_send(flight):
                return False
        flight.engine_asked = True
        return True

    async def _wait_before_engine(self, turn: Claimed, wait: Callable[[InFlightTurn], Awaitable[None]]) -> None:
        """Wait at a gate. Before an engine was asked, a turn whose clients are all gone is cancelled here.

        Raises as `Gates.wait`, SessionClosed, ClaimLost.
        """
        flight, stages = turn.flight, turn.flight.stages
        with contextlib.nullcontext() if flight.engine_asked else flight.waiting_at_gate():
            stages.marks.append((TurnStage.GATE, stages.clock()))
            await wait(flight)
            stages.marks.append((TurnStage.PREPARE, stages.clock()))
        await self.require_still_open(turn)

    async def require_still_open(self, turn: Claimed) -> None:
        """Raises SessionClosed if another process has closed the session while this turn waited at a gate, ClaimLost if
        the store was taken back to a checkpoint."""
        session_id = turn.flight.session_id
        session = require_open(await self._cache.current(session_id), session_id).session
        if not turn.may_hold_claim(session):
            raise ClaimLost(f"the claim on session {session_id} was ended while the turn waited at a gate")

    # validation

    async def validate(
        self, turn: Claimed, call: EngineCall, answer: EngineReply, new: Sequence[bytes]
    ) -> Generated | EngineReply:
        """Validate one generation. An engine's own error is passed to the client, also where it comes with a 200: it is
        returned as it is. Raises as `ReplyValidator.validate`."""
        engines = self._engines
        answer.headers = http_headers.to_client(answer.headers)
        turn.answer, turn.generated = answer, None
        if answer.status != 200:
            return answer
        engine = engines.known(answer.engine)
        named = engine.rid_in(answer.body)
        if named not in (None, turn.rid):
            raise UpstreamInvalid("the reply belongs to another request")
        turn.received = answer.body
        try:
            reply = await self._validator.validate(turn, call, answer, new)
        except TokenPrefixMismatch:
            # The engine may have been restarted with other settings since it was asked whether it takes ids.
            engines.forget_ids_field(answer.engine)
            raise
        except GenerationFailed as failed:
            answer.status, answer.body = failed.told_status, Body([failed.told])
            return answer
        if named is None and engine.lacks_id(answer.body):
            raise UpstreamInvalid(
                "the reply has no id, although this engine gives ids: it may belong to another request"
            )
        if crash_points.ARMED:
            crash_points.reach("after_judged")
        spans = reply.weight_versions
        version = spans[-1].version if spans else UNKNOWN_VERSION
        reported = None if version in (UNKNOWN_VERSION, answer.dispatched) else version
        engines.seen(answer.engine, reported, answer.known, reply.dialect)
        turn.generated = generated = Generated(answer, reply)
        return generated

    async def validate_body(
        self, turn: Claimed, call: EngineCall, answer: EngineReply, new: Sequence[bytes]
    ) -> ValidatedReply:
        """As `validate`, of a reply that comes from no engine as it is: joined, or staged."""
        turn.received = answer.body
        try:
            return await self._validator.validate(turn, call, answer, new)
        except TokenPrefixMismatch:
            self._engines.forget_ids_field(answer.engine)
            raise

    async def finish(self, turn: Claimed, call: EngineCall, generated: Generated) -> None:
        """What a whole reply needs before its commit. Raises TokenPrefixMismatch, SessionUnreadable."""
        reply = generated.reply
        if turn.plan.base_messages and not reply.base:
            await self._require_no_drift(turn, call, reply)
        if reply.calls and isinstance(turn.request, ChatRequest):
            generated.given_ids = await self._large_bodies.run(turn.large, lambda: self._given_ids(turn, reply))

    async def _require_no_drift(self, turn: Claimed, call: EngineCall, reply: ValidatedReply) -> None:
        """Raises TokenPrefixMismatch if the prompt must continue the stored tokens but does not.

        It must if it was built on them, or if the session rejects drift.
        """
        session, prompt = turn.session, call.prompt
        parent = decide.token_parent(session, turn.plan)
        if parent is None or not (session.config.on_drift == "reject" or (prompt is not None and prompt.extends)):
            return
        at = await self._token_in.first_difference(
            turn, parent, lambda: memoryview(codec.unpack_tokens(reply.tokens, reply.exchange).suffix_ids).cast("i")
        )
        raise TokenPrefixMismatch(
            f"the prompt's {reply.suffix_tokens} tokens do not continue the {parent.token_count} stored ones: "
            f"they differ at position {at}"
        )

    def _given_ids(self, turn: Claimed, reply: ValidatedReply) -> GivenIds | None:
        request = turn.request
        assert isinstance(request, ChatRequest)
        proof = partial(self._proofs.of, turn.flight.session_id, turn.opened.turn)
        known = request.messages if request.call_ids is None else request.call_ids
        return calls.given_ids(reply.calls, turn.opened.protocol, proof, known)


def _inference_chat(
    params: Fields,
    tools: bytes | None,
    ids: bytes,
    rendered: inference.Rendered,
    row: int,
    messages: Sequence[bytes | memoryview],
) -> bytes:
    return inference.chat_body(params, tools, ids, rendered, row, calls.count(messages))


def body_of(call: EngineCall) -> Sequence[bytes | memoryview]:
    """The request as raw JSON, in parts: the messages of a chat, the text of a completion, or the ids of either."""
    ids = None if call.prompt is None else call.prompt.text
    if call.shape == "chat":
        field = call.ids_field or "input_ids"
        return chat_body(call.sent_params, call.tools, call.messages, call.rid, call.own + call.stream, ids, field)
    return completion_body(call.params, call.text, ids, call.rid, call.own)


def _stream_of(call: EngineCall) -> OpenStream:
    """What reads the reply of a stream."""
    push, limit = call.push, limit_of(call.params)
    if call.open_stream is not None:
        return partial(call.open_stream, push, limit)
    return lambda engine, version, logprobs_of: ReplyStream(push, limit)


# what a session stores once


def _shared_blobs(session: Session, tools: bytes | None, echo: bytes | None) -> list[SharedBlob]:
    known = {ref.hash for ref in session.blobs}
    shared = []
    if tools is not None:
        digest = hashes_of(tools).text
        shared.append(SharedBlob("tools", tools, digest, None if digest in known else codec.compress(tools)))
    if echo is not None:
        digest = hashlib.sha256(echo).hexdigest()
        shared.append(SharedBlob("echo", echo, digest, None if digest in known else codec.compress(echo)))
    return shared


def _without_images(session: Session, new: Sequence[bytes]) -> tuple[list[bytes], list[SharedBlob]]:
    """The messages with references to their images, and these, each once."""
    stored, images = [], dict[str, bytes]()
    for message in new:
        kept, taken = take_out(message)
        stored.append(kept)
        images |= {image.sha256: image.data for image in taken}
    return stored, [
        SharedBlob("image", data, sha256, None if sha256 in session.images else codec.compress(data))
        for sha256, data in images.items()
    ]


# the adapter


def adapter_of(session: Session, request: Request, fleet: Fleet) -> str | None:
    """The turn's adapter: the session's, else the request's `lora_path`, else a `model` that names one.

    Raises InvalidRequest if the request names another adapter than the session's.
    """
    if session.config.capture == "text":
        return None
    own, run = session.config.adapter or None, session.config.of_run
    model = bytes(request.params.get("model", b""))
    is_plain = not model or (model[:1] == b'"' and b"\\" not in model)
    if own is None and is_plain and not fleet.knows_adapters(run) and "lora_path" not in request.params:
        return None
    path = value_of(request.params.get("lora_path"), "lora_path")
    named = _adapter_in_model(value_of(request.params.get("model"), "model"), run, fleet)
    if own is None:
        return path if isinstance(path, str) and path else named
    for name, requested in (("lora_path", path), ("model", named)):
        if requested and requested != own:
            raise InvalidRequest(f"{name} names another adapter than the session's")
    return own


def _adapter_in_model(model: Any, run: str, fleet: Fleet) -> str | None:
    """The adapter, known to this run, that a `model` names, also as SGLang's `base:adapter`."""
    if not isinstance(model, str):
        return None
    named = (model, model.partition(":")[2].strip())
    return next((name for name in named if fleet.knows_adapter(run, name)), None)
