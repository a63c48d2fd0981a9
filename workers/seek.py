"""Finds long values in a reply by their keys, without parsing it: replay payloads, and the prompt's ids.

What is found may be a text that only looks like it: `workers.job` parses the rest and checks that the value belongs
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from workers import scan
from workers.parse import REPLAY
from workers.parse_prompt import KnownText

WINDOW = 64 << 10
"""Bytes searched at a time: shared memory has no fast search; a copy that fits the processor's cache has."""

COPIES = 2
"""How often a payload may occur in a reply: some SGLang builds sent it in both `meta_info` and `sglext`."""

PROMPT = "prompt_token_ids"

LONG_PROMPT = 8 << 10
"""Bytes of a prompt's ids that are worth finding: a reply with fewer is parsed as a whole, in some ten microseconds."""


class PayloadRange(msgspec.Struct, frozen=True, array_like=True):
    """Position of a payload's value in the engine's body, or of the prompt's ids: [start, end)."""

    kind: str
    start: int
    end: int
    is_list: bool = False


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


def long_values(body: memoryview, known: KnownText | None = None) -> LongValues:
    """The long values of a body. What comes first is not searched for what comes later: both may have megabytes.

    `known`: what the prompt's ids may begin with; it is only looked for in a `bytes` object.
    """
    if known is not None and isinstance(body.obj, bytes):
        prompt = _known_prompt(body.obj, known)
        if prompt is not None:
            return LongValues([place for kind in REPLAY for place in _payloads(body, kind, prompt)], prompt, known)
    prompt = _prompt(body, WINDOW) if len(body) > LONG_PROMPT else None
    payloads = [place for kind in REPLAY for place in _payloads(body, kind, prompt)]
    if prompt is None and len(body) > WINDOW:
        largest = max(payloads, key=lambda place: place.end - place.start, default=None)
        prompt = _prompt(body, len(body), largest)
    return LongValues(payloads, prompt)


def _prompt(body: memoryview, stop: int, gap: PayloadRange | None = None) -> PayloadRange | None:
    """The first list that looks like a prompt's ids and whose key ends before `stop`, if it is long and has no white
    space: it has only digits and commas, or what no list of ids may have (`-`, `.`, `/`)."""
    at = 0
    for _ in range(COPIES):
        key = find(body[:stop], f'"{PROMPT}"'.encode(), at, gap)
        if key < 0:
            return None
        place = _value(body, PROMPT, key)
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


def _payloads(body: memoryview, kind: str, prompt: PayloadRange | None) -> Iterator[PayloadRange]:
    """The values after what looks like the payload's key; `prompt` has none in it."""
    at = 0
    for _ in range(COPIES):
        key = find(body, f'"{kind}"'.encode(), at, prompt)
        place = None if key < 0 else _value(body, kind, key)
        if place is None:
            return
        yield place
        at = place.end


def _value_start(body: memoryview, kind: str, key: int) -> tuple[int, bytes]:
    """Where the value of the key that begins at `key` begins, and its first bytes; none if it is no key."""
    key_end = key + len(kind) + 2
    following = bytes(body[key_end : key_end + 16])
    value = following.lstrip(b" \t\r\n")
    value = value[1:].lstrip(b" \t\r\n") if value.startswith(b":") else b""
    return key_end + len(following) - len(value), value


def _value(body: memoryview, kind: str, key: int) -> PayloadRange | None:
    """The value of the key that begins at `key`."""
    start, value = _value_start(body, kind, key)
    if value.startswith(b'"'):
        end = find(body, b'"', start + 1) + 1
    elif value.startswith(b"["):
        closing = b"]" * (len(value) - len(value.lstrip(b"[")))
        end = find(body, closing, start) + len(closing)
    else:
        return None
    return PayloadRange(kind, start, end, value.startswith(b"[")) if end > start else None


def find(body: memoryview, needle: bytes, start: int, gap: PayloadRange | None = None) -> int:
    """Position of `needle` in the body from `start` on, or -1. `gap` has no part of it."""
    if gap is not None and start < gap.end:
        found = find(body[: gap.start], needle, start)
        return found if found >= 0 else find(body, needle, gap.end)
    for at in range(start, len(body), WINDOW):
        found = bytes(body[at : at + WINDOW + len(needle) - 1]).find(needle)
        if found >= 0:
            return at + found
    return -1
