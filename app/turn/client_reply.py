"""What of an engine's reply its client gets: TURNLOG_CLIENT_REPLY."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from app.upstream.body import Body
from app.upstream.dialects import asked_for, asks_for_prompt, logprob_wish
from workers import scan
from workers.codec import describe
from workers.parse_json import NULL
from workers.parse_parts import NAMES
from workers.reply import PayloadRange

Mode = Literal["asked", "verbatim"]
Fields = Mapping[str, msgspec.Raw]
Parts = Sequence[bytes | memoryview]
Range = tuple[int, int]

_LOGPROBS = ("logprobs", "return_logprob")
_PROMPT_IDS = ("return_prompt_token_ids", "return_token_ids")
_OUTPUT_IDS = ("return_token_ids",)

ASKED_BY: Mapping[str, Sequence[str]] = {
    "logprobs": _LOGPROBS,
    "prompt_token_ids": _PROMPT_IDS,
    "token_ids": _OUTPUT_IDS,
    "response_token_ids": _OUTPUT_IDS,
    "meta_info": ("return_meta_info",),
    "weight_versions": ("return_weight_versions",),
    "kv_transfer_params": ("kv_transfer_params",),
}
"""What Turnlog asks engines for beside payloads, by the parameters with which a client asks for it, whatever the
engine's dialect. `logprobs` of a completion is a number, of which 0 asks too."""


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


_REPLY = msgspec.json.Decoder(_Reply)
_META = msgspec.json.Decoder(dict[str, msgspec.Raw])
describe(_Reply, dict[str, msgspec.Raw])


def shown(body: Body, places: Sequence[PayloadRange], params: Fields) -> Parts:
    """A valid reply with null for each value that Turnlog asked for and these parameters do not; all else is the
    engine's bytes. `places` are those of its payloads, and of the prompt's ids if they are long."""
    asked = asked_for(params) | {name for name in ASKED_BY if _asks(params, name)}
    unasked = [place for place in places if place.kind not in asked]
    hidden: list[Range] = []
    if names := ASKED_BY.keys() - asked:
        # The long values are left out of what is decoded, also those that the client gets.
        long_values = sorted(places, key=lambda place: place.start)
        text = b"".join(body.without([(place.start, place.end) for place in long_values]))
        hidden = [_in_body(start, end, long_values) for start, end in _hidden(text, names, params)]
        unasked = [place for place in unasked if not any(start <= place.start < end for start, end in hidden)]
    return body.without([*hidden, *((place.start, place.end) for place in unasked)])


def _asks(params: Fields, name: str) -> bool:
    """Some harnesses send `top_logprobs` alone."""
    if name == "logprobs" and bytes(params.get("top_logprobs", b"")).lstrip(b"0").isdigit():
        return True
    return any(bytes(params.get(asking, b"null")) not in (b"null", b"false") for asking in ASKED_BY[name])


def _hidden(text: bytes, names: Collection[str], params: Fields) -> Iterator[Range]:
    """The places of these members of a reply, or of its choice, that are not null."""
    reply = _REPLY.decode(text)
    base = scan.address(memoryview(text))
    for home in (reply, *reply.choices):
        for name in home.__struct_fields__:
            if name in names and (value := getattr(home, name)) != NULL:
                asked = _asked_in_meta(value, params) if name == "meta_info" else ()
                for hidden in asked or (value,):
                    start = scan.address(memoryview(hidden)) - base
                    yield start, start + len(memoryview(hidden))


def _asked_in_meta(meta: msgspec.Raw, params: Fields) -> Sequence[msgspec.Raw]:
    """SGLang's `meta_info` is also where payloads and the prompt's logprobs are. If the client asked for some that
    stand in it: its other members; else nothing."""
    kinds = asked_for(params)
    kept = {name for kind, name in NAMES["sglang"].items() if kind in kinds}
    if asks_for_prompt(logprob_wish(params)):
        kept |= {"input_token_logprobs", "input_top_logprobs"}
    members = _META.decode(meta) if kept else {}
    if kept.isdisjoint(members):
        return ()
    return [value for name, value in members.items() if name not in kept and value != NULL]


def _in_body(start: int, end: int, cut: Sequence[PayloadRange]) -> Range:
    """The place in the body of what is at [start, end) where null replaces these values."""
    before = inside = 0
    for place in cut:
        longer = place.end - place.start - len(b"null")
        at = place.start - before - inside
        if at < start:
            before += longer
        elif at < end:
            inside += longer
    return start + before, end + before + inside
