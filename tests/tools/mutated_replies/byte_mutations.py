"""Mutations of a reply's bytes, blind to what they mean."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

PIECES = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"e9", b"\\", b"\xff", b"\x00", b" ", b"\n", b"\t", b"1e999",
    b"NaN", b"true", b"null", b"\xed\xa0\x80", b"\xc3", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"=", b"/", b"-0",
    b".0",
)  # fmt: skip

_LONG_STRING = re.compile(rb'"[A-Za-z0-9+/=\\]{40,}"')


def _place(rng: random.Random, body: bytes) -> int:
    return rng.randrange(len(body) + 1)


def _piece(rng: random.Random) -> bytes:
    return rng.choice(PIECES) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 4))


def flip(rng: random.Random, body: bytes) -> bytes:
    """One to three bytes get another value, mostly by a single bit."""
    changed = bytearray(body)
    for _ in range(rng.randint(1, 3) if changed else 0):
        at = rng.randrange(len(changed))
        changed[at] = changed[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.7 else rng.randrange(256)
    return bytes(changed)


def overwrite(rng: random.Random, body: bytes) -> bytes:
    """A digit becomes another digit, a letter another letter: the body often stays JSON."""
    found = [match.start() for match in re.finditer(rb"[0-9A-Za-z]", body)]
    if not found:
        return body
    at = rng.choice(found)
    pool = b"0123456789" if body[at : at + 1].isdigit() else b"ABCDEFabcdefxyz"
    return body[:at] + bytes([rng.choice(pool)]) + body[at + 1 :]


def insert(rng: random.Random, body: bytes) -> bytes:
    """A few bytes more, mostly of JSON's own."""
    at = _place(rng, body)
    return body[:at] + _piece(rng) + body[at:]


def delete(rng: random.Random, body: bytes) -> bytes:
    """A few bytes fewer."""
    at = _place(rng, body)
    return body[:at] + body[at + rng.choice((1, 1, 2, 5, 40)) :]


def duplicate(rng: random.Random, body: bytes) -> bytes:
    """A stretch of bytes stands twice."""
    at = _place(rng, body)
    end = at + rng.choice((1, 2, 8, 60, 400))
    return body[:end] + body[at:end] + body[end:]


def truncate(rng: random.Random, body: bytes) -> bytes:
    """Cut at the end, mostly anywhere, sometimes by a byte or two; rarely nothing is left."""
    return body[: _place(rng, body)] if rng.random() < 0.7 else body[: max(len(body) - rng.randint(1, 3), 0)]


def splice(rng: random.Random, body: bytes) -> bytes:
    """Bytes of one place over those of another."""
    source, target, length = _place(rng, body), _place(rng, body), rng.choice((1, 3, 10, 80))
    return body[:target] + body[source : source + length] + body[target + length :]


def append(rng: random.Random, body: bytes) -> bytes:
    """Something before or behind the whole."""
    extra = rng.choice((b" ", b"\n", b"\x00", b"{}", b"null", b",", b"\xef\xbb\xbf", body[:50], body))
    return extra + body if rng.random() < 0.4 else body + extra


def in_payload(rng: random.Random, body: bytes) -> bytes:
    """Any of the others within the longest base64 text, where there is one."""
    found = max(_LONG_STRING.finditer(body), key=lambda match: len(match[0]), default=None)
    change = rng.choice((flip, overwrite, insert, delete, duplicate, splice, truncate))
    if found is None:
        return change(rng, body)
    start, end = found.start() + 1, found.end() - 1
    return body[:start] + change(rng, body[start:end]) + body[end:]


MUTATIONS: Mapping[str, Callable[[random.Random, bytes], bytes]] = {
    "bytes: flip": flip,
    "bytes: overwrite": overwrite,
    "bytes: insert": insert,
    "bytes: delete": delete,
    "bytes: duplicate": duplicate,
    "bytes: truncate": truncate,
    "bytes: splice": splice,
    "bytes: before or behind": append,
    "bytes: in the payload": in_payload,
}
