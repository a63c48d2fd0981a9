"""Searches and measures a JSON text before it is decoded.

Decoding a million small values holds the GIL all the time, on any thread. This scans the text in slices with numpy,
which releases it; it creates no objects and does not recurse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

SLICE = 256 << 10

WINDOW = 64 << 10
"""Bytes searched or compared at a time where that needs a copy: one that fits the processor's cache."""

SMALL = 64 << 10
"""So many bytes are counted without numpy."""

SPLIT = 8 << 10
"""So many bytes are cut at the quotes of their strings, without numpy."""

SPARSE = 64
"""A text with no more commas and brackets than one in so many bytes is not looked at for its strings."""

HEAVY = 10
"""Creating an object, a list or a member of an object costs about as much as this many numbers."""

_HEAD = 32
"""The beginning of a list of token ids this long is seldom found elsewhere."""

FEW_IDS = 4 << 10
"""A list with fewer characters is not looked at as an array."""

_WHITE = (b" ", b"\n", b"\t", b"\r")
_SPACE = 0x20
_QUOTE, _BACKSLASH, _COMMA, _COLON, _ZERO, _NINE = 0x22, 0x5C, 0x2C, 0x3A, 0x30, 0x39
_OPENS, _CLOSES = b"[{", b"]}"


def _table(values: dict[bytes, int]) -> npt.NDArray[np.int8]:
    table = np.zeros(256, np.int8)
    for characters, value in values.items():
        table[list(characters)] = value
    return table


_STARTS = _table({b"," + _OPENS: 1})
_WEIGHT = _table({b",": 1, b":" + _OPENS: HEAVY})
_STEP = _table({_OPENS: 1, _CLOSES: -1})

_CASE = 0x20
"""`[` and `{` differ in this bit, and so do `]` and `}`."""

_MOST_DIGITS = 9
"""Numbers with more may exceed a token id's range."""

Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Characters = npt.NDArray[np.uint8]


class Extent(NamedTuple):
    """`members` of the outermost object or list, and the total `weight`: number of values, where each object, list and
    member of an object counts as HEAVY. `largest` is the weight of the heaviest member, `depth` the nesting depth."""

    members: int
    weight: int
    largest: int
    depth: int


def may_exceed(text: bytes, most: int) -> bool:
    """May a text hold more values than `most`? Fast, but counts characters in strings as well."""
    total = 0
    for start in range(0, len(text) if len(text) > most else 0, SLICE):
        total += _count(text, start)
        if total > most:
            return True
    return False


def count_values(text: bytes | memoryview) -> int:
    """An upper bound of the values in a text that begins outside of a string. What is in strings is not counted where
    that is worth a closer look."""
    if len(text) <= SMALL:
        text = bytes(text)
        total = text.count(b",") + text.count(b"[") + text.count(b"{")
    else:
        total = sum(_count(text, start) for start in range(0, len(text), SLICE))
    if total <= len(text) // SPARSE:
        return total
    if isinstance(text, bytes) and len(text) <= SPLIT:
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
        outside = b"".join(plain.split(b'"')[::2])
        return outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    return sum(int(np.count_nonzero(_STARTS[kinds])) for kinds in _structure(text))


def _count(text: bytes | memoryview, start: int) -> int:
    part = np.frombuffer(text, np.uint8, min(SLICE, len(text) - start), start)
    return int(np.count_nonzero(part == _COMMA)) + int(np.count_nonzero(part | _CASE == _OPENS[1]))


def places_in(text: bytes, values: Iterable[msgspec.Raw]) -> list[tuple[int, int]]:
    """Where [start, end) values stand in the text that they are views of; none is empty."""
    base: int = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    found: list[tuple[int, int]] = []
    for value in values:
        seen = np.frombuffer(value, np.uint8)
        start: int = seen.__array_interface__["data"][0] - base
        found.append((start, start + seen.size))
    return found


def find(text: bytes, part: bytes, start: int = 0) -> int:
    """The same result as `bytes.find`. It searches for the first 32 bytes and compares the rest there, because
    `bytes.find` preprocesses all of `part`."""
    at = text.find(part[:_HEAD], start)
    return at if at < 0 or text.startswith(part, at) else text.find(part, at + 1)


class BareIds(NamedTuple):
    """The inner text of a list of ids, without white space, and the separator that stood between them."""

    text: bytes
    separator: Literal[",", ", "]


def bare_ids(text: bytes) -> BareIds | None:
    """A list's text between its brackets, of digits and commas alone; None if it is spelled otherwise, with other white
    space than one after each comma."""
    is_spaced = b" " in text
    bare = text.translate(None, b" ") if is_spaced else text
    if len(bare) <= FEW_IDS:
        is_flat = not bare.translate(None, b"0123456789,")
        places_differ = is_spaced and text != bare.replace(b",", b", ")
    else:
        characters = np.frombuffer(bare, np.uint8)
        is_flat = int(characters.min()) >= _COMMA and int(characters.max()) <= _NINE
        is_flat = is_flat and not (b"-" in bare or b"." in bare or b"/" in bare)
        places_differ = is_spaced and not _has_spaces_behind_commas(text)
    if not is_flat or places_differ:
        return None
    return BareIds(bare, ", " if is_spaced else ",")


def _has_spaces_behind_commas(text: bytes) -> bool:
    """Only there, and behind each but the last character."""
    characters = np.frombuffer(text, np.uint8)
    return characters[0] != _SPACE and np.array_equal(characters[1:] == _SPACE, characters[:-1] == _COMMA)


def is_spaced(text: bytes) -> bool:
    """Does a JSON object, by its beginning and its end, have white space between its tokens?"""
    colon = text.find(b":")
    return text[:2] != b'{"' or text[colon + 1 : colon + 2] in _WHITE or text[-1:] != b"}"


def plain_ids(text: bytes) -> bytes | None:
    """The ids of a JSON list as little-endian int32; None if it has none, white space, or anything but numbers of at
    most nine digits: it may be invalid then. Half the time of making an object for each.
    """
    characters = np.frombuffer(text, np.uint8)[1:]
    ends: npt.NDArray[np.int32] = np.flatnonzero((characters == _COMMA) | (characters == _CLOSES[0])).astype(np.int32)
    digits = characters - np.uint8(_ZERO)
    is_list = text[:1] == b"[" and text.find(b"]") == len(text) - 1
    if not is_list or int(np.count_nonzero(digits <= 9)) + len(ends) != len(digits):
        return None
    lengths = np.diff(ends, prepend=np.int32(-1)) - 1
    longest = int(lengths.max())
    if int(lengths.min()) < 1 or longest > _MOST_DIGITS or np.any((digits[ends - lengths] == 0) & (lengths > 1)):
        return None
    padded = np.concatenate((np.zeros(longest, np.uint8), digits))
    ids = np.zeros(len(ends), np.dtype("<i4"))
    for place in range(longest, 0, -1):
        ids *= 10
        ids += padded[ends + (longest - place)] * (lengths >= place)
    return ids.tobytes()


def extent(text: bytes, most: int) -> Extent:
    """The extent of a JSON text; meaningless for invalid JSON. Stops soon after `most` members."""
    members = weight = largest = depth = deepest = begun = 0
    for kinds in _structure(text):
        if not len(kinds):
            continue
        before = np.cumsum(_WEIGHT[kinds], dtype=np.int32)
        levels = np.cumsum(_STEP[kinds], dtype=np.int32)
        between = weight + before[(kinds == _COMMA) & (levels == 1 - depth)].astype(np.int64)
        if len(between):
            largest = max(largest, int(np.diff(between, prepend=begun).max()))
            begun = int(between[-1])
            members += len(between)
        deepest = max(deepest, depth + int(levels.max()))
        depth, weight = depth + int(levels[-1]), weight + int(before[-1])
        if members > most:
            break
    return Extent(members + 1, weight, max(largest, weight - begun), deepest)


def members(text: bytes, at_least: int = 0) -> Iterator[bytes]:
    """The content between the outermost brackets, split at its own commas.

    With `at_least`, pieces of several members of at least that many bytes. For invalid JSON, at least one piece is
    invalid.
    """
    begin = depth = 0
    for start, kinds, places in _placed(text):
        levels = depth + np.cumsum(_STEP[kinds], dtype=np.int32)
        own = places[(kinds == _COMMA) & (levels == 1)]
        for place in (own[-1:] if at_least else own).tolist():
            if start + place - begin > at_least:
                yield text[begin + 1 : start + place]
                begin = start + place
        depth = int(levels[-1]) if len(levels) else depth
    yield text[begin + 1 : -1]


def _structure(text: bytes | memoryview) -> Iterator[Characters]:
    return (kinds for _, kinds, _ in _placed(text))


def _placed(text: bytes | memoryview) -> Iterator[tuple[int, Characters, Places]]:
    """For each slice: its start, its commas, colons and brackets outside of strings, and their positions."""
    in_string, is_escaped = False, False
    for start in range(0, len(text), SLICE):
        part = np.frombuffer(text, np.uint8, min(SLICE, len(text) - start), start)
        quotes = part == _QUOTE
        is_escaped = _drop_escaped(part, quotes, is_escaped)
        folded = part | _CASE
        marks = quotes | (folded == _OPENS[1]) | (folded == _CLOSES[1]) | (part == _COMMA) | (part == _COLON)
        places = np.flatnonzero(marks)
        are_quotes = quotes[places]
        in_strings = np.logical_xor.accumulate(are_quotes) ^ in_string
        in_string = bool(in_strings[-1]) if len(places) else in_string
        places = places[~(in_strings | are_quotes)]
        yield start, part[places], places


def _drop_escaped(part: Characters, quotes: Flags, is_escaped: bool) -> bool:
    """Remove quotes after an odd number of backslashes from `quotes`; is the next slice's first character escaped?

    `is_escaped`: this slice's first character is.
    """
    if is_escaped:
        quotes[0] = False
    places: Places = np.flatnonzero(part == _BACKSLASH)
    if is_escaped and len(places) and places[0] == 0:
        places = places[1:]
    if not len(places):
        return False
    begins = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(places))
    behind = places[begins] + lengths
    odd = behind[lengths % 2 == 1]
    is_last = bool(len(odd)) and int(odd[-1]) == len(part)
    quotes[odd[:-1] if is_last else odd] = False
    return is_last
