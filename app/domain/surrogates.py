"""Bodies that a strict decoder refuses and that are read all the same: with a byte order mark, or with half of a
surrogate pair as an escape, which JavaScript writes where a text was cut within a character.

A half is read as U+FFFD. Only a body that was refused is looked through, so that others pay nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from app.domain import split
from app.domain.left_out import SURROGATE, left_out_at

T = TypeVar("T")

_MARK = b"\xef\xbb\xbf"
_ESCAPE = re.compile(rb"\\u[dD](?:([89abAB])|[c-fC-F])[0-9a-fA-F]{2}")
_LENGTH = len(b"\\ud83d")
_REPLACEMENT = b"\\ufffd"

_LISTS = ("messages", "input", "tools")
_TOLD = frozenset((*_LISTS, "instructions", "prompt", "system"))
"""Fields that are told by their names; any other name may be the client's own text."""


class Mended(NamedTuple):
    """A body that a strict decoder reads; `halves` are the places in it of what was read as U+FFFD."""

    body: bytes
    halves: Sequence[int]

    def left_out(self) -> list[str]:
        """Where the halves were (`app.domain.left_out`), once the body is known to be within `bounds`."""
        if not self.halves or len(self.body) > split.LONG:
            return [left_out_at(SURROGATE, "body")] if self.halves else []
        left = set(self.halves)
        told = []
        for name, raw in split.FIELDS.decode(self.body).items():
            for place, part in _parts(name, raw) if name in _TOLD else ():
                start = split.offset_in(self.body, part)
                first, behind = (bisect_left(self.halves, at) for at in (start, start + len(bytes(part))))
                if inside := self.halves[first:behind]:
                    told.append(place)
                    left.difference_update(inside)
        return [left_out_at(SURROGATE, place) for place in (*told, *(["body"] if left else []))]


def _parts(name: str, raw: msgspec.Raw) -> Iterator[tuple[str, msgspec.Raw]]:
    if name in _LISTS and bytes(raw).startswith(b"["):
        for index, item in enumerate(split.ITEMS.decode(raw)):
            yield f"{name}[{index}]", item
    else:
        yield name, raw


def mended(body: bytes) -> Mended | None:
    """The body as it is read; None if there is nothing to mend in it."""
    text = body.removeprefix(_MARK)
    halves = list(_halves(text))
    if not halves:
        return None if len(text) == len(body) else Mended(text, ())
    whole = bytearray(text)
    for at in halves:
        whole[at : at + _LENGTH] = _REPLACEMENT
    return Mended(bytes(whole), halves)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A body, mended if need be. Raises as the decoder."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError:
        if (read := mended(body)) is None:
            raise
        return decoder.decode(read.body)


def mended_text(text: str) -> str | None:
    """As `mended`, of JSON that stands as text in another: a call's arguments. None if there is no half in it."""
    read = mended(text.encode(errors="surrogatepass"))
    return None if read is None or not read.halves else read.body.decode(errors="surrogatepass")


def _halves(text: bytes) -> Iterator[int]:
    """Where the escapes of halves begin, in order."""
    high: int | None = None
    for escape in _ESCAPE.finditer(text):
        at = start = escape.start()
        while start and text[start - 1 : start] == b"\\":
            start -= 1
        if (at - start) % 2:  # The backslash there ends an escape.
            continue
        if high is not None and not (escape[1] is None and at == high + _LENGTH):
            yield high
            high = None
        if escape[1] is not None:
            high = at
        elif high is None:
            yield at
        else:
            high = None
    if high is not None:
        yield high
