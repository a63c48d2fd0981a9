"""Answers a generation request, from its body to its reply."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from ops.simulator import completion, inference, native, openai, sglang, vllm
from ops.simulator.config import Config
from ops.simulator.faults import FAULTS, FaultQueue, UnknownFault, spoil_stream
from ops.simulator.generate import Draft, Policy, limit_of
from ops.simulator.generation import Generation, R, ReplyWriter, Span
from ops.simulator.payloads import Payloads
from ops.simulator.prefixes import PrefixCache
from ops.simulator.records import Counters
from ops.simulator.running import Run, Runs
from ops.simulator.template import GENERATION_PROMPT, Conversation, Template
from ops.simulator.tokenizer import IM_START, Encoded, Tokenizer
from ops.simulator.wire import (
    MAX_ID,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    FaultOrder,
    PlannedReply,
    Reply,
    Request,
    Sim,
)

HungUp = Callable[[], Awaitable[None]]

_REFUSALS = (BadRequest, UnknownFault, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Wire(Protocol):
    """The functions of a dialect's module."""

    def error(self, message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
        """An error object."""

    def adapter(self, request: Request, config: Config) -> str | None:
        """The LoRA adapter that a request is for."""

    def check(self, request: ChatRequest) -> None:
        """Refuse what the engine refuses. Raises BadRequest."""

    def render(self, generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
        """The whole reply."""

    def stream(self, generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
        """The reply as server-sent events."""


class Engine:
    """Generates replies; owns all state that a reset clears."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = Tokenizer()
        self.template = Template(self.tokenizer, mends_arguments=config.dialect == "vllm")
        self.policy = Policy(config, self.tokenizer)
        self.writer = ReplyWriter(config, self.tokenizer, Payloads(config.seed))
        self.runs = Runs()
        self.faults = FaultQueue()
        self.replies: list[PlannedReply] = []
        self.counters = Counters()
        self.prefixes = PrefixCache(config.cache_tokens)
        self.weight_version = config.weight_version
        self.latency_s = config.latency_s
        self.witnesses: list[Callable[[Generation[Any]], None]] = []  # called with each generation, before any fault
        self._dialect: Wire = {"vllm": vllm, "sglang": sglang, "openai": openai}[config.dialect]
        self._decode = msgspec.json.Decoder(ChatRequest).decode
        self._decode_generate = msgspec.json.Decoder(native.GenerateRequest).decode
        self._decode_completion = msgspec.json.Decoder(CompletionRequest).decode
        self._decode_any = msgspec.json.Decoder(Request).decode
        self._decode_ids = msgspec.json.Decoder(list[int]).decode
        self._opening = self.tokenizer.encode(GENERATION_PROMPT).packed
        self._number = 0

    def error(self, message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
        """An error in the dialect's format."""
        return self._dialect.error(message, status, kind)

    def adapter_of(self, body: bytes) -> str | None:
        """The LoRA adapter of a request; None for the base model, and for an invalid request."""
        try:
            return self._dialect.adapter(self._decode_any(body), self.config)
        except _REFUSALS:
            return None

    def reset(self) -> None:
        """Clear counters, faults, planned replies and earlier generations, but not the caches."""
        self.policy.forget()
        self.faults.clear()
        self.replies.clear()
        self.counters = Counters()
        self.prefixes.clear()
        self.runs.aborted = self.runs.disconnected = 0
        self.runs.resume()
        self.weight_version = self.config.weight_version
        self.latency_s = self.config.latency_s

    async def chat(
        self, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a chat request; ``None`` if the client disconnected. ``request_id`` and ``session`` are headers'."""
        try:
            request = self._read(body)
            begun = ""
            if request.continue_final_message:
                begun = msgspec.json.decode(request.messages.pop())["content"]
            conversation = self.template.read(request.messages, request.tools)
            request = self._planned(request, conversation, session)
            order = self.faults.take(request.sim)
            prompt = self._prompt(request, conversation, begun)
        except _REFUSALS as error:
            return self._refused(error)
        over_s = self._latency_of(request) if request.stream else 0.0
        request = self._named(request, request_id)
        generation = await self._generate(request, prompt, conversation, order, hung_up, over_s)
        if not isinstance(generation, Generation):
            return generation
        if not request.stream:
            return self._ended(generation) or self._spoiled(self._dialect.render(generation, self.writer), order)
        draft = generation.draft
        over_s *= len(draft.ids) / max(draft.before + len(draft.ids), 1)
        reply = replace(self._dialect.stream(generation, self.writer), over_s=over_s)
        return reply if order is None else spoil_stream(reply, order)

    async def generate(
        self, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a request of SGLang's own route; as :meth:`chat`, whose answer to the same ids has the same tokens."""
        asked = native.GenerateRequest()
        try:
            asked = self._decode_generate(body)
            request = asked.as_chat()
            self._check(request)
            order = self.faults.take(request.sim)
            raw = bytes(request.input_ids)
            prompt = self._ids_of(raw) if raw else self.tokenizer.encode(asked.text or "")
            self._check_prompt(request, prompt)
            text = self.tokenizer.decode(list(prompt.ids()))
            is_chat = IM_START in text
            conversation = self.template.reread(text) if is_chat else completion.conversation(prompt)
        except _REFUSALS as error:
            refused = self._refused(error)
            if not isinstance(error, BadRequest):
                return refused
            return native.streamed_error(str(error)) if asked.stream else native.error(str(error))
        request = self._named(request, request_id)
        # A generation that a test aborts at a token is held, and delivered at once.
        is_held = not asked.stream or (request.sim and request.sim.abort_at)
        over_s = 0.0 if is_held else self._latency_of(request)
        generation = await self._generate(request, prompt, conversation, order, hung_up, over_s)
        if not isinstance(generation, Generation):
            return generation
        if not asked.stream:
            refusal = generation.sim.abort
            if generation.draft.finish == "abort" and refusal.status_code == 400:
                return native.error(refusal.message)
            whole = self._ended(generation) or native.render(generation, self.writer, asked)
            return self._spoiled(whole, order)
        draft = generation.draft
        over_s *= len(draft.ids) / max(draft.before + len(draft.ids), 1)
        reply = replace(native.stream(generation, self.writer, asked), over_s=over_s)
        return reply if order is None else spoil_stream(reply, order)

    async def infer(
        self, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a request of vLLM's route for prompts of ids; as :meth:`chat`."""
        try:
            request: ChatRequest = inference.read(body, self.config)
            self._check(request)
            prompt = self._ids_of(request.prompt_ids("vllm"))
            conversation = completion.conversation(prompt)
            if inference.is_parsed(request):
                conversation = self.template.reread(self.tokenizer.decode(list(prompt.ids())))
                request = self._planned(request, conversation, session)
            order = self.faults.take(request.sim)
        except _REFUSALS as error:
            return self._refused(error)
        request = self._named(request, request_id)
        generation = await self._generate(request, prompt, conversation, order, hung_up)
        if not isinstance(generation, Generation):
            return generation
        return self._spoiled(inference.render(generation, self.writer), order)

    def _planned(self, request: ChatRequest, conversation: Conversation, session: str | None) -> ChatRequest:
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

    async def complete(
        self, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a completion request; as :meth:`chat`."""
        try:
            request = self._decode_completion(body)
            self._check(request)
            request = completion.check(request, self.config.dialect)
            order = self.faults.take(request.sim)
            prompt = completion.read_prompt(request.prompt, self.tokenizer)
            self._check_prompt(request, prompt)
        except _REFUSALS as error:
            return self._refused(error)
        conversation = completion.conversation(prompt)
        request = self._named(request, request_id)
        generation = await self._generate(request, prompt, conversation, order, hung_up)
        if not isinstance(generation, Generation):
            return generation
        if request.stream:
            streamed = completion.sglang_stream(generation, self.writer)
            return streamed if order is None else spoil_stream(streamed, order)
        if ended := self._ended(generation):
            return ended
        renderers = {"vllm": completion.vllm, "sglang": completion.sglang, "openai": openai.completion}
        render = renderers[self.config.dialect]
        return self._spoiled(render(generation, self.writer), order)

    def _named(self, request: R, request_id: str | None) -> R:
        """``request`` with its generation's id: SGLang's from the body, vLLM's from the header, else a new one."""
        self._number += 1
        given = request_id if self.config.dialect == "vllm" else request.rid
        rid = given or f"{self.config.seed & 0xFFFF:04x}{self._number:028x}"
        versions = request.return_weight_versions and not self.config.silent_versions
        return msgspec.structs.replace(request, rid=rid, return_weight_versions=versions)

    async def _generate(
        self,
        request: R,
        prompt: Encoded,
        conversation: Conversation,
        order: FaultOrder | None,
        hung_up: HungUp,
        streamed_s: float = 0.0,
    ) -> Generation[R] | Reply | None:
        """Generate for the time that it takes, less `streamed_s`, which the delivery of a stream takes. Returns a reply
        if a fault replaces the generation, None if the client left."""
        fault = FAULTS[order.fault] if order else None
        sim, rid = request.sim or Sim(), request.rid or ""
        cached = self.prefixes.cached(prompt.packed)
        run = Run(
            rid,
            _external_id(request, rid),
            self._latency_of(request) - streamed_s,
            [(0.0, sim.weight_version or self.weight_version)],
            (prompt.count - cached) * self.config.prefill_s,
        )
        if fault and order and not fault.generates:
            self.counters.faulted += 1
            await self.runs.hold(run, hung_up)
            return fault.spoil(Reply(), order)
        self.counters.started += 1
        self.counters.prompt_tokens += prompt.count
        self.counters.prefix_hit_tokens += cached
        whole, draft = self._draft(conversation, request, prompt, order)
        share = await self.runs.hold(run, hung_up)
        if run.gone:
            return None
        self.counters.finished += 1
        draft = self._cut(draft, run, share, sim.abort_at or [])
        self.counters.sampled_tokens += len(draft.ids)
        if draft.finish == "abort":
            self.policy.leave(prompt.packed, whole, len(draft.ids))
        self.prefixes.served(prompt.packed + array("i", draft.ids).tobytes())
        spans = _spans(run, request.sim, len(draft.ids))
        queued = (run.queued or sim.queued) and draft.finish == "abort" and self.config.dialect == "sglang"
        seconds = self._latency_of(request)
        generation = Generation(run.rid, int(time.time()), request, prompt, draft, cached, spans, queued, seconds)
        for witness in self.witnesses:
            witness(generation)
        return generation

    def _latency_of(self, request: Request) -> float:
        """The time of a whole generation, which one of a single token does not take."""
        asked = request.sim.latency_s if request.sim else None
        if asked is None:
            return 0.0 if request.max_tokens == 1 else self.latency_s
        return asked

    def _refused(self, error: Exception) -> Reply:
        self.counters.refused += 1
        if isinstance(error, BadRequest):
            return self.error(str(error), error.status, error.kind)
        return self.error(str(error) or "the request is nested too deeply", 400, "Bad Request")

    def _ended(self, generation: Generation[Any]) -> Reply | None:
        """The error that stands for a reply whose abort has a status."""
        abort = generation.sim.abort
        if generation.draft.finish != "abort" or abort.status_code is None:
            return None
        kind = "BadRequestError" if abort.status_code == 400 else str(abort.status_code)
        return self.error(abort.message, abort.status_code, kind)

    def _spoiled(self, reply: Reply, order: FaultOrder | None) -> Reply:
        if order is None:
            return reply
        self.counters.faulted += 1
        return FAULTS[order.fault].spoil(reply, order)

    def _check(self, request: Request) -> None:
        if request.n not in (None, 1):
            raise BadRequest("this simulator answers with one choice; n must be 1")
        self._dialect.adapter(request, self.config)
        if self.config.dialect == "sglang":
            sglang.check_sampling(request)

    def _check_prompt(self, request: Request, prompt: Encoded) -> None:
        if self.config.dialect == "sglang":
            sglang.check_length(prompt.count, limit_of(request), self.config.context_length)
            sglang.check_start(request, prompt.count)

    def _read(self, body: bytes) -> ChatRequest:
        request = self._decode(body)
        self._check(request)
        for name in ("max_tokens", "max_completion_tokens"):
            limit = getattr(request, name)
            if limit is not None and limit < 0:
                raise BadRequest(f"max_new_tokens must be at least 0, got {limit}.")
        self._dialect.check(request)
        return request

    def _prompt(self, request: ChatRequest, conversation: Conversation, begun: str) -> Encoded:
        """``begun`` is the beginning of the reply, which the engine continues."""
        raw = request.prompt_ids(self.config.dialect) if self.config.token_in else b""
        if self.config.dialect == "sglang" and not raw:
            sglang.check_history(conversation)
        prompt = self._ids_of(raw) if raw else self.template.prompt(conversation)
        if begun and not raw:
            prompt = Encoded.of([*prompt.ids(), *self.tokenizer.ids(begun)])
        self._check_prompt(request, prompt)
        return prompt

    def _ids_of(self, raw: bytes) -> Encoded:
        ids = self._decode_ids(raw)
        if not ids and self.config.dialect == "sglang":
            raise BadRequest("input_ids cannot be empty.")
        if not ids or min(ids) < 0 or max(ids) > MAX_ID:
            raise BadRequest("a prompt's ids must be a non-empty list of token ids")
        return Encoded(raw.strip()[1:-1], array("i", ids).tobytes(), len(ids))

    def _draft(
        self, conversation: Conversation, request: R, prompt: Encoded, order: FaultOrder | None
    ) -> tuple[Draft, Draft]:
        """The complete answer, and the part of it that the request's limits and the fault allow."""
        adjusted: ChatRequest | CompletionRequest = request
        finish = FAULTS[order.fault].finish if order else None
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

    def _greedy_rest(self, conversation: Conversation, request: R, prompt: Encoded) -> Draft | None:
        """The rest of an answer at temperature 0 that the prompt ends with a part of."""
        opening = array("i", self._opening).tolist()
        ids = prompt.ids()
        if request.temperature != 0 or not isinstance(request, ChatRequest) or ids[-len(opening) :] == opening:
            return None
        at = max((at for at in range(len(ids)) if ids[at : at + len(opening)] == opening), default=None)
        return None if at is None else self.policy.greedy_rest(conversation, request, ids[at + len(opening) :])

    def _cut(self, draft: Draft, run: Run, share: float, abort_at: list[int]) -> Draft:
        if not run.aborted:
            return draft
        if draft.cuts < len(abort_at):
            return self.policy.cut(draft, abort_at[draft.cuts], "abort", exact=True)
        return self.policy.cut(draft, int(len(draft.ids) * min(share, 0.999)), "abort")


def _external_id(request: Request, rid: str) -> str:
    if isinstance(request, inference.TokensRequest):
        return f"generate-tokens-{rid}"
    return f"chatcmpl-{rid}" if isinstance(request, ChatRequest) else f"cmpl-{rid}-0"


def _spans(run: Run, sim: Sim | None, count: int) -> tuple[Span, ...]:
    """Output tokens by weight version. Versions requested in ``sim`` get equal shares."""
    versions = run.versions
    if sim and sim.weight_versions:
        names = sim.weight_versions
        versions = [(index / len(names), name) for index, name in enumerate(names)]
    starts = [int(share * count) for share, _ in versions]
    spans = zip(versions, starts, [*starts[1:], count], strict=True)
    found = tuple(Span(name, start, end) for (_, name), start, end in spans if end > start)
    return found or (Span(versions[-1][1], 0, count),)
