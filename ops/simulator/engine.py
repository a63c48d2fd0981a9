"""Answers a generation request, from its body to its reply. What an engine's own wire shows is in a file a dialect."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Raw, Struct

from ops.simulator.faults import FAULTS, FaultQueue, spoil_stream
from ops.simulator.generation import Generation, ReplyWriter, Span
from ops.simulator.policy import Draft, Policy
from ops.simulator.prefixes import PrefixCache
from ops.simulator.running import HungUp, RequestLog, Run, Runs
from ops.simulator.template import GENERATION_PROMPT, Conversation, Template
from ops.simulator.tokenizer import Encoded, Tokenizer
from ops.simulator.wire import (
    MAX_ID,
    BadRequest,
    ChatRequest,
    Config,
    FaultOrder,
    PlannedReply,
    Reply,
    Request,
    Sim,
    json_reply,
)

Outcome = Literal["ok", "missing", "refused", "error"]
Query = Mapping[str, str]

NOT_FOUND = {"detail": "Not Found"}
"""What both engines answer to a path that they do not have."""

_REFUSALS = (BadRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Behaviour(Struct, forbid_unknown_fields=True):
    """How routes answer from now on. A call that is set to fail has no effect."""

    health: Outcome = "ok"
    health_hangs_when_paused: bool = True  # SGLang's, which generates a token; vLLM's never hangs
    sessions: Outcome = "ok"  # both session routes, which take `sessions_delay_s` seconds in any case
    sessions_delay_s: float = 0.0
    dev_mode: bool = True  # without, vLLM has none of its routes that control it
    scale_out: bool = False
    abort: Outcome = "ok"
    pause: Outcome = "ok"
    resume: Outcome = "ok"
    count_tokens: Outcome = "ok"
    server_info: Outcome = "ok"


class Control(NamedTuple):
    """A route that generates nothing. ``answer`` gets the body, as ``takes`` if that is given, and is not called where
    the field ``outcome`` of the behaviour says how the route fails."""

    answer: Callable[[Engine, Any, Query], Reply | Awaitable[Reply]]
    takes: Any = None
    outcome: str = ""

    async def reply(self, engine: Engine, body: bytes, query: Query) -> Reply:
        """Raises BadRequest, msgspec's errors."""
        asked = body if self.takes is None else msgspec.json.decode(body, type=self.takes)
        if self.outcome == "sessions":
            await asyncio.sleep(engine.behaviour.sessions_delay_s)
        if self.outcome and (failed := engine.failed(getattr(engine.behaviour, self.outcome))):
            return failed
        reply = self.answer(engine, asked, query)
        return reply if isinstance(reply, Reply) else await reply


def always(reply: Reply) -> Control:
    """A control route that says nothing else."""
    return Control(lambda engine, body, query: reply)


class Counters(Struct):
    """Generations since the last reset."""

    started: int = 0
    finished: int = 0
    faulted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0  # the part of `prompt_tokens` that the prefix cache had
    sampled_tokens: int = 0  # of finished generations


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. With ``is_paced`` its stream takes the time of the generation; else the generation is
    held, and its reply delivered at once."""

    request: Request
    prompt: Encoded
    conversation: Conversation
    is_paced: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A route that generates: how it reads a body (with the session that a header names), and writes replies.
    ``external_id`` is what vLLM makes of the generation's id."""

    read: Callable[[Engine, bytes, str | None], Asked]
    render: Callable[[Generation[Any], ReplyWriter], Reply]
    stream: Callable[[Generation[Any], ReplyWriter], Reply]
    external_id: str = "chatcmpl-%s"


class Refused(Exception):
    """A route refuses a request with a reply of its own."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


class Wire(Protocol):
    """The functions of a dialect's module."""

    def error(self, message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
        """An error object."""

    def adapter(self, request: Request, config: Config) -> str | None:
        """The LoRA adapter that a request is for. Raises BadRequest."""

    def check(self, request: Request) -> None:
        """Refuse what the engine refuses of a request's fields. Raises BadRequest."""

    def check_prompt(self, request: Request, prompt: Encoded, config: Config, history: Conversation | None) -> None:
        """Refuse what the engine refuses of a prompt, made of ``history`` if it did not come as ids or text. Raises
        BadRequest."""

    def routes(self, engine: Engine) -> Mapping[tuple[str, str], Route]:
        """The routes that generate, by method and path."""

    def control(self, engine: Engine, path: str) -> Mapping[tuple[str, str], Control]:
        """The dialect's other routes, at least those of this path."""


class Engine:
    """Generates replies; owns all state that a reset clears."""

    def __init__(self, config: Config, wire: Wire) -> None:
        self.config = config
        self.wire = wire
        self.tokenizer = Tokenizer()
        self.template = Template(self.tokenizer, mends_arguments=config.dialect == "vllm")
        self.policy = Policy(config, self.tokenizer)
        self.writer = ReplyWriter(config, self.tokenizer)
        self.runs = Runs()
        self.requests = RequestLog(config.keep_requests)
        self.faults = FaultQueue()
        self.replies: list[PlannedReply] = []
        self.prefixes = PrefixCache(config.cache_tokens)
        self.adapters: dict[str, str] = dict.fromkeys(config.adapters, "")
        self.sessions: list[str] = []
        self.closed: list[str] = []
        self.witnesses: list[Callable[[Generation[Any]], None]] = []  # called with each generation, before any fault
        self._decode_any = msgspec.json.Decoder(Request).decode
        self._decode_ids = msgspec.json.Decoder(list[int]).decode
        self._opening = self.tokenizer.encode(GENERATION_PROMPT).packed
        self._number = 0
        self.reset()

    def reset(self) -> None:
        """Clear counters, faults, planned replies, requests and earlier generations, but not the caches."""
        self.requests.clear()
        self.policy.forget()
        self.faults.clear()
        self.replies.clear()
        self.prefixes.clear()
        self.sessions.clear()
        self.closed.clear()
        self.runs.aborted = self.runs.disconnected = 0
        self.runs.resume()
        self.counters = Counters()
        self.behaviour = Behaviour(scale_out=self.config.scale_out)
        self.weight_version = self.config.weight_version
        self.latency_s = self.config.latency_s

    def adapter_of(self, body: bytes) -> str | None:
        """The LoRA adapter of a request; None for the base model, and for an invalid request."""
        try:
            return self.wire.adapter(self._decode_any(body), self.config)
        except _REFUSALS:
            return None

    def failed(self, outcome: Outcome) -> Reply | None:
        """What a route answers that was set to fail; None where it was not."""
        match outcome:
            case "ok":
                return None
            case "missing":
                return json_reply(NOT_FOUND, 404)
            case "refused":
                return self.wire.error("The request was refused, as ordered.", 400)
            case "error":
                return self.wire.error("The engine failed, as ordered.", 500)

    async def answer(
        self, route: Route, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a generation request; ``None`` if the client disconnected. ``request_id`` and ``session`` are
        headers'."""
        try:
            asked = route.read(self, body, session)
            order = self.faults.take(asked.request.sim)
        except (Refused, *_REFUSALS) as error:
            self.counters.refused += 1
            match error:
                case Refused():
                    return error.reply
                case BadRequest():
                    return self.wire.error(str(error), error.status, error.kind)
            return self.wire.error(str(error) or "the request is nested too deeply", 400, "Bad Request")
        streamed_s = self._latency_of(asked.request) if asked.is_paced else 0.0
        generation = await self._generate(route, asked, order, hung_up, request_id, streamed_s)
        if not isinstance(generation, Generation):
            return generation
        if asked.request.stream:
            draft = generation.draft
            share = len(draft.ids) / max(draft.before + len(draft.ids), 1)
            reply = replace(route.stream(generation, self.writer), over_s=streamed_s * share)
            return spoil_stream(reply, order) if order else reply
        reply = route.render(generation, self.writer)
        if order:
            self.counters.faulted += 1
            return FAULTS[order.fault].spoil(reply, order)
        return reply

    def check(self, request: Request) -> None:
        """Refuse what the engine refuses of the fields of any request. Raises BadRequest."""
        if request.n not in (None, 1):
            raise BadRequest("this simulator answers with one choice; n must be 1")
        self.wire.adapter(request, self.config)
        self.wire.check(request)

    def read_chat(self, request: ChatRequest, session: str | None, given: Raw) -> Asked:
        """``given`` are the prompt's ids, from the field that the dialect has for them. Raises :class:`BadRequest` or
        msgspec's errors."""
        self.check(request)
        if (least := min(request.max_tokens or 0, request.max_completion_tokens or 0)) < 0:
            raise BadRequest(f"max_new_tokens must be at least 0, got {least}.")
        # If the last message is to be continued, it is the beginning of the reply.
        begun = msgspec.json.decode(request.messages.pop())["content"] if request.continue_final_message else ""
        conversation = self.template.read(request.messages, request.tools)
        request = self.planned(request, conversation, session)
        if self.config.token_in and bytes(given) not in (b"", b"null"):
            prompt, history = self.ids_of(bytes(given)), None
        else:
            prompt, history = self.template.prompt(conversation), conversation
            if begun:
                prompt = Encoded.of([*prompt.ids(), *self.tokenizer.ids(begun)])
        self.wire.check_prompt(request, prompt, self.config, history)
        return Asked(request, prompt, conversation, is_paced=bool(request.stream))

    def planned(self, request: ChatRequest, conversation: Conversation, session: str | None) -> ChatRequest:
        """``request`` with the ``sim`` of the first planned reply that is for its session, last message and tools."""
        last = "".join(conversation.messages[-1].pieces)
        offered = {tool.function.name for tool in conversation.toolbox.tools}
        for planned in self.replies:
            called = {call.name for call in planned.sim.calls or ()}
            is_asked = planned.session in (None, session) and planned.when in last and called <= offered
            if planned.count > 0 and is_asked:
                planned.count -= 1
                return msgspec.structs.replace(request, sim=planned.sim)
        return request

    def ids_of(self, raw: bytes) -> Encoded:
        """A prompt that was given as ids. Raises :class:`BadRequest` or msgspec's errors."""
        ids = self._decode_ids(raw)
        if not ids and self.config.dialect == "sglang":
            raise BadRequest("input_ids cannot be empty.")
        if not ids or min(ids) < 0 or max(ids) > MAX_ID:
            raise BadRequest("a prompt's ids must be a non-empty list of token ids")
        return Encoded(raw.strip()[1:-1], array("i", ids).tobytes(), len(ids))

    def _latency_of(self, request: Request) -> float:
        """The time of a whole generation, which one of a single token does not take."""
        asked = request.sim.latency_s if request.sim else None
        if asked is None:
            return 0.0 if request.max_tokens == 1 else self.latency_s
        return asked

    async def _generate(
        self,
        route: Route,
        asked: Asked,
        order: FaultOrder | None,
        hung_up: HungUp,
        request_id: str | None,
        streamed_s: float,
    ) -> Generation[Any] | Reply | None:
        """Generate for the time that it takes, less `streamed_s`, which the delivery of a stream takes. Returns a reply
        if a fault replaces the generation, None if the client left."""
        request, prompt, config = asked.request, asked.prompt, self.config
        self._number += 1
        # SGLang takes the id from the body, vLLM from the header.
        given = request_id if config.dialect == "vllm" else request.rid
        rid = given or f"{config.seed & 0xFFFF:04x}{self._number:028x}"
        versions = request.return_weight_versions and not config.silent_versions
        request = msgspec.structs.replace(request, rid=rid, return_weight_versions=versions)
        fault, sim = FAULTS[order.fault] if order else None, request.sim or Sim()
        cached, seconds = self.prefixes.cached(prompt.packed), self._latency_of(request)
        run = Run(
            rid,
            route.external_id % rid,
            seconds - streamed_s,
            [(0.0, sim.weight_version or self.weight_version)],
            (prompt.count - cached) * config.prefill_s,
        )
        if fault and order and not fault.generates:
            self.counters.faulted += 1
            await self.runs.hold(run, hung_up)
            return fault.spoil(Reply(), order)
        self.counters.started += 1
        self.counters.prompt_tokens += prompt.count
        self.counters.prefix_hit_tokens += cached
        whole, draft = self._draft(asked.conversation, request, prompt, order)
        share = await self.runs.hold(run, hung_up)
        if run.gone:
            return None
        self.counters.finished += 1
        if run.aborted and draft.cuts < len(sim.abort_at or ()):
            draft = self.policy.cut(draft, (sim.abort_at or [])[draft.cuts], "abort", exact=True)
        elif run.aborted:
            draft = self.policy.cut(draft, int(len(draft.ids) * min(share, 0.999)), "abort")
        self.counters.sampled_tokens += len(draft.ids)
        if draft.finish == "abort":
            self.policy.leave(prompt.packed, whole, len(draft.ids))
        self.prefixes.served(prompt.packed + array("i", draft.ids).tobytes())
        queued = (run.queued or sim.queued) and draft.finish == "abort" and config.dialect == "sglang"
        spans = _spans(run, sim, len(draft.ids))
        generation = Generation(rid, int(time.time()), request, prompt, draft, cached, spans, queued, seconds)
        for witness in self.witnesses:
            witness(generation)
        return generation

    def _draft(
        self, conversation: Conversation, request: Request, prompt: Encoded, order: FaultOrder | None
    ) -> tuple[Draft, Draft]:
        """The complete answer, and the part of it that the request's limits and the fault allow."""
        adjusted, finish = request, FAULTS[order.fault].finish if order else None
        if finish is not None:
            sim = msgspec.structs.replace(request.sim or Sim(), finish_reason=finish)
            adjusted = msgspec.structs.replace(request, sim=sim)
        whole = self.policy.unfinished(prompt.packed) or self._greedy_rest(conversation, request, prompt)
        if whole is None:
            continuing = not prompt.packed.endswith(self._opening)
            whole = self.policy.whole(conversation, adjusted, continuing)
        tokens = order.tokens if order is not None else None
        draft = self.policy.within(whole, request if tokens is not None else adjusted)
        if request.stop:
            stops = [request.stop] if isinstance(request.stop, str) else request.stop
            draft = self.policy.stopped(draft, stops)
        if finish is not None and tokens is not None and tokens < len(draft.ids):
            draft = self.policy.cut(draft, tokens, finish, exact=True)
        return whole, draft

    def _greedy_rest(self, conversation: Conversation, request: Request, prompt: Encoded) -> Draft | None:
        """The rest of an answer at temperature 0 that the prompt ends with a part of."""
        if request.temperature != 0 or not isinstance(request, ChatRequest) or prompt.packed.endswith(self._opening):
            return None
        ids, opening = prompt.ids(), array("i", self._opening).tolist()
        at = max((at for at in range(len(ids)) if ids[at : at + len(opening)] == opening), default=None)
        return None if at is None else self.policy.greedy_rest(conversation, request, ids[at + len(opening) :])


def _spans(run: Run, sim: Sim, count: int) -> tuple[Span, ...]:
    """Output tokens by weight version. Versions requested in ``sim`` get equal shares."""
    versions = run.versions
    if names := sim.weight_versions:
        versions = [(index / len(names), name) for index, name in enumerate(names)]
    starts = [int(share * count) for share, _ in versions]
    spans = zip(versions, starts, [*starts[1:], count], strict=True)
    found = tuple(Span(name, start, end) for (_, name), start, end in spans if end > start)
    return found or (Span(versions[-1][1], 0, count),)
