"""A finished generation, and the parts of its reply that the dialects share."""

from __future__ import annotations

import codecs
import io
import math
import random
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from msgspec import Raw

from ops.simulator.policy import Draft
from ops.simulator.tokenizer import IM_END, Encoded, Lru, Tokenizer
from ops.simulator.wire import ChatRequest, Config, Experts, Payload, Reply, Request, Sim, encode

_LOGPROBS = 8191
_DELTA = 24
_BLOCK = b"x" * 256 * 2**10
_HOLE = b"\0"
"""Where a payload belongs: JSON has no such byte."""

CHUNK = 8
"""Tokens in an event of a request that does not say it."""

Alternatives = list[tuple[bytes, int]]
"""Logprobs as JSON, and ids."""

R_co = TypeVar("R_co", bound=Request, covariant=True)


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens ``[start, end)`` sampled under one weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation(Generic[R_co]):
    """All data from which a reply is written. ``queued``: SGLang aborted it in its waiting queue. ``seconds`` is the
    time of a whole generation."""

    id: str
    created: int
    request: R_co
    prompt: Encoded
    draft: Draft
    cached_tokens: int
    versions: tuple[Span, ...]
    queued: bool = False
    seconds: float = 0.0

    @property
    def weight_version(self) -> str:
        """The last weight version, which an engine reports."""
        return self.versions[-1].version

    def versions_until(self, tokens: int) -> list[Span]:
        """Those of the first ``tokens`` tokens."""
        return [replace(span, end=min(span.end, tokens)) for span in self.versions if span.start < max(tokens, 1)]

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
        prompt, completion = 0 if self.queued else self.prompt.count, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None if self.queued else {"cached_tokens": self.cached_tokens},
        }

    def head(self, kind: str, prefix: str = "") -> dict[str, object]:
        """What replies and events begin with."""
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.request.model}

    @property
    def ended_itself(self) -> bool:
        """Whether the end token ended the generation, and not a stop string or a limit."""
        return self.draft.finish in ("stop", "tool_calls") and self.draft.stop_text is None


class ReplyWriter:
    """Writes parts of replies. Tables hold the wire form of each token, so that a reply only joins them."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.end_id = tokenizer.special_ids[IM_END]
        self._payloads = Payloads(config.seed)
        self._left_out: list[bytes] = []  # of the reply that is being encoded
        self._encode = msgspec.json.Encoder(enc_hook=self._leave_out).encode
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

    def triples(self, ids: list[int], numbers: list[bytes], texts: bool = True) -> Raw:
        """``[[logprob, id, text], …]`` as in SGLang's ``meta_info``; without ``texts`` null in their places."""
        if not texts:
            return Raw(encode([[Raw(number), token, None] for number, token in zip(numbers, ids, strict=True)]))
        tails = self._triple_tails
        pairs = zip(numbers, ids, strict=True)
        return Raw(b"[" + b",".join([b"[" + number + tails[token] for number, token in pairs]) + b"]")

    def content_logprobs(
        self, ids: list[int], numbers: list[bytes], tops: Sequence[Alternatives] = (), as_ids: bool = False
    ) -> Raw:
        """``{"content": [{token, logprob, bytes, top_logprobs}]}`` as in OpenAI's. With ``as_ids``, tokens are named by
        their ids, as vLLM does: the sampled ones keep the bytes of their text."""
        heads = self._content_heads
        if as_ids:
            sampled = [
                b'{"token":"token_id:%d",%b' % (token, heads[token][heads[token].index(b'"bytes":[') :])
                for token in ids
            ]
        else:
            sampled = [heads[token] for token in ids]
        shown = [b",".join([self._alternative(one, as_ids) for one in top]) for top in tops] or [b""] * len(sampled)
        entries = [b'%b%b,"top_logprobs":[%b]}' % entry for entry in zip(sampled, numbers, shown, strict=True)]
        return Raw(b'{"content":[' + b",".join(entries) + b"]}")

    def _alternative(self, one: tuple[bytes, int], as_ids: bool) -> bytes:
        number, token = one
        if not as_ids:
            return self._content_heads[token] + number + b"}"
        name = b"token_id:%d" % token
        return b'{"token":"%b","logprob":%b,"bytes":%b}' % (name, number, encode(list(name)))

    def alternatives(self, ids: list[int], numbers: list[bytes], count: int) -> list[Alternatives]:
        """The ``count`` most likely tokens at each of these sampled ones, most likely first.

        Its id decides at which place the sampled token is, or that it is behind all of them.
        """
        vocabulary = len(self.tokenizer.texts)
        found = []
        for token, number in zip(ids, numbers, strict=True):
            rank, sampled = token % (count + 1), float(number)
            above = [sampled * (other + 1) / (rank + 2) for other in range(rank)]
            below = [sampled - 0.25 * (other - rank) for other in range(rank, count)]
            row = [
                (repr(logprob).encode(), (token + 7 * (other + 1)) % vocabulary)
                for other, logprob in enumerate([*above, *below][:count])
            ]
            row[rank : rank + 1] = [(number, token)] if rank < count else []
            found.append(row)
        return found

    def prompt_numbers(self, ids: list[int]) -> list[bytes]:
        """A logprob of each of these tokens of a prompt; its first has none, since nothing predicts it."""
        return [repr(-0.125 - 0.001 * (token % 5000)).encode() for token in ids]

    def top_triples(self, tops: Sequence[Alternatives]) -> list[Raw]:
        """A list of triples for each token, as in SGLang's ``output_top_logprobs``."""
        return [self.triples([token for _, token in top], [number for number, _ in top]) for top in tops]

    def prompt_logprobs(self, prompt: Encoded, count: int | None) -> Raw | None:
        """vLLM's ``prompt_logprobs``: for each token an object by id, with the token itself."""
        if count is None:
            return None
        ids = list(prompt.ids())[1:]
        numbers = self.prompt_numbers(ids)
        tops = sampled_first(self.alternatives(ids, numbers, count), ids, numbers)
        return Raw(b"[" + b",".join([b"null", *map(self._by_id, tops)]) + b"]")

    def _by_id(self, row: Alternatives) -> bytes:
        texts = self.tokenizer.json_texts
        entries = [
            b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (token, number, rank, texts[token])
            for rank, (number, token) in enumerate(row, 1)
        ]
        return b"{" + b",".join(entries) + b"}"

    def token_logprobs(
        self, ids: list[int], numbers: list[bytes], counted: bool, tops: Sequence[Alternatives | None], as_ids: bool
    ) -> dict[str, object]:
        """``{"text_offset", "token_logprobs", "tokens", "top_logprobs"}`` of a completion.

        ``numbers`` has ``null`` for a token without a logprob, ``tops`` None, and nothing where no alternatives were
        asked for. With ``counted``, offsets are in characters, else -1. With ``as_ids``, tokens are named by their ids.
        """
        known = len(self.tokenizer.texts)
        lengths = [len(self.tokenizer.texts[token]) if token < known else 0 for token in ids]
        offsets = [0, *accumulate(lengths)][: len(ids)] if counted else [-1] * len(ids)

        def name(token: int) -> bytes:
            if as_ids:
                return b'"token_id:%d"' % token
            return self.tokenizer.json_texts[token] if token < known else b'""'

        shown = [
            b"null" if top is None else b"{%b}" % b",".join([b"%b:%b" % (name(token), number) for number, token in top])
            for top in tops
        ]
        lists = {"token_logprobs": numbers, "tokens": [name(token) for token in ids], "top_logprobs": shown}
        return {"text_offset": offsets, **{what: Raw(b"[%b]" % b",".join(them)) for what, them in lists.items()}}

    def texts_of(self, ids: list[int], size: int) -> list[str]:
        """The text of each ``size`` ids, without an end token; a character that is cut comes with its last byte."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        shown = ids[:-1] if ids[-1:] == [self.end_id] else ids
        pieces = [shown[at : at + size] for at in range(0, len(shown), size)]
        return [decode(b"".join(map(self.tokenizer.token_bytes.__getitem__, piece))) for piece in pieces]

    def chunks(self, generation: Generation[Request]) -> Iterator[tuple[range, str, bool]]:
        """A stream of plain text: the places of each chunk's ids, its text, and whether it is the last."""
        draft, size = generation.draft, generation.sim.chunk_tokens or CHUNK
        said, places = 0, range(len(draft.ids))
        starts, texts = range(0, max(len(draft.ids), 1), size), self.texts_of(draft.ids, size)
        for start, text in zip_longest(starts, texts[: len(starts)], fillvalue=""):
            at = int(start)
            delta = draft.text[said:] if at == starts[-1] else text[: len(draft.text) - said]
            said += len(delta)
            yield places[at : at + size], delta, at == starts[-1]

    def deltas(self, generation: Generation[Request]) -> list[dict[str, object]]:
        """A message in a stream, without the delta that only names the role."""
        draft, size = generation.draft, generation.sim.chunk_tokens
        if size is not None and not (draft.calls or draft.reasoning):
            return [{"content": text} for text in self.texts_of(draft.ids, size)]
        found: list[dict[str, object]] = []
        for field, text in (("reasoning_content", draft.reasoning or ""), ("content", draft.content)):
            found += [{field: text[at : at + _DELTA]} for at in range(0, len(text), _DELTA)]
        for index, call in enumerate(draft.calls):
            named = {"name": call.name, "arguments": ""}
            found.append({"tool_calls": [{"id": call.id, "index": index, "type": "function", "function": named}]})
            found += [
                {"tool_calls": [{"index": index, "function": {"arguments": call.arguments[at : at + _DELTA]}}]}
                for at in range(0, len(call.arguments), _DELTA)
            ]
        return found

    def experts(self, generation: Generation[Request]) -> Payload | None:
        """The ``routed_experts`` value, or ``None`` if it was not requested or its abort came in the queue."""
        request, options = generation.request, generation.sim.experts or Experts()
        if not options.unasked and (not request.return_routed_experts or generation.queued):
            return None
        layers, top_k, experts = self.config.experts
        shape = (options.layers or layers, options.top_k or top_k, options.experts or experts)
        if self.config.dialect == "vllm":
            return self._payload(generation, shape, options, request.routed_experts_prompt_start, "npy")
        return self._payload(generation, shape, options, request.routed_experts_start_len, "raw")

    def indexer(self, generation: Generation[ChatRequest]) -> Payload | None:
        """The ``indexer_topk`` value, or ``None`` if it was not requested."""
        options = generation.sim.indexer_topk
        if not generation.request.return_indexer_topk and options is None:
            return None
        options = options or Experts()
        layers, top_k = self.config.indexer
        return self._payload(generation, (options.layers or layers, options.top_k or top_k, 0), options, 0, "raw")

    def _payload(
        self, generation: Generation[Request], shape: Shape, options: Experts, start: int, form: PayloadForm
    ) -> Payload:
        stop = max(generation.prompt.count + generation.completion_tokens - 1, 0)
        head = generation.prompt.packed[:_HEAD_BYTES] + array("i", generation.draft.ids[:16]).tobytes()
        shift = (zlib.crc32(head[:_HEAD_BYTES]) + options.shift) % _SHIFTS
        return Payload(self._payloads.of(shape, min(start, stop), stop, shift, "nested" if options.nested else form))

    def masks(self, generation: Generation[ChatRequest]) -> list[list[int]] | None:
        """The ids that each sampled token was drawn from, at most ``top_k``, ascending; ``None`` if not requested."""
        request = generation.request
        if not request.return_sampling_mask:
            return None
        known = len(self.tokenizer.texts)
        most = min(request.top_k or known, 64)
        return [
            sorted({(token + number * 31) % known if number else token for number in range(1 + token * 7 % most)})
            for token in generation.draft.ids
        ]

    def _leave_out(self, payload: Payload) -> Raw:
        self._left_out.append(payload.json)
        return Raw(_HOLE)

    def reply(self, generation: Generation[Request], value: Mapping[str, object]) -> Reply:
        """A whole reply, padded to the bytes that its request asks for, with blocks that all replies share."""
        self._left_out.clear()
        first, *rest = self._encode(value).split(_HOLE)
        parts = [first, *(part for pair in zip(self._left_out, rest, strict=True) for part in pair)]
        missing = (generation.sim.body_bytes or 0) - sum(map(len, parts)) - len(b',"padding":')
        if missing < 2:
            return Reply(tuple(parts))
        blocks, over = divmod(missing - 2, len(_BLOCK))
        return Reply((*parts[:-1], parts[-1][:-1], b',"padding":', b'"', *[_BLOCK] * blocks, _BLOCK[:over], b'"', b"}"))


def sampled_first(tops: Sequence[Alternatives], ids: list[int], numbers: list[bytes]) -> list[Alternatives]:
    """As vLLM has them: the sampled token, then the others."""
    pairs = zip(tops, zip(numbers, ids, strict=True), strict=True)
    return [[pair, *[other for other in top if other[1] != pair[1]]] for top, pair in pairs]


def message_of(draft: Draft, empty_content: str | None) -> dict[str, object]:
    """The assistant message; ``empty_content`` stands for an empty text. Calls are in OpenAI's format, with their
    indexes."""
    message: dict[str, object] = {"role": "assistant", "content": draft.content or empty_content}
    message["reasoning_content"] = draft.reasoning or None
    if draft.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "index": index,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(draft.calls)
        ]
    return message


Shape = tuple[int, int, int]
"""Layers, ids for each, and the exclusive bound of an id; 0: ids are positions, bounded by their row."""

PayloadForm = Literal["raw", "npy", "nested"]

_SHIFTS = 997
_HEAD_BYTES = 64
_FIRST_ROWS = 2048
_CACHE_BYTES = 512 * 2**20


class Payloads:
    """Draws replay payloads from tables, and caches their encoded form.

    A row depends on its position and on the beginning of the prompt, which gives the ``shift``, not on the turn. So a
    longer turn of a conversation repeats the rows of the shorter one, as an engine with a warm cache does.
    """

    def __init__(self, seed: int) -> None:
        self._seed = abs(seed)
        self._tables: dict[Shape, npt.NDArray[np.int32]] = {}
        self._encoded: Lru[tuple[Shape, int, int, int, PayloadForm], bytes] = Lru(_CACHE_BYTES)

    def of(self, shape: Shape, start: int, stop: int, shift: int, form: PayloadForm) -> bytes:
        """Rows ``[start, stop)`` of int32 as JSON: base64 of their bytes or of a ``.npy`` file, or nested lists."""
        key = (shape, start, stop, shift, form)
        found = self._encoded.get(key)
        if found is not None:
            return found
        rows = self._rows(shape, start, max(start, stop), shift)
        if form == "nested":
            text = str(rows.tolist()).replace(" ", "").encode()
        else:
            text = b'"' + pybase64.b64encode(_npy(rows) if form == "npy" else rows.tobytes()) + b'"'
        return self._encoded.put(key, text, len(text) + 200)

    def _rows(self, shape: Shape, start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
        layers, top_k, experts = shape
        if experts == 0:  # row r holds positions in [0, r], as sparse attention would select
            row = np.arange(start, stop, dtype=np.int64)[:, None, None]
            cell = np.arange(layers * top_k, dtype=np.int64).reshape(1, layers, top_k)
            return ((row * 7_919 + cell * 104_729 + shift) % (row + 1)).astype("<i4")
        table = self._tables.get(shape)
        if table is None or len(table) < stop + _SHIFTS:
            size = _FIRST_ROWS
            while size < stop + _SHIFTS:
                size *= 2
            rng = np.random.Generator(np.random.PCG64(self._seed))
            first = rng.integers(0, experts, (size, layers, 1), dtype=np.int32)
            table = ((first + np.arange(top_k, dtype=np.int32)) % experts).astype("<i4")
            self._tables[shape] = table
        return table[start + shift : stop + shift]


def _npy(rows: npt.NDArray[np.int32]) -> bytes:
    """An ``.npy`` file of ``rows``."""
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()
