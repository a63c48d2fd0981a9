"""A finished generation, and the parts of its reply that both dialects share."""

from __future__ import annotations

import codecs
import math
import random
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import msgspec

from ops.simulator.config import Config
from ops.simulator.generate import Draft
from ops.simulator.payloads import Payloads, Shape
from ops.simulator.tokenizer import IM_END, Encoded, Tokenizer
from ops.simulator.wire import ChatRequest, CompletionRequest, Experts, Sim

_LOGPROBS = 8191

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens ``[start, end)`` sampled under one weight version."""

    version: str
    start: int
    end: int


R = TypeVar("R", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Generation(Generic[R]):
    """All data from which a reply is written."""

    id: str
    created: int
    request: R
    prompt: Encoded
    draft: Draft
    cached_tokens: int
    versions: tuple[Span, ...]

    @property
    def weight_version(self) -> str:
        """The last weight version, which an engine reports."""
        return self.versions[-1].version

    @property
    def sim(self) -> Sim:
        """The request's ``sim`` field, or its defaults."""
        return self.request.sim or Sim()

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens, including the end token."""
        return len(self.draft.ids)

    @property
    def usage(self) -> dict[str, object]:
        prompt, completion = self.prompt.count, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def ended_itself(self) -> bool:
        """Whether the end token ended the generation, and not a stop string or a limit."""
        return self.draft.finish in ("stop", "tool_calls") and self.draft.stop_text is None


class ReplyWriter:
    """Writes parts of replies. Tables hold the wire form of each token, so that a reply only joins them."""

    def __init__(self, config: Config, tokenizer: Tokenizer, payloads: Payloads) -> None:
        self.config = config
        self.payloads = payloads
        self.end_id = tokenizer.special_ids[IM_END]
        self._tokenizer = tokenizer
        rng = random.Random(f"logprobs {config.seed}")
        values = [math.log1p(-rng.random()) * rng.random() - 1e-9 for _ in range(_LOGPROBS)]
        self._numbers = [repr(value).encode() for value in values]
        self._triple_tails = [b",%d,%s]" % (number, text) for number, text in enumerate(tokenizer.json_texts)]
        self._content_heads = [
            b'{"token":%s,"bytes":%s,"logprob":' % (text, encode(list(raw)))
            for text, raw in zip(tokenizer.json_texts, tokenizer.token_bytes, strict=True)
        ]

    def logprobs(self, draft: Draft) -> list[bytes]:
        """A JSON number for each sampled token: negative, finite, full precision."""
        numbers = self._numbers
        start = draft.logprob_offset % _LOGPROBS
        wanted = len(draft.ids)
        found = numbers[start : start + wanted]
        while len(found) < wanted:
            found += numbers[: wanted - len(found)]
        return found

    def triples(self, draft: Draft, numbers: list[bytes]) -> bytes:
        """``[[logprob, id, text], …]`` as in SGLang's ``meta_info``."""
        return self.triples_of(draft.ids, numbers)

    def triples_of(self, ids: list[int], numbers: list[bytes]) -> bytes:
        """The same of some of the ids."""
        tails = self._triple_tails
        pairs = zip(numbers, ids, strict=True)
        return b"[" + b",".join([b"[" + number + tails[token] for number, token in pairs]) + b"]"

    def content_logprobs(self, draft: Draft, numbers: list[bytes]) -> bytes:
        """``{"content": [{token, logprob, bytes, top_logprobs}]}`` as in OpenAI's."""
        heads = self._content_heads
        pairs = zip(numbers, draft.ids, strict=True)
        entries = b",".join([heads[token] + number + b',"top_logprobs":[]}' for number, token in pairs])
        return b'{"content":[' + entries + b"]}"

    def token_logprobs(self, ids: list[int], numbers: list[bytes], counted: bool, alternatives: bool) -> bytes:
        """``{"text_offset", "token_logprobs", "tokens", "top_logprobs"}`` of a completion.

        ``numbers`` has ``null`` for a token without a logprob. With ``counted``, offsets are in characters, else -1.
        With ``alternatives``, each token lists one alternative, which is itself.
        """
        known = len(self._tokenizer.texts)
        lengths = [len(self._tokenizer.texts[token]) if token < known else 0 for token in ids]
        texts = [self._tokenizer.json_texts[token] if token < known else b'""' for token in ids]
        offsets = [0, *accumulate(lengths)][: len(ids)] if counted else [-1] * len(ids)
        tops = [b"{%s:%s}" % pair if pair[1] != b"null" else b"null" for pair in zip(texts, numbers, strict=True)]
        return b'{"text_offset":%s,"token_logprobs":[%s],"tokens":[%s],"top_logprobs":[%s]}' % (
            encode(offsets),
            b",".join(numbers),
            b",".join(texts),
            b",".join(tops) if alternatives else b"",
        )

    def text_of(self, ids: list[int]) -> str:
        """The text of ids, for an echoed prompt."""
        return self._tokenizer.decode(ids)

    def texts_of(self, ids: list[int], size: int) -> list[str]:
        """The text of each ``size`` ids, without an end token; a character that is cut comes with its last byte."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        shown = ids[:-1] if ids[-1:] == [self.end_id] else ids
        pieces = [shown[at : at + size] for at in range(0, len(shown), size)]
        return [decode(b"".join(map(self._tokenizer.token_bytes.__getitem__, piece))) for piece in pieces]

    def experts(self, generation: Generation[R], is_requested: bool, start: int, npy: bool = False) -> bytes | None:
        """The ``routed_experts`` value, or ``None`` if it was not requested."""
        options = generation.sim.experts
        if not is_requested and not (options and options.unasked):
            return None
        layers, top_k, experts = self.config.experts
        options = options or Experts()
        shape = Shape(options.layers or layers, options.top_k or top_k, options.experts or experts, options.shift)
        return self._payload(generation, shape, options, start, npy)

    def indexer(self, generation: Generation[ChatRequest]) -> bytes | None:
        """The ``indexer_topk`` value, or ``None`` if it was not requested."""
        options = generation.sim.indexer_topk
        if not generation.request.return_indexer_topk and options is None:
            return None
        layers, top_k = self.config.indexer
        options = options or Experts()
        return self._payload(
            generation, Shape(options.layers or layers, options.top_k or top_k, 0, options.shift), options, 0, False
        )

    def masks(self, generation: Generation[ChatRequest]) -> bytes | None:
        """The ids that each sampled token was drawn from, at most ``top_k``, ascending; ``None`` if not requested."""
        request = generation.request
        if not request.return_sampling_mask:
            return None
        known = len(self._tokenizer.texts)
        most = min(request.top_k or known, 64)
        return encode(
            [
                sorted({(token + number * 31) % known if number else token for number in range(1 + token * 7 % most)})
                for token in generation.draft.ids
            ]
        )

    def _payload(self, generation: Generation[R], shape: Shape, options: Experts, start: int, npy: bool) -> bytes:
        stop = max(generation.prompt.count + generation.completion_tokens - 1, 0)
        write = self.payloads.nested if options.nested else self.payloads.npy if npy else self.payloads.base64
        head = generation.prompt.packed[:64] + array("i", generation.draft.ids[:16]).tobytes()
        return write(shape, min(start, stop), stop, head)

    def padded(self, parts: list[bytes], wanted: int | None) -> tuple[bytes, ...]:
        """Close the object in ``parts``, and pad it to ``wanted`` bytes."""
        missing = (wanted or 0) - sum(map(len, parts)) - len(b',"padding":}')
        if missing < 2:
            return (b"".join(parts) + b"}",) if len(parts) < 3 else (*parts[:-1], parts[-1] + b"}")
        return (*parts, b',"padding":', *self.payloads.padding(missing), b"}")


def message_json(draft: Draft, empty_content: bytes) -> bytes:
    """The assistant message; ``empty_content`` is the JSON value for an empty text."""
    parts = [
        b'{"role":"assistant","content":',
        encode(draft.content) if draft.content else empty_content,
        b',"reasoning_content":',
        encode(draft.reasoning) if draft.reasoning else b"null",
    ]
    if draft.calls:
        parts += [b',"tool_calls":', encode(tool_calls(draft))]
    return b"".join(parts) + b"}"


def tool_calls(draft: Draft) -> list[dict[str, object]]:
    """The calls in OpenAI's format, with their indexes."""
    return [
        {
            "id": call.id,
            "index": index,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(draft.calls)
    ]


def deltas(draft: Draft, size: int = 24) -> list[dict[str, object]]:
    """The message as a list of stream deltas."""
    found: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
    for field, text in (("reasoning_content", draft.reasoning or ""), ("content", draft.content)):
        found += [{field: text[at : at + size]} for at in range(0, len(text), size)]
    for index, call in enumerate(draft.calls):
        named = {"name": call.name, "arguments": ""}
        found.append({"tool_calls": [{"id": call.id, "index": index, "type": "function", "function": named}]})
        found += [
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments[at : at + size]}}]}
            for at in range(0, len(call.arguments), size)
        ]
    return found


EVENT_STREAM = b"text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
