"""What of an engine's reply its client gets: TURNLOG_CLIENT_REPLY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from app.domain.request import RETURN, join_object
from app.upstream.body import Body
from app.upstream.dialects import PROMPT_WISHES, asked_for, asks_for_prompt, logprob_wish
from workers import scan
from workers.codec import describe
from workers.parse_json import NULL
from workers.parse_prompt import LONG_PROMPT
from workers.reply import MARK, NAMES, PayloadRange

Mode = Literal["asked", "verbatim"]
Fields = Mapping[str, msgspec.Raw]
Parts = Sequence[bytes | memoryview]
Range = tuple[int, int]

_OUTPUT_IDS = ("token_ids", "response_token_ids")

ASKS: Mapping[str, Sequence[str]] = {
    "logprobs": ("logprobs",),
    "return_logprob": ("logprobs",),
    "return_prompt_token_ids": ("prompt_token_ids",),
    "return_token_ids": ("prompt_token_ids", *_OUTPUT_IDS),
    "return_meta_info": ("meta_info",),
    "return_weight_versions": ("weight_versions",),
    "kv_transfer_params": ("kv_transfer_params",),
}
"""By parameter, in either engine's spelling, the values that a client asks for with it. A completion's `logprobs` is a
number, of which 0 asks too."""

ASKED_FOR = frozenset(name for names in ASKS.values() for name in names)
"""What Turnlog asks engines for, beside payloads."""

PROMPT_LOGPROBS = "prompt_logprobs"

META: Mapping[str, Sequence[str]] = {
    **{kind: (name,) for kind, name in NAMES["sglang"].items()},
    PROMPT_LOGPROBS: ("input_token_logprobs", "input_top_logprobs"),
}
"""Members of SGLang's `meta_info` that a client may ask for without all of it."""

_ASKING = frozenset((*ASKS, *PROMPT_WISHES, *RETURN.values(), "top_logprobs"))
_NOTHING: frozenset[str] = frozenset()


class _Choice(msgspec.Struct, gc=False):
    logprobs: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL
    token_ids: msgspec.Raw = NULL
    response_token_ids: msgspec.Raw = NULL
    weight_versions: msgspec.Raw = NULL
    meta_info: msgspec.Raw = NULL


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL


class _Sampled(msgspec.Struct, gc=False):
    """Of SGLang's `meta_info`."""

    output_token_logprobs: list[tuple[Any, int, Any]] | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_META = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SAMPLED = msgspec.json.Decoder(_Sampled | None)
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
describe(_Reply, dict[str, msgspec.Raw], _Sampled)


def shown(body: Body, places: Sequence[PayloadRange], params: Fields, plain: Any = None) -> Parts:
    """A valid reply with null for each value that Turnlog asked for and these parameters do not; all else is the
    engine's bytes, but that a client which asks for ids gets `choices[0].token_ids` from SGLang too. `places` are those
    of its payloads, and of the prompt's ids if they are known. `plain` as in `Read`; it is changed."""
    asked = _NOTHING if _ASKING.isdisjoint(params) else _asked(params)
    if plain is not None and not asked:
        # The usual client gets no long list. So the reply need not be read again: what was read encodes to its bytes.
        for home, fields in (plain, _Reply), (plain["choices"][0], _Choice):
            for name in fields.__struct_fields__:
                if name in ASKED_FOR and home.get(name) is not None:
                    home[name] = None
        text = orjson.dumps(plain)
        if MARK not in text:
            return [text]
    names, asks_for_ids = ASKED_FOR - asked, "token_ids" in asked
    hidden: list[Range] = []
    ids: bytes | None = None
    if names or asks_for_ids:
        # These values are left out of what is decoded, also those that the client gets: they are most of it.
        text = b"".join(body.without([(place.start, place.end) for place in places])) if places else body.joined()
        reply = _REPLY.decode(text)
        ids = _output_ids(reply.choices[0]) if asks_for_ids else None
        values: list[msgspec.Raw] = []
        for home in (reply, *reply.choices):
            for name in home.__struct_fields__:
                if name not in names or (value := getattr(home, name)) == NULL:
                    continue
                if name == "meta_info" and asked:
                    values += _unasked_in_meta(value, asked)
                else:
                    values.append(value)
        hidden = scan.places_in(text, values)
        if places:
            cut = sorted(places, key=lambda place: place.start)
            hidden = [_in_body(start, end, cut) for start, end in hidden]
    for place in places:
        if place.kind not in asked and not any(start <= place.start < end for start, end in hidden):
            hidden.append((place.start, place.end))
    parts = body.without(hidden)
    if ids is not None:
        return [_with_token_ids(b"".join(parts), ids)]
    # A reply without long values is copied: its engine's body is not kept for a client that reads slowly.
    is_long = any(place.size > LONG_PROMPT for place in places)
    return parts if is_long or not hidden else [b"".join(parts)]


def _output_ids(choice: _Choice) -> bytes | None:
    """What SGLang's reply says of its output's ids; None of a reply that has them under vLLM's name, or not at all."""
    if choice.token_ids != NULL:
        return None
    if choice.response_token_ids != NULL:
        return bytes(choice.response_token_ids)
    sampled = _SAMPLED.decode(choice.meta_info)
    if sampled is None or sampled.output_token_logprobs is None:
        return None
    return msgspec.json.encode([token for _, token, _ in sampled.output_token_logprobs])


def _with_token_ids(reply: bytes, ids: bytes) -> bytes:
    fields: dict[str, bytes] = {**_META.decode(reply)}
    [choice] = _CHOICES.decode(fields["choices"])
    fields["choices"] = b"[" + join_object({**choice, "token_ids": ids}) + b"]"
    return join_object(fields)


def _asked(params: Fields) -> frozenset[str]:
    """What the parameters ask for: names of ASKED_FOR, kinds of payloads, and those of META."""
    asked: set[str] = set(asked_for(params))
    for name in ASKS.keys() & params.keys():
        if bytes(params[name]) not in (b"null", b"false"):
            asked.update(ASKS[name])
    if bytes(params.get("top_logprobs", b"")).lstrip(b"0").isdigit():
        asked.add("logprobs")  # Some harnesses, and pinned parameters, have it alone.
    if asks_for_prompt(logprob_wish(params)):
        asked.add(PROMPT_LOGPROBS)
    return frozenset(asked)


def _unasked_in_meta(meta: msgspec.Raw, asked: frozenset[str]) -> Sequence[msgspec.Raw]:
    """All of SGLang's `meta_info`; but if it holds a payload or the prompt's logprobs, for which the client asked, its
    other members."""
    kept = {name for kind in asked & META.keys() for name in META[kind]}
    members = _META.decode(meta) if kept and bytes(meta).startswith(b"{") else {}
    if kept.isdisjoint(members):
        return (meta,)
    return [value for name, value in members.items() if name not in kept and value != NULL]


def _in_body(start: int, end: int, cut: Sequence[PayloadRange]) -> Range:
    """The place in the body of what is at [start, end) where null replaces these values, which are in order."""
    for place in cut:
        longer = place.size - len(b"null")
        if place.start < end:
            end += longer
            if place.start < start:
                start += longer
    return start, end
