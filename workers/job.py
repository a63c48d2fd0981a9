"""Validates, splits and compresses one engine's reply: a pure function of bytes, in the API process or in a worker.

Payloads and the ids of a prompt are most of a large reply and need not be parsed as JSON. So they are first cut out of
the bytes, where their keys seem to be, and replaced by marks; what is left is parsed in compact spelling. If that is
refused, or a mark is not found where its value belongs, the whole reply is parsed as it is: what that says counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from workers import codec, payloads, sampling_masks, scan
from workers.codec import TOKEN_BYTES, Cut, Exchange, StoredTokens
from workers.join_text import whole_message
from workers.parse import REPLAY, Parsed, PromptDiffers, Rejected, parse_reply
from workers.parse_parts import NAMES
from workers.parse_prompt import LONG_PROMPT, PROMPT, KnownText, Prompt
from workers.reply import Job, PayloadRange, Read, ValidatedReply
from workers.scan import WINDOW

_PROMPT_MARK = b'"@turnlog:ids@"'

COPIES = 2
"""How often a payload may occur in a reply: some SGLang builds sent it in both `meta_info` and `sglext`."""

_PROMPT_KEY = b'"prompt_token_ids"'
_KEYS = [(kind, b'"%b"' % name.encode()) for kind in REPLAY for name in {of[kind]: None for of in NAMES.values()}]


class _Choice(msgspec.Struct, gc=False):
    message: msgspec.Raw


class _Messages(msgspec.Struct, gc=False):
    choices: list[_Choice]


_JOB = msgspec.msgpack.Decoder(Job)
_DONE = msgspec.msgpack.Decoder(ValidatedReply)
_MESSAGES = msgspec.json.Decoder(_Messages)


def run(job: bytes | memoryview, body: memoryview) -> bytes:
    """`work` as a worker runs it, from bytes to bytes. Raises Rejected."""
    return msgspec.msgpack.encode(work(_JOB.decode(job), body))


def encode(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def decode_done(result: bytes) -> ValidatedReply:
    return _DONE.decode(result)


def work(job: Job, body: bytes | memoryview) -> ValidatedReply:
    """A valid reply, ready to be committed. Raises Rejected, naming the first rule that the reply breaks."""
    return read(job, body)[0]


def read(job: Job, body: bytes | memoryview, known: KnownText | None = None, found: LongValues | None = None) -> Read:
    """As `work`; and what makes the text of all tokens, if the prompt's ids are long.

    `known`: the text of `job.known`, if it is in memory. `found`: the body's long values, if they were looked for.
    """
    for cut, is_guess in _attempts(body, known, found):
        try:
            source = _cut_out(job, body, known, cut)
            parsed, values = _parsed(job, source)
        except Rejected as error:
            if isinstance(error, PromptDiffers) and not is_guess:
                raise
            continue  # What was cut out may be the cause.
        try:
            return _committed(job, body, source, parsed, values)
        except Rejected:
            # A text with a backslash may have been cut short, or has to be read without it.
            has_escapes = any(find(body, b"\\", place.start, stop=place.end) >= 0 for place in cut.payloads)
            if not is_guess and not has_escapes:
                raise
    return read_whole(job, body)


def _attempts(
    body: bytes | memoryview, known: KnownText | None, found: LongValues | None
) -> Iterator[tuple[LongValues, bool]]:
    """What to cut out, until the rules accept it, and whether its payloads' ends are guessed."""
    if found is None and isinstance(body, memoryview):
        yield find_long_values(body, known, at_end=True), True
    found = found or find_long_values(body, known)
    yield found, False
    if found.payloads and found.prompt is not None and found.prompt.end - found.prompt.start <= LONG_PROMPT:
        yield found._replace(prompt=None), False


def read_short(job: Job, body: bytes, known: KnownText | None) -> Read | None:
    """As `read`, of a reply to a job without payloads; None if it has some or is refused."""
    try:
        source = _cut_out(job, body, known, LongValues([], *_prompt(body, len(body), known)))
        return _committed(job, body, source, *_parsed(job, source))
    except Rejected:
        return None


def read_whole(job: Job, body: bytes | memoryview) -> Read:
    """As `read`, with nothing cut out."""
    source = _Source(bytes(body), True, {})
    return _committed(job, body, source, *_parsed(job, source))


class LongValues(NamedTuple):
    """What seems to be the payloads' values and the prompt's ids. These begin with `begun`."""

    payloads: list[PayloadRange]
    prompt: PayloadRange | None
    begun: KnownText | None = None

    @property
    def base64_bytes(self) -> int:
        """The bytes of the payloads that are texts."""
        return sum(place.end - place.start for place in self.payloads if not place.is_list)


def find_long_values(body: bytes | memoryview, known: KnownText | None = None, *, at_end: bool = False) -> LongValues:
    """The long values of a body. What comes first is not searched for what comes later: both may have megabytes.

    `known`: what the prompt's ids may begin with. `at_end`: a text is taken to end at the first quote in the last
    WINDOW of the body. That is right of a long one in a usual reply, and where it is not, its content shows it.
    """
    prompt, begun = _prompt(body, min(WINDOW, len(body)), known)
    found: list[PayloadRange] = []
    gaps = [prompt] if prompt is not None and prompt.end - prompt.start > LONG_PROMPT else []
    for kind, key in _KEYS:
        at = 0
        for _ in range(COPIES):
            at = find(body, key, at, gaps)
            place = None if at < 0 else _value(body, kind, at + len(key), at_end)
            if place is None:
                break
            found.append(place)
            gaps = sorted([*gaps, place], key=lambda place: place.start)
            at = place.end
    if prompt is None and len(body) > WINDOW:
        prompt, begun = _prompt(body, len(body), known, gaps)
    return LongValues(found, prompt, begun)


def _prompt(
    body: bytes | memoryview, stop: int, known: KnownText | None, gaps: Sequence[PayloadRange] = ()
) -> tuple[PayloadRange | None, KnownText | None]:
    """The first list under the prompt's key, if that ends before `stop`; and `known`, if it begins so."""
    at = 0
    for _ in range(COPIES):
        at = find(body, _PROMPT_KEY, at, gaps, stop)
        if at < 0:
            break
        at += len(_PROMPT_KEY)
        start, value = _value_start(body, at)
        if value.startswith(b"["):
            begun = known if known is not None and known.begins(body, start + 1) else None
            end = find(body, b"]", start + 1 + (0 if begun is None else begun.known.text_bytes)) + 1
            return (PayloadRange(PROMPT, start, end, True), begun) if end else (None, None)
    return None, None


def _value_start(body: bytes | memoryview, key_end: int) -> tuple[int, bytes]:
    """Where the value behind a key begins, and its first bytes; none if that is no key."""
    following = bytes(body[key_end : key_end + 16])
    value = following.lstrip(b" \t\r\n")
    value = value[1:].lstrip(b" \t\r\n") if value.startswith(b":") else b""
    return key_end + len(following) - len(value), value


def _value(body: bytes | memoryview, kind: str, key_end: int, at_end: bool) -> PayloadRange | None:
    """The text or list behind a key."""
    start, value = _value_start(body, key_end)
    if value.startswith(b'"'):
        end = find(body, b'"', max(start + 1, len(body) - WINDOW) if at_end else start + 1) + 1
    elif value.startswith(b"["):
        closing = b"]" * (len(value) - len(value.lstrip(b"[")))
        end = find(body, closing, start) + len(closing)
    else:
        return None
    return PayloadRange(kind, start, end, value.startswith(b"[")) if end > start else None


def find(
    body: bytes | memoryview, needle: bytes, start: int, gaps: Sequence[PayloadRange] = (), stop: int | None = None
) -> int:
    """Position of `needle` in the body between `start` and `stop`, or -1. `gaps`, in order, have no part of it."""
    if isinstance(body, bytes) and not gaps:
        return body.find(needle, start, stop)
    stop = len(body) if stop is None else stop
    for end, behind in [*((gap.start, gap.end) for gap in gaps), (stop, 0)]:
        if isinstance(body, bytes):
            if (place := body.find(needle, start, end)) >= 0:
                return place
        else:
            # Shared memory has no fast search.
            for at in range(start, end, WINDOW):
                if (place := bytes(body[at : min(at + WINDOW + len(needle) - 1, end)]).find(needle)) >= 0:
                    return at + place
        start = max(start, behind)
    return -1


class _CutPrompt(NamedTuple):
    """The prompt's ids that are at `place` in the body, with `separator` between them; `prompt.text` is their mark."""

    prompt: Prompt
    place: PayloadRange
    separator: str


class _Source(NamedTuple):
    """What is parsed of a reply: all of its text, or the text with `marks` in place of payloads and of the prompt's
    ids."""

    text: bytes
    is_whole: bool
    marks: dict[bytes, PayloadRange]
    prompt: _CutPrompt | None = None


def _cut_out(job: Job, body: bytes | memoryview, known: KnownText | None, found: LongValues) -> _Source:
    """Raises Rejected where something cannot be cut out."""
    kinds = [spec.kind for spec in job.payload_specs]
    places = [place for place in found.payloads if place.kind in kinds]
    cut = None
    if found.prompt is not None and job.dialect != "openai":
        cut = _cut_prompt(job, body, found.prompt, found.begun, known)
    if cut is not None:
        places.append(cut.place)
    places.sort(key=lambda place: place.start)
    marks: dict[bytes, PayloadRange] = {}
    parts: list[bytes | memoryview] = []
    done = 0
    for number, place in enumerate(places):
        mark = _PROMPT_MARK if place is found.prompt else b'"@turnlog:%d@"' % number
        if mark is not _PROMPT_MARK:
            marks[mark] = place
        if place.start < done:
            raise Rejected("a long value begins in another")
        parts += [body[done : place.start], mark]
        done = place.end
    text = b"".join((*parts, body[done:]))
    if text.count(b'"@turnlog:') != len(places):
        raise Rejected("a text looks like a mark")
    return _Source(text, False, marks, cut)


def _cut_prompt(
    job: Job, body: bytes | memoryview, place: PayloadRange, begun: KnownText | None, known: KnownText | None
) -> _CutPrompt | None:
    """Reads the ids at this place in the body. None if they stay in the text: what is no sound list, or one that is
    spelled so that it could not be restored."""
    start = place.start + 1 + (0 if begun is None else begun.known.text_bytes)
    spelled = scan.bare_ids(bytes(body[start : place.end - 1]))
    if begun is not None and (spelled is None or spelled.separator != ","):
        begun, spelled = None, scan.bare_ids(bytes(body[place.start + 1 : place.end - 1]))
    # What is known ends with a comma, behind which a list has a further id.
    if spelled is None or spelled.text[-1:] == b"," or (begun is not None and not spelled.text):
        return None
    inner = spelled.text + b"," if spelled.text else b""
    if begun is None and known is not None and known.begins(inner, 0):
        begun, inner = known, inner[known.known.text_bytes :]
    if job.sent and (begun is not None or inner != job.sent):
        return None
    try:
        prompt = Prompt(_PROMPT_MARK, inner, PROMPT, job.known, begun)
    except Rejected:
        return None
    return _CutPrompt(prompt, place, spelled.separator) if prompt.tokens > 1 else None


class _Value(NamedTuple):
    """A payload's value: its place in the body, and [start, end) of its mark or text in the source's text."""

    place: PayloadRange
    start: int
    end: int


class _Edit(NamedTuple):
    """[start, end) of the source's text is replaced by `replacement`; no `cut`: it was the prompt's ids."""

    start: int
    end: int
    cut: Cut | None
    replacement: bytes = b""


def _parsed(job: Job, source: _Source) -> tuple[Parsed, list[_Value]]:
    """The reply and its payloads' values. Raises Rejected, also if what was cut out does not belong where it stood."""
    text = compact = source.text
    if not source.is_whole and scan.is_spaced(text):
        try:
            compact = msgspec.json.format(text, indent=-1)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Rejected("not JSON that can be spelled anew") from error
    cut = None if source.prompt is None else source.prompt.prompt
    asked = (job.dialect, job.known, job.protocol, job.sent or None, job.is_part)
    parsed = parse_reply(compact, *asked, cut, job.wish, is_cut=not source.is_whole)
    if cut is not None and parsed.prompt_text is not cut.text:
        raise Rejected("the ids that were cut out are not the prompt's")
    if compact is not text and job.protocol == "chat":
        message = bytes(_MESSAGES.decode(text).choices[0].message)
        parsed = msgspec.structs.replace(parsed, message=message)
    if compact is not text and cut is None:
        parsed = msgspec.structs.replace(parsed, prompt_text=b"")  # They are spelled otherwise in the text.
    return parsed, _values(parsed, source)


def _committed(job: Job, body: bytes | memoryview, source: _Source, parsed: Parsed, values: Sequence[_Value]) -> Read:
    """What is committed of a reply. Raises Rejected."""
    text, cut, message = source.text, source.prompt, parsed.message
    stored, edits = _payloads(job, memoryview(body), parsed, values, source.is_whole)
    suffix_tokens, output_tokens = len(parsed.suffix_ids) // TOKEN_BYTES, len(parsed.output_ids) // TOKEN_BYTES
    separator, place, known_text = None, None, None
    if cut is not None:
        separator = cut.separator
        if cut.place.end - cut.place.start > LONG_PROMPT:
            place = cut.place
            known_text = None if job.sent else partial(cut.prompt.known_text, parsed.sequence)
    elif parsed.prompt_text:
        separator = codec.prompt_ids_separator(parsed.prompt_text, parsed.base + suffix_tokens)
    if cut is not None:
        start = text.index(parsed.prompt_text)
        edits.append(_Edit(start, start + len(parsed.prompt_text), None))
    elif separator is not None:
        edits += _prompt_edit(text, parsed.prompt_text, edits)
    if parsed.counts is not None:
        suffix_tokens, output_tokens = parsed.counts
    rest = b""
    if job.beginning:
        message, rest = whole_message(job.beginning, message), message
    reply, cuts, ids_at = _without(text, edits)
    token_frame, exchange = codec.pack_turn(
        Exchange(
            messages=job.messages,
            message=message,
            reply=reply,
            headers=job.headers,
            status=job.status,
            prompt_ids_at=ids_at,
            separator=separator or ",",
            rid=job.rid,
            own=job.own,
            cuts=cuts,
            ids_field=job.ids_field,
            tokens=StoredTokens(parsed.suffix_ids, parsed.output_ids, parsed.logprobs, parsed.top),
            beginning=job.beginning,
        )
    )
    result = ValidatedReply(
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
        places=[value.place for value in values],
        cached_tokens=parsed.cached_tokens,
        output_ids=parsed.output_ids,
        miscounted=parsed.miscounted,
        speculative=parsed.speculative,
        logprobs_of=parsed.logprobs_of,
        prompt=place,
        rest=rest,
    )
    return result, known_text


def _values(parsed: Parsed, source: _Source) -> list[_Value]:
    """The payloads in the parser's order. Raises Rejected if they are not just the marks."""
    text, marks = source.text, dict(source.marks)
    values: list[_Value] = []
    for kind, raw in parsed.payloads:
        if source.is_whole:
            [(start, end)] = scan.places_in(text, (raw,))
            values.append(_Value(PayloadRange(kind, start, end), start, end))
            continue
        mark = bytes(raw)
        place = marks.pop(mark, None)
        if place is None or place.kind != kind:
            raise Rejected(f"{kind} was not cut out")
        start = text.index(mark)
        values.append(_Value(place, start, start + len(mark)))
    if marks:
        raise Rejected("what was cut out is no payload")
    return values


def _payloads(
    job: Job, body: memoryview, parsed: Parsed, values: Sequence[_Value], is_whole: bool
) -> tuple[list[payloads.StoredPayload], list[_Edit]]:
    """The payloads that were asked for, and what becomes of their values in the text. Raises Rejected."""
    stored: list[payloads.StoredPayload] = []
    edits: list[_Edit] = []
    for spec in job.payload_specs:
        own = [value for value in values if value.place.kind == spec.kind]
        if not own:
            is_there = parsed.output_ids and not parsed.was_queued
            if spec.required and is_there and (parsed.dialect, spec.kind) != ("vllm", "indexer_topk"):
                raise Rejected(f"{spec.kind} was asked for and is not there")
            continue
        text = body[own[0].place.start : own[0].place.end]
        if any(body[value.place.start : value.place.end] != text for value in own[1:]):
            raise Rejected(f"{spec.kind} is there twice, with different values")
        plain = _unescaped(text) if is_whole else text
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
        edits += [_Edit(value.start, value.end, cut, replacement) for value in own]
    return stored, edits


def _unescaped(text: memoryview) -> memoryview:
    """The JSON string without escapes, which base64 may contain."""
    if bytes(text[:1]) != b'"' or b"\\" not in bytes(text):
        return text
    return memoryview(b'"' + msgspec.json.decode(text, type=str).encode() + b'"')


def _prompt_edit(text: bytes, prompt: bytes, edits: list[_Edit]) -> list[_Edit]:
    """The first occurrence of the prompt's text that no other edit touches; any of them can be restored."""
    at = scan.find(text, prompt)
    while at >= 0:
        end = at + len(prompt)
        if all(end <= edit.start or at >= edit.end for edit in edits):
            return [_Edit(at, end, None)]
        at = scan.find(text, prompt, at + 1)
    return []


def _without(text: bytes, edits: list[_Edit]) -> tuple[bytes, list[Cut], int | None]:
    """The text after these edits, and where in it the payloads and the prompt's ids belong."""
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
    return b"".join((*parts, text[done:])), cuts, ids_at
