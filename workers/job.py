"""Validates, splits and compresses one engine's reply: a pure function of bytes, in the API process or in a worker.

Payloads and the ids of a prompt are most of a reply and need not be parsed as JSON: to skip a list costs the decoder as
much as to read it. So they are first cut out of the bytes, where their keys seem to be, and replaced by marks; what is
left is parsed in compact spelling. If that is refused, or a mark is not found where its value belongs, the whole reply
is parsed as it is: what that says counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec

from workers import codec, payloads, sampling_masks, scan
from workers.codec import Cut, Exchange
from workers.join_text import whole_message
from workers.parse import Parsed, PromptDiffers, Rejected, parse_reply
from workers.parse_prompt import LONG_PROMPT, PROMPT, KnownText, Prompt
from workers.reply import MARK, NAMES, REPLAY, Job, PayloadRange, Read, ValidatedReply
from workers.scan import WINDOW

_PROMPT_MARK = MARK + b'ids@"'

COPIES = 2
"""How often a payload may occur in a reply: some SGLang builds sent it in both `meta_info` and `sglext`."""

_PROMPT_KEY = b'"prompt_token_ids"'
_KEYS = [(kind, b'"%b"' % name.encode()) for kind in REPLAY for name in {of[kind]: None for of in NAMES.values()}]


class _Value(NamedTuple):
    """A payload's value: its place in the body, and [start, end) of its mark or text in the text that was parsed."""

    place: PayloadRange
    start: int
    end: int


class _Edit(NamedTuple):
    """[start, end) of the text that was parsed is replaced; no cut: it was the prompt's ids."""

    start: int
    end: int
    cut: Cut | None
    replacement: bytes


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
    """A valid reply, ready to be committed. Raises Rejected, naming a rule that the reply breaks."""
    return read(job, body).reply


def read(job: Job, body: bytes | memoryview, known: KnownText | None = None, found: LongValues | None = None) -> Read:
    """As `work`, with what else is known of the reply.

    `known`: the text of `job.known`, if it is in memory. `found`: the body's long values, if they were looked for.
    """
    done = read_cut(job, body, known, found)
    return read_whole(job, body) if done is None else done


def read_cut(
    job: Job, body: bytes | memoryview, known: KnownText | None = None, found: LongValues | None = None
) -> Read | None:
    """As `read`, without what is long in the body; None if that is not accepted: `read_whole` decides. Raises
    PromptDiffers, Rejected for a payload."""
    for values, is_guess in _attempts(job, body, known, found):
        try:
            rest = _parsed_without(job, body, known, values)
        except Rejected as error:
            if isinstance(error, PromptDiffers) and not is_guess:
                raise
            continue  # What was cut out may be the cause.
        try:
            return _committed(job, body, *rest)
        except Rejected:
            # A text with a backslash may have been cut short, or has to be read without it.
            has_escapes = any(find(body, b"\\", place.start, stop=place.end) >= 0 for place in values.payloads)
            if not is_guess and not has_escapes:
                raise
    return None


def _attempts(
    job: Job, body: bytes | memoryview, known: KnownText | None, found: LongValues | None
) -> Iterator[tuple[LongValues, bool]]:
    """What to cut out, until the rules accept it, and whether its payloads' ends are guessed."""
    if found is None:
        keys = _KEYS if job.payload_specs else ()
        if isinstance(body, memoryview) and keys:
            yield find_long_values(body, known, keys=keys, at_end=True), True
        found = find_long_values(body, known, keys=keys)
    yield found, False
    if found.payloads and found.prompt is not None and found.prompt.size <= LONG_PROMPT:
        yield found._replace(prompt=None), False


def read_whole(job: Job, body: bytes | memoryview) -> Read:
    """As `read`, with nothing cut out."""
    text = bytes(body)
    parsed = parse_reply(text, job)
    values: list[_Value] = []
    for kind, raw in parsed.payloads:
        [(start, end)] = scan.places_in(text, (raw,))
        values.append(_Value(PayloadRange(kind, start, end), start, end))
    return _committed(job, text, text, parsed, values)


class LongValues(NamedTuple):
    """What seems to be the payloads' values and the prompt's ids. These begin with `begun`."""

    payloads: list[PayloadRange]
    prompt: PayloadRange | None
    begun: KnownText | None = None

    @property
    def base64_bytes(self) -> int:
        """The bytes of the payloads that are texts."""
        return sum(place.size for place in self.payloads if not place.is_list)


def find_long_values(
    body: bytes | memoryview,
    known: KnownText | None = None,
    *,
    keys: Iterable[tuple[str, bytes]] = _KEYS,
    at_end: bool = False,
) -> LongValues:
    """The long values of a body. What comes first is not searched for what comes later: both may have megabytes.

    `known`: what the prompt's ids may begin with. `keys`: those of payloads, with their kinds. `at_end`: a text is
    taken to end at the first quote in the last WINDOW of the body. That is right of a long one in a usual reply, and
    where it is not, its content shows it.
    """
    prompt, begun = _prompt(body, min(WINDOW, len(body)), known)
    found: list[PayloadRange] = []
    gaps = [prompt] if prompt is not None and prompt.size > LONG_PROMPT else []
    for kind, key in keys:
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


def _parsed_without(
    job: Job, body: bytes | memoryview, known: KnownText | None, found: LongValues
) -> tuple[bytes, Parsed, list[_Value], PayloadRange | None]:
    """The body with marks in the place of these values, and the rest of what `_committed` takes. Raises Rejected where
    something cannot be cut out, or does not belong where it stood."""
    kinds = [spec.kind for spec in job.payload_specs]
    places = [place for place in found.payloads if place.kind in kinds]
    prompt = None
    if found.prompt is not None and job.dialect != "openai":
        prompt = _cut_prompt(job, body, found.prompt, found.begun, known)
        places += [] if prompt is None else [found.prompt]
    places.sort(key=lambda place: place.start)
    marks: dict[bytes, PayloadRange] = {}
    parts: list[bytes | memoryview] = []
    done = 0
    for number, place in enumerate(places):
        mark = _PROMPT_MARK if place is found.prompt else b'%b%d@"' % (MARK, number)
        marks[mark] = place
        if place.start < done:
            raise Rejected("a long value begins in another")
        parts += [body[done : place.start], mark]
        done = place.end
    text = compact = b"".join((*parts, body[done:]))
    if text.count(MARK) != len(places):
        raise Rejected("a text looks like a mark")
    if scan.is_spaced(text):
        try:
            compact = msgspec.json.format(text, indent=-1)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Rejected("not JSON that can be spelled anew") from error
    parsed = parse_reply(compact, job, prompt)
    if prompt is not None:
        if parsed.prompt is not prompt:
            raise Rejected("the ids that were cut out are not the prompt's")
        del marks[_PROMPT_MARK]
    values: list[_Value] = []
    for kind, raw in parsed.payloads:
        mark = bytes(raw)
        if mark not in marks or marks[mark].kind != kind:
            raise Rejected(f"{kind} was not cut out")
        start = text.index(mark)
        values.append(_Value(marks.pop(mark), start, start + len(mark)))
    if marks:
        raise Rejected("what was cut out is not a payload")
    if compact is not text:
        parsed.plain = None
        if job.protocol == "chat":
            parsed.reply.message = bytes(_MESSAGES.decode(text).choices[0].message)
        if prompt is None and parsed.prompt is not None:
            parsed.prompt.separator = None  # They are spelled otherwise in the text.
    return text, parsed, values, found.prompt if prompt is not None else None


def _cut_prompt(
    job: Job, body: bytes | memoryview, place: PayloadRange, begun: KnownText | None, known: KnownText | None
) -> Prompt | None:
    """Reads the ids at this place in the body; their text is the mark. None if they stay in the text: what is no sound
    list, or one that is spelled so that it could not be restored."""
    start = place.start + 1 + (0 if begun is None else begun.known.text_bytes)
    text, separator = bytes(body[start : place.end - 1]), ","
    if b" " in text or b"\n" in text:
        spelled = scan.bare_ids(bytes(body[place.start + 1 : place.end - 1]))
        if spelled is None:
            return None
        begun, (text, separator) = None, spelled
    # What is known ends with a comma, behind which a list has a further id.
    if text.endswith(b",") or (begun is not None and not text):
        return None
    inner = text + b"," if text else b""
    if begun is None and known is not None and known.begins(inner, 0):
        begun, inner = known, inner[known.known.text_bytes :]
    if job.sent and (begun is not None or inner != job.sent):
        return None
    try:
        prompt = Prompt(_PROMPT_MARK, inner, PROMPT, job.known, begun, separator=separator)
    except Rejected:
        return None
    # Of what is known the spelling is known, too.
    return prompt if prompt.tokens > 1 and scan.bare_ids(prompt.new) is not None else None


def _committed(
    job: Job,
    body: bytes | memoryview,
    text: bytes,
    parsed: Parsed,
    values: Sequence[_Value],
    cut_at: PayloadRange | None = None,
) -> Read:
    """What is committed of a reply: `text` is the body, or what is left of it. `cut_at`: where the prompt's ids were in
    the body, if they were cut out. Raises Rejected."""
    reply, prompt = parsed.reply, parsed.prompt
    edits = _payloads(job, memoryview(body), parsed, values, is_whole=text is body) if job.payload_specs else []
    reply.places, reply.prompt = [value.place for value in values], cut_at
    separator, known_text = None, None
    if prompt is not None and prompt.text and prompt.separator is not None and prompt.tokens > 1:
        # The first occurrence that no other edit touches: any of them can be restored.
        start = scan.find(text, prompt.text) if cut_at is None or values else cut_at.start
        while start >= 0 and any(start < edit.end and start + len(prompt.text) > edit.start for edit in edits):
            start = scan.find(text, prompt.text, start + 1)
        if start >= 0:
            separator, end = prompt.separator, start + len(prompt.text)
            edits.append(_Edit(start, end, None, b""))
            if cut_at is not None and cut_at.size > LONG_PROMPT and not job.sent:
                known_text = partial(prompt.known_text, reply.sequence)
    kept, cuts, ids_at = _without(text, edits)
    if job.beginning:
        reply.message, reply.rest = whole_message(job.beginning, reply.message), reply.message
    reply.tokens, reply.exchange = codec.pack_turn(
        Exchange(
            messages=job.messages,
            message=reply.message,
            reply=kept,
            headers=job.headers,
            status=job.status,
            prompt_ids_at=ids_at,
            separator=separator or ",",
            rid=job.rid,
            own=job.own,
            cuts=cuts,
            ids_field=job.ids_field,
            tokens=parsed.tokens,
            beginning=job.beginning,
        )
    )
    return Read(reply, known_text, None if values else parsed.plain)


def _payloads(job: Job, body: memoryview, parsed: Parsed, values: Sequence[_Value], *, is_whole: bool) -> list[_Edit]:
    """Keeps the payloads that were asked for; returns what becomes of their values in the text. Raises Rejected."""
    reply, edits = parsed.reply, list[_Edit]()
    reply.payloads = []
    for spec in job.payload_specs:
        own = [value for value in values if value.place.kind == spec.kind]
        if not own:
            is_there = reply.output_ids and not parsed.was_queued
            if spec.required and is_there and (reply.dialect, spec.kind) != ("vllm", "indexer_topk"):
                raise Rejected(f"{spec.kind} was requested and is missing")
            continue
        first, *others = [body[value.place.start : value.place.end] for value in own]
        if any(other != first for other in others):
            raise Rejected(f"{spec.kind} occurs twice, with different values")
        plain = _unescaped(first) if is_whole else first
        base, tokens = reply.base, reply.sequence.tokens
        if spec.kind == sampling_masks.KIND:
            prompt_tokens = tokens - reply.output_tokens
            payload, cut = sampling_masks.read(plain, spec, base, prompt_tokens, reply.output_ids)
        else:
            payload, cut = payloads.read(plain, spec, base, tokens, npy=reply.dialect == "vllm")
        if plain is not first:
            cut = Cut(spec.kind, 0, "text", len(first))
        reply.payloads.append(payload)
        replacement = bytes(first) if cut.form == "text" else b""
        edits += [_Edit(value.start, value.end, cut, replacement) for value in own]
    return edits


def _unescaped(text: memoryview) -> memoryview:
    """The JSON string without escapes, which base64 may contain."""
    if bytes(text[:1]) != b'"' or b"\\" not in bytes(text):
        return text
    return memoryview(b'"' + msgspec.json.decode(text, type=str).encode() + b'"')


def _without(text: bytes, edits: list[_Edit]) -> tuple[bytes, list[Cut], int | None]:
    """The text after these edits, and where in it the payloads and the prompt's ids belong."""
    parts: list[bytes] = []
    cuts: list[Cut] = []
    ids_at = None
    length = done = 0
    for start, end, cut, replacement in sorted(edits, key=attrgetter("start")):
        length += start - done
        if cut is None:
            ids_at = length
        else:
            cuts.append(msgspec.structs.replace(cut, at=length))
        length += len(replacement)
        parts += [text[done:start], replacement]
        done = end
    return b"".join((*parts, text[done:])), cuts, ids_at
