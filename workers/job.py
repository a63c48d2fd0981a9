"""Validates, splits and compresses one engine's reply: a pure function of bytes, in the API process or in a worker.

A reply of the usual shape is read by `light`, without its payload; what follows is for all others.
Payloads and the ids of a long prompt are most of a large reply and need not be parsed as JSON. So they are first cut
out of the bytes, where their keys seem to be, and replaced by marks. If a mark is not found where its value belongs,
the whole reply is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from workers import codec, light, payloads, sampling_masks, scan
from workers.codec import TOKEN_BYTES, Cut, Exchange, StoredTokens
from workers.parse import REPLAY, Parsed, PromptDiffers, Rejected, parse_reply
from workers.parse_parts import NAMES
from workers.parse_prompt import LONG_PROMPT, PROMPT, CutPrompt, KnownText, Prompt
from workers.prefill import whole_message
from workers.reply import Job, PayloadRange, ValidatedReply

WINDOW = 64 << 10
"""Bytes searched at a time: shared memory has no fast search; a copy that fits the processor's cache has."""

HEAD = 4 * WINDOW
"""In a reply of the usual shape the payload begins within so many bytes, and ends within the last WINDOW."""

_ROWS_TEXT = b'"routed_experts":"'

COPIES = 2
"""How often a payload may occur in a reply: some SGLang builds sent it in both `meta_info` and `sglext`."""


class LongValues(NamedTuple):
    """What seems to be the payloads' values and the prompt's ids, if these are long. The ids begin with `begun`, and
    have others after it."""

    payloads: list[PayloadRange]
    prompt: PayloadRange | None
    begun: KnownText | None = None

    @property
    def base64_bytes(self) -> int:
        """The bytes of the payloads that are texts."""
        return sum(place.end - place.start for place in self.payloads if not place.is_list)


def find_long_values(body: memoryview, known: KnownText | None = None) -> LongValues:
    """The long values of a body. What comes first is not searched for what comes later: both may have megabytes.

    `known`: what the prompt's ids may begin with; it is only looked for in a `bytes` object.
    """
    if known is not None and isinstance(body.obj, bytes):
        prompt = _known_prompt(body.obj, known)
        if prompt is not None:
            return LongValues(_payloads(body, prompt), prompt, known)
    prompt = _prompt(body, WINDOW) if len(body) > LONG_PROMPT else None
    payloads = _payloads(body, prompt)
    if prompt is None and len(body) > WINDOW:
        largest = max(payloads, key=lambda place: place.end - place.start, default=None)
        prompt = _prompt(body, len(body), largest)
    return LongValues(payloads, prompt)


def _prompt(body: memoryview, stop: int, largest: PayloadRange | None = None) -> PayloadRange | None:
    """The first list that looks like a prompt's ids and whose key ends before `stop`, if it is long and has no white
    space: it has only digits and commas, or what no list of ids may have (`-`, `.`, `/`)."""
    at, gaps = 0, [] if largest is None else [largest]
    for _ in range(COPIES):
        key = find(body[:stop], f'"{PROMPT}"'.encode(), at, gaps)
        if key < 0:
            return None
        place = _value(body, PROMPT, key, PROMPT)
        if place is not None and place.end - place.start > LONG_PROMPT:
            is_flat = place.is_list and scan.is_flat_ids(body[place.start : place.end])
            return place if is_flat else None
        at = key + 1
    return None


def _known_prompt(body: bytes, known: KnownText) -> PayloadRange | None:
    """The first list under the prompt's key, if it begins with these ids and has others."""
    key = body.find(f'"{PROMPT}"'.encode(), 0, WINDOW)
    start, value = _value_start(memoryview(body), PROMPT, key)
    if key < 0 or not value.startswith(b"[") or not known.begins(body, start + 1):
        return None
    rest = start + 1 + known.known.text_bytes
    end = body.find(b"]", rest) + 1
    is_flat = end - 1 > rest and scan.is_flat_ids(memoryview(body)[rest - 1 : end])
    return PayloadRange(PROMPT, start, end, True) if is_flat else None


def _payloads(body: memoryview, prompt: PayloadRange | None) -> list[PayloadRange]:
    """The values after what looks like a payload's key. No key is looked for in the prompt's ids and in another
    payload: that would take more time than anything else."""
    gaps = [] if prompt is None else [prompt]
    for kind in REPLAY:
        for name in {names[kind]: None for names in NAMES.values()}:
            gaps = sorted([*gaps, *_payloads_of(body, kind, name, gaps)], key=lambda place: place.start)
    return sorted([place for place in gaps if place is not prompt], key=lambda place: REPLAY.index(place.kind))


def _payloads_of(body: memoryview, kind: str, name: str, gaps: Sequence[PayloadRange]) -> Iterator[PayloadRange]:
    at = 0
    for _ in range(COPIES):
        key = find(body, f'"{name}"'.encode(), at, gaps)
        place = None if key < 0 else _value(body, kind, key, name)
        if place is None:
            return
        yield place
        at = place.end


def _value_start(body: memoryview, name: str, key: int) -> tuple[int, bytes]:
    """Where the value of the key that begins at `key` begins, and its first bytes; none if it is no key."""
    key_end = key + len(name) + 2
    following = bytes(body[key_end : key_end + 16])
    value = following.lstrip(b" \t\r\n")
    value = value[1:].lstrip(b" \t\r\n") if value.startswith(b":") else b""
    return key_end + len(following) - len(value), value


def _value(body: memoryview, kind: str, key: int, name: str) -> PayloadRange | None:
    """The value of the key `name` that begins at `key`."""
    start, value = _value_start(body, name, key)
    if value.startswith(b'"'):
        end = find(body, b'"', start + 1) + 1
    elif value.startswith(b"["):
        closing = b"]" * (len(value) - len(value.lstrip(b"[")))
        end = find(body, closing, start) + len(closing)
    else:
        return None
    return PayloadRange(kind, start, end, value.startswith(b"[")) if end > start else None


def find(body: memoryview, needle: bytes, start: int, gaps: Sequence[PayloadRange] = ()) -> int:
    """Position of `needle` in the body from `start` on, or -1. `gaps`, in order, have no part of it."""
    for end, behind in [*((gap.start, gap.end) for gap in gaps), (len(body), 0)]:
        for at in range(start, end, WINDOW):
            place = bytes(body[at : min(at + WINDOW + len(needle) - 1, end)]).find(needle)
            if place >= 0:
                return at + place
        start = max(start, behind)
    return -1


_JOB = msgspec.msgpack.Decoder(Job)
_DONE = msgspec.msgpack.Decoder(ValidatedReply)


def run(job: bytes | memoryview, body: memoryview) -> bytes:
    """`work` as a worker runs it, from bytes to bytes. Raises Rejected."""
    return msgspec.msgpack.encode(work(_JOB.decode(job), body))


def encode(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def decode_done(result: bytes) -> ValidatedReply:
    return _DONE.decode(result)


def work(job: Job, body: memoryview) -> ValidatedReply:
    """A valid reply, ready to be committed. Raises Rejected, naming the first rule that the reply breaks."""
    read = work_usual(job, body)
    if read is None:
        long_values = find_long_values(body)
        read = None if long_values.payloads else light.read(job, bytes(body), None)
        read = read or work_whole(job, body, long_values)
    return read[0]


def work_usual(job: Job, body: memoryview, known: KnownText | None = None) -> light.Read | None:
    """The result for a reply of the usual shape with `routed_experts` as one text; None if other rules must decide.

    The text is decoded before anything is believed of it: so where it ends may be guessed.
    """
    key = find(body[:HEAD], _ROWS_TEXT, 0)
    if key < 0 or not any(spec.kind == light.ROWS for spec in job.payload_specs):
        return None
    start = key + len(_ROWS_TEXT) - 1
    tail = max(start + 1, len(body) - WINDOW)
    end = tail + bytes(body[tail:]).find(b'"') + 1
    if end == tail:
        return None
    rest = b"".join((body[:start], b'""', body[end:]))
    return light.read(job, rest, known, light.CutRows(start, body[start:end]))


def work_whole(job: Job, body: memoryview, long_values: LongValues | None = None) -> light.Read:
    """As `work`, by all rules; and what makes the text of all tokens, if the prompt's ids are long and plain.

    `long_values`: those of the body, if they were looked for.
    """
    reply = _parsed(job, body, long_values)
    result = _result(job, body, reply)
    if reply.read is None or reply.separator != "," or job.sent:
        return result, None
    return result, partial(reply.read.known_text, result.sequence)


def _result(job: Job, body: memoryview, reply: _Reply) -> ValidatedReply:
    parsed = reply.parsed
    stored: list[payloads.StoredPayload] = []
    edits: list[_Edit] = []
    for spec in job.payload_specs:
        values = [value for value in reply.values if value.place.kind == spec.kind]
        if not values:
            is_there = parsed.output_ids and not parsed.was_queued
            if spec.required and is_there and (parsed.dialect, spec.kind) != ("vllm", "indexer_topk"):
                raise Rejected(f"{spec.kind} was asked for and is not there")
            continue
        text = body[values[0].place.start : values[0].place.end]
        if any(body[value.place.start : value.place.end] != text for value in values[1:]):
            raise Rejected(f"{spec.kind} is there twice, with different values")
        plain = text if reply.marked else _unescaped(text)
        base, tokens = parsed.base, parsed.sequence.tokens
        if spec.kind == sampling_masks.KIND:
            prompt_tokens = tokens - len(parsed.output_ids) // TOKEN_BYTES
            payload, cut = sampling_masks.read(plain, spec, base, prompt_tokens, parsed.output_ids)
        else:
            payload, cut = payloads.read(plain, spec, base, tokens, npy=parsed.dialect == "vllm")
        if plain is not text:
            cut = Cut(spec.kind, 0, "text", len(text))
        stored.append(payload)
        replacement = bytes(text) if cut.form == "text" else b""
        edits += [_Edit(value.start, value.end, cut, replacement) for value in values]
    suffix_tokens, output_tokens = len(parsed.suffix_ids) // TOKEN_BYTES, len(parsed.output_ids) // TOKEN_BYTES
    if parsed.counts is not None:
        suffix_tokens, output_tokens = parsed.counts
    message, rest = parsed.message, b""
    if job.beginning:
        message, rest = whole_message(job.beginning, parsed.message), parsed.message
    token_frame, exchange = codec.pack_turn(_exchange(job, reply, message, edits, parsed.base + suffix_tokens))
    return ValidatedReply(
        dialect=parsed.dialect,
        message=message,
        base=parsed.base,
        suffix_tokens=suffix_tokens,
        output_tokens=output_tokens,
        sequence=parsed.sequence,
        finish_reason=parsed.finish_reason,
        weight_versions=tuple(parsed.weight_versions),
        tokens=token_frame,
        exchange=exchange,
        payloads=stored,
        places=[value.place for value in reply.values],
        cached_tokens=parsed.cached_tokens,
        output_ids=parsed.output_ids if job.sent else b"",
        miscounted=parsed.miscounted,
        speculative=parsed.speculative,
        logprobs_of=parsed.logprobs_of,
        prompt=reply.prompt,
        rest=rest,
    )


def _unescaped(text: memoryview) -> memoryview:
    """The JSON string without escapes, which base64 may contain."""
    if bytes(text[:1]) != b'"' or b"\\" not in bytes(text):
        return text
    return memoryview(b'"' + msgspec.json.decode(text, type=str).encode() + b'"')


class _Value(NamedTuple):
    """A payload's value: its place in the body, and [start, end) of its mark or text in the parsed text."""

    place: PayloadRange
    start: int
    end: int


class _Reply(NamedTuple):
    """A parsed reply: `text` is the parsed text, in which marks replace the payloads if `marked`. `prompt_mark` is the
    mark that replaces the prompt's ids, which are at `prompt` in the body with `separator` between them, and were read
    by `read`; it is empty if they are in the text."""

    parsed: Parsed
    text: bytes
    values: list[_Value]
    marked: bool
    prompt_mark: bytes = b""
    separator: str | None = None
    prompt: PayloadRange | None = None
    read: Prompt | None = None


def _parsed(job: Job, body: memoryview, long_values: LongValues | None) -> _Reply:
    kinds = [spec.kind for spec in job.payload_specs]
    places, prompt, begun = long_values or find_long_values(body)
    places = [place for place in places if place.kind in kinds]
    places = sorted(places if prompt is None else [*places, prompt], key=lambda place: place.start)
    cuts = [] if not places else [None] if begun is None else [begun, None]
    for cut in cuts:
        try:
            reply = _without(job, body, places, prompt, cut)
            if reply is not None:
                return reply
        except PromptDiffers:
            raise
        except Rejected:
            # The cut may be the cause: cut less, or parse the whole reply, to decide.
            pass
    text = bytes(body)
    parsed = _parse_text(job, text)
    whole = [_place(text, kind, raw) for kind, raw in parsed.payloads]
    return _Reply(parsed, text, [_Value(place, place.start, place.end) for place in whole], marked=False)


def _without(
    job: Job, body: memoryview, places: list[PayloadRange], prompt: PayloadRange | None, begun: KnownText | None
) -> _Reply | None:
    """The reply parsed with marks in these places, of which `prompt` is one, which begins with `begun`; None if one is
    not where it belongs.

    Raises as `parse_reply`.
    """
    text = _marked(body, places)
    cut = None
    if prompt is not None:
        mark, known_bytes = _mark(places.index(prompt)), 0 if begun is None else begun.known.text_bytes
        cut = CutPrompt(mark, b"[" + body[prompt.start + 1 + known_bytes : prompt.end], begun)
        if text.count(cut.mark) != 1:
            return None
    parsed = _parse_text(job, text, cut)
    values = _values(parsed, text, places, body, prompt)
    if values is None or cut is None:
        return None if values is None else _Reply(parsed, text, values, marked=True)
    separator = codec.prompt_ids_separator(cut.text, 2) if parsed.prompt_text is cut.text else None
    return None if separator is None else _Reply(parsed, text, values, True, cut.mark, separator, prompt, cut.prompt)


def _parse_text(job: Job, text: bytes, cut: CutPrompt | None = None) -> Parsed:
    return parse_reply(text, job.dialect, job.known, job.protocol, job.sent or None, job.is_part, cut, job.wish)


def _mark(number: int) -> bytes:
    return f'"@turnlog:{number}@"'.encode()


def _marked(body: memoryview, places: list[PayloadRange]) -> bytes:
    """The body with each of these places, in order, replaced by a mark."""
    parts: list[bytes | memoryview] = []
    done = 0
    for number, place in enumerate(places):
        if place.start < done:
            return bytes(body)
        parts += [body[done : place.start], _mark(number)]
        done = place.end
    return b"".join((*parts, body[done:]))


def _values(
    parsed: Parsed, text: bytes, places: list[PayloadRange], body: memoryview, prompt: PayloadRange | None
) -> list[_Value] | None:
    """The payloads in the parser's order, if they are just the marks but the prompt's. A backslash means that a string
    was cut short."""
    marks = {_mark(number): place for number, place in enumerate(places) if place is not prompt}
    values: list[_Value] = []
    for kind, raw in parsed.payloads:
        mark = bytes(raw)
        place = marks.pop(mark, None)
        if place is None or place.kind != kind or text.count(mark) != 1:
            return None
        if find(body[place.start : place.end], b"\\", 0) >= 0:
            return None
        start = text.index(mark)
        values.append(_Value(place, start, start + len(mark)))
    return None if marks else values


def _place(text: bytes, kind: str, raw: msgspec.Raw) -> PayloadRange:
    """The position of a raw value, which is a view into the text."""
    [(start, end)] = scan.places_in(text, (raw,))
    return PayloadRange(kind, start, end)


class _Edit(NamedTuple):
    """[start, end) of the parsed text is replaced by `replacement`; no `cut`: it was the prompt's ids."""

    start: int
    end: int
    cut: Cut | None
    replacement: bytes = b""


def _prompt_edit(text: bytes, prompt: bytes, edits: list[_Edit]) -> list[_Edit]:
    """The first occurrence of the prompt's text, or mark, that no other edit touches; any of them can be restored."""
    at = scan.find(text, prompt)
    while at >= 0:
        end = at + len(prompt)
        if all(end <= edit.start or at >= edit.end for edit in edits):
            return [_Edit(at, end, None)]
        at = scan.find(text, prompt, at + 1)
    return []


def _exchange(job: Job, reply: _Reply, message: bytes, edits: list[_Edit], prompt_tokens: int) -> Exchange:
    """The stored form of the reply, without what is stored elsewhere."""
    text, prompt = reply.text, reply.parsed.prompt_text
    separator = reply.separator
    if prompt and not reply.prompt_mark:
        separator = codec.prompt_ids_separator(prompt, prompt_tokens)
    if separator is not None:
        edits = [*edits, *_prompt_edit(text, reply.prompt_mark or prompt, edits)]
    parts: list[bytes] = []
    cuts: list[Cut] = []
    ids_at = None
    length = done = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        length += edit.start - done
        if edit.cut is None:
            ids_at = length
        else:
            cuts.append(msgspec.structs.replace(edit.cut, at=length))
        length += len(edit.replacement)
        parts += [text[done : edit.start], edit.replacement]
        done = edit.end
    return Exchange(
        messages=job.messages,
        message=message,
        reply=b"".join((*parts, text[done:])),
        headers=job.headers,
        status=job.status,
        prompt_ids_at=ids_at,
        separator=separator or ",",
        rid=job.rid,
        own=job.own,
        cuts=cuts,
        ids_field=job.ids_field,
        tokens=StoredTokens(reply.parsed.suffix_ids, reply.parsed.output_ids, reply.parsed.logprobs, reply.parsed.top),
        beginning=job.beginning,
    )
