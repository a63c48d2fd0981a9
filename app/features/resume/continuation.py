"""A generation that an engine ended early: the request for the rest, and one reply joined from all parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from app.domain.request import FIRST_ROW_NAMES, ChatRequest, has_more_than_text, join_object, value_of
from app.errors import UpstreamInvalid
from app.sessions.cache import id_text
from app.settings import Settings
from app.turn.in_flight import EngineCall, PromptIds, Request
from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.dialects import PROMPT_WISHES, from_row
from workers import codec, join
from workers.join import Piece, Shape
from workers.join_text import Stop
from workers.parse import Rejected
from workers.reply import Part, Speculative, ValidatedReply, VersionSpan

INLINE = 96 << 10
"""Replies up to this size in total are joined on the loop: about 1 ms."""

COMPLETION_TOKENS = 16
"""Both engines' default of `max_tokens` for completions, as OpenAI's."""

_GRAMMARS = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T")


def can_continue(request: Request) -> bool:
    """Can an engine that is sent the tokens so far continue after them?

    SGLang ignores images if it gets ids, vLLM ids if it gets images. A grammar would start again in the middle of the
    output.
    """
    if not isinstance(request, ChatRequest):
        return not _has_grammar(request)
    if has_more_than_text(request.messages):
        return False
    choice = value_of(request.params.get("tool_choice"), "tool_choice")
    forced = choice == "required" or isinstance(choice, dict)
    return not forced and not _has_grammar(request)


def _has_grammar(request: Request) -> bool:
    wanted = value_of(request.params.get("response_format"), "response_format")
    if isinstance(wanted, dict) and wanted.get("type") != "text":
        return True
    return any(value_of(request.params.get(name), name) is not None for name in _GRAMMARS)


class GeneratedPart(msgspec.Struct, frozen=True):
    """One generation: the engine's answer, and the validated reply. `is_cut`: the engine or the server died, so that it
    is continued whatever is done with aborted ones."""

    answer: EngineReply
    reply: ValidatedReply
    is_cut: bool = False


class Continuation:
    """The parts of one turn's generation. `prompt` is the text of the prompt's ids, `call` the first request."""

    def __init__(
        self, request: Request, settings: Settings, prompt: bytes, call: EngineCall, first: GeneratedPart
    ) -> None:
        self._request = request
        self._settings = settings
        self._call = call
        self._ids = prompt
        self._generations: list[GeneratedPart] = []
        self._pieces: list[Piece] = []
        self._stop: Stop | None = None
        reply = first.reply
        assert reply.dialect != "openai"
        self._shape = Shape(
            dialect=reply.dialect,
            protocol=request.shape,
            prompt_tokens=reply.base + reply.suffix_tokens,
            stops=_stops(request),
            keeps_stop=any(self._param(name) is True for name in ("no_stop_trim", "include_stop_str_in_output")),
            is_raw=first.answer.is_native,
            has_tools=isinstance(request, ChatRequest)
            and bool(value_of(request.tools, "tools"))
            and self._param("tool_choice") != "none",
        )
        self._append(first)

    @property
    def first(self) -> GeneratedPart:
        return self._generations[0]

    @property
    def newest(self) -> GeneratedPart:
        return self._generations[-1]

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self._pieces)

    @property
    def is_budget_spent(self) -> bool:
        """Has the output reached the client's token limit?"""
        left = self._tokens_left()
        return left is not None and left <= 0

    @property
    def is_complete(self) -> bool:
        """Is the generation complete?"""
        return self.newest.reply.finish_reason != "abort" or self._stop is not None or self.is_budget_spent

    async def add(self, part: GeneratedPart) -> None:
        """Raises UpstreamInvalid."""
        self._append(part)
        self._stop = await self._run(lambda: join.stopped(self._pieces, self._shape))

    def _append(self, part: GeneratedPart) -> None:
        reply = part.reply
        rows = {payload.kind: (payload.sent, payload.stop) for payload in reply.payloads}
        self._generations.append(part)
        self._pieces.append(Piece(part.answer.body.joined(), reply.output_tokens, reply.weight_versions, rows))
        output = codec.unpack_tokens(reply.tokens, reply.exchange).output_ids
        self._ids = b",".join(filter(None, (self._ids, id_text(output))))

    def next_call(self) -> EngineCall:
        """The request for the rest: the prompt and all tokens so far, what is left of the token budget, and only the
        rows of `routed_experts` that are still missing."""
        params = {name: bytes(raw) for name, raw in _FIELDS.decode(self._call.params).items()}
        left = self._tokens_left()
        if left is not None:
            for name in ("max_tokens", "max_completion_tokens"):
                params.pop(name, None)
            params[self._limit()[0]] = str(left).encode()
        least = self._param("min_tokens")
        if _is_count(least):
            params["min_tokens"] = str(max(least - self.tokens, 0)).encode()
        own, first_row = self._call.own, self._call.first_row
        stops = [piece.rows["routed_experts"][1] for piece in self._pieces if "routed_experts" in piece.rows]
        if stops:
            own, first_row = from_row(stops[-1], self._settings.upstream_dialect), stops[-1]
        if own:
            for name in FIRST_ROW_NAMES:
                params.pop(name, None)
        ids, wish = PromptIds(self._ids, None), self._call.wish
        if wish is not None and wish.prompt is not None:
            # The first generation has them; of this one's prompt, the end was sampled.
            wish = msgspec.structs.replace(wish, prompt=None)
            for name in PROMPT_WISHES:
                params.pop(name, None)
        return msgspec.structs.replace(
            self._call,
            wish=wish,
            params=join_object(params),
            own=own,
            first_row=first_row,
            ids=ids,
            prompt=ids,
            origin="continued",
            is_part=True,
            wants_native=self.first.answer.is_native,
            is_native=False,
        )

    async def join(self) -> EngineReply:
        """Join all generations to one answer, from the last engine. Raises UpstreamInvalid."""
        finish: Literal["length"] | None = None
        if self._stop is None and self.newest.reply.finish_reason == "abort" and self.is_budget_spent:
            finish = "length"
        body = await self._run(lambda: join.join(self._pieces, self._shape, stop=self._stop, finish=finish))
        first = next((one for one in self._generations if one.reply.output_tokens), self._generations[0])
        answer = self.newest.answer
        modes = {one.answer.logprobs_of for one in self._generations if one.reply.output_tokens}
        logprobs_of = modes.pop() if len(modes) == 1 else None
        dispatched = first.answer.dispatched
        return msgspec.structs.replace(answer, body=Body([body]), dispatched=dispatched, logprobs_of=logprobs_of)

    def parts(self) -> tuple[Part, ...]:
        """Which engine generated which tokens of the joined reply."""
        if len(self._pieces) == 1:
            return ()
        parts: list[Part] = []
        start = 0
        for generation, piece in zip(self._generations, self._pieces, strict=True):
            end = min(start + piece.tokens, self._joined_tokens)
            if end > start:
                parts.append(Part(generation.answer.engine, start, end))
            start = end
        return tuple(parts)

    def versions(self) -> tuple[VersionSpan, ...]:
        """The weight versions of the joined reply, as found for each generation; unknown ones stay unknown."""
        spans = join.versions(self._pieces, self._joined_tokens)
        return tuple(VersionSpan(span.version, span.start, span.end) for span in spans)

    def speculative(self) -> Speculative | None:
        """The counters of all generations; None if an engine gave none."""
        counted = [one.reply.speculative for one in self._generations if one.reply.output_tokens]
        if not counted or None in counted:
            return None
        sums = zip(*(msgspec.structs.astuple(one) for one in counted if one is not None), strict=True)
        return Speculative(*map(sum, sums))

    @property
    def _joined_tokens(self) -> int:
        """Number of tokens in the joined reply."""
        return self.tokens if self._stop is None else self._stop.tokens

    def _limit(self) -> tuple[str, int | None]:
        """The parameter that limits the output, as both engines choose it, and the client's value."""
        if isinstance(self._request, ChatRequest):
            limit = self._param("max_completion_tokens")
            if _is_count(limit):
                return "max_completion_tokens", limit
        elif "max_tokens" not in self._request.params:
            return "max_tokens", COMPLETION_TOKENS
        limit = self._param("max_tokens")
        return "max_tokens", limit if _is_count(limit) else None

    def _tokens_left(self) -> int | None:
        limit = self._limit()[1]
        return None if limit is None else limit - self.tokens

    def _param(self, name: str) -> Any:
        return value_of(self._request.params.get(name), name)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run `work`, on a thread if the replies are large. Raises UpstreamInvalid."""
        large = sum(len(piece.body) for piece in self._pieces) > INLINE
        try:
            return await asyncio.to_thread(work) if large else work()
        except Rejected as error:
            raise UpstreamInvalid(f"the generations of one turn cannot be joined: {error}") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(request: Request) -> Sequence[str]:
    stops = value_of(request.params.get("stop"), "stop")
    texts = [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []
    return [stop for stop in texts if isinstance(stop, str)]
