"""The prompt of a turn, as reported by the engine or as sent, compared and hashed by the text of its ids.

A prompt and its ids as JSON text grow with every turn. So tokens are compared, hashed and cut as text, and only new
ones are decoded (100k ids: 0.2 ms to hash, 3 ms to decode).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

from workers import scan
from workers.codec import TOKEN_BYTES
from workers.parse_json import NULL, Rejected, is_null, typed

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

IDS = msgspec.json.Decoder(list[TokenId])
_COUNT = msgspec.json.Decoder(int)

PLAIN_BYTES = 16 << 10
"""A longer list of ids is read without an object for each."""

PROMPT = "prompt_token_ids"

LONG_PROMPT = 16 << 10
"""Bytes of a prompt's ids that are worth keeping in memory."""


class PromptDiffers(Rejected):
    """The engine reports another prompt than was sent. The message has positions and lengths, never ids."""


class KnownTokens(msgspec.Struct, frozen=True):
    """Tokens that a prompt may begin with: their number, and size and hash of their text (see `token_text`)."""

    tokens: int
    text_bytes: int
    hash: str


class Hasher(Protocol):
    """A hash object of `hashlib`."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def copy(self) -> Hasher: ...
    def hexdigest(self) -> str: ...


class KnownText:
    """The text of known tokens itself, and the state of its hash: equal bytes need not be hashed again.

    The texts of a session's turns share one buffer, of which each is a beginning.
    """

    __slots__ = ("_buffer", "_hasher", "known")

    def __init__(self, known: KnownTokens, buffer: bytearray, hasher: Hasher) -> None:
        self.known = known
        self._buffer = buffer
        self._hasher = hasher

    def __len__(self) -> int:
        """Bytes in memory."""
        return len(self._buffer)

    def hasher(self) -> Hasher:
        return self._hasher.copy()

    def begins(self, text: bytes | memoryview, at: int) -> bool:
        """Does `text` go on with this one at `at`?"""
        size = self.known.text_bytes
        with memoryview(self._buffer) as whole, whole[:size] as own:
            if isinstance(text, bytes):
                return text.startswith(own, at)
            # Two views are compared byte by byte; a copy that fits the processor's cache is compared at once.
            return all(
                text[at + start : at + start + scan.WINDOW].tobytes().startswith(own[start : start + scan.WINDOW])
                for start in range(0, size, scan.WINDOW)
            )

    def followed_by(self, added: bytes, known: KnownTokens, hasher: Hasher) -> KnownText:
        """The text with `added`. Another turn may have added its own to this one."""
        size = self.known.text_bytes
        buffer = self._buffer if len(self._buffer) == size else self._buffer[:size]
        buffer += added
        return KnownText(known, buffer, hasher)


def token_text(ids: Iterable[int]) -> bytes:
    """Token ids as text that can be concatenated: decimal, a comma after each."""
    text = msgspec.json.encode(list(ids))[1:-1]
    return text + b"," if text else b""


class Prompt:
    """The prompt's ids, of which only those after `base` known ones are decoded: `suffix_ids`, as little-endian int32.

    `text` is the engine's spelling of them, or the mark that was put in its place; empty if it reports none. `new` is
    the token text of those that were decoded, without its last comma. `separator` stands between them; None if the text
    could not be restored from the ids.
    """

    __slots__ = (
        *("_before", "_begun", "_hasher", "_inner", "_output", "_where"),
        *("base", "new", "separator", "suffix_ids", "text", "tokens"),
    )

    def __init__(
        self,
        text: bytes,
        inner: bytes,
        where: str,
        known: KnownTokens | None,
        begun: KnownText | None = None,
        *,
        separator: str | None = None,
        is_spelled: bool = False,
    ) -> None:
        """`inner` is the ids' token text, behind that of `begun`. `is_spelled`: where nothing of it is known, `text` is
        decoded in its place. Raises Rejected."""
        self.text, self.separator, self._inner, self._where, self._begun = text, separator, inner, where, begun
        self.base = self._before = start = 0
        self._output = b""
        self._hasher: Hasher = hashlib.sha256()
        if begun is not None:
            self.base, self._before, self._hasher = begun.known.tokens, begun.known.text_bytes, begun.hasher()
        elif known is not None and len(inner) >= known.text_bytes:
            hasher = hashlib.sha256(memoryview(inner)[: known.text_bytes])
            if hasher.hexdigest() == known.hash:
                self.base, self._hasher, start = known.tokens, hasher, known.text_bytes
        self.new = inner[start:-1]
        ids = text if is_spelled and not start else b"[%b]" % self.new
        plain = scan.plain_ids(ids) if len(ids) > PLAIN_BYTES else None
        if plain is None:
            read = typed(IDS, ids, where)
            plain = struct.pack(f"{len(read)}i", *read)  # A fifth cheaper than an array.
        self.suffix_ids = plain
        if b"-" in self.new:
            raise Rejected(f"{where} holds a negative zero")
        self._hasher.update(memoryview(inner)[start:])
        self.tokens = self.base + len(self.suffix_ids) // TOKEN_BYTES

    @classmethod
    def at(
        cls,
        raw: msgspec.Raw,
        where: str,
        known: KnownTokens | None,
        sent: bytes = b"",
        count: msgspec.Raw = NULL,
        is_counted: bool = True,
    ) -> Prompt:
        """`sent`: the token text of a prompt sent as ids. If the engine reports ids, they must be these.

        If it does not, its number of prompt tokens (`count`) must match: it may have ignored the ids. `is_counted`: the
        engine says how many there are. Raises Rejected, or PromptDiffers.
        """
        text = bytes(raw)
        if sent:
            text = b"" if is_null(raw) else _confirmed(text, where, sent)
            if not text and is_counted:
                _require_count(count, where, sent)
            return cls(text, sent, where, known, separator=_separator(text))
        if not text:
            raise Rejected(f"{where} is missing")
        if b" " in text or b"\n" in text or b"\t" in text or b"\r" in text:
            inner, separator = _inner(text), _separator(text)
        else:  # What can be decoded, and has no white space, is spelled in one way.
            inner, separator = text[1:-1] + b"," if len(text) > 2 else b"", ","
        known = known if text[:1] == b"[" else None
        return cls(text, inner, where, known, separator=separator, is_spelled=True)

    def repeated(self, raw: msgspec.Raw, where: str) -> bool:
        """Is there a second copy of the ids? It must be equal.

        Raises Rejected, or PromptDiffers if it is the only copy.
        """
        if is_null(raw):
            return False
        text = bytes(raw)
        if text == self.text:
            return True
        if not self.text:
            _confirmed(text, where, self._inner)
            return True
        inner = _inner(text)
        is_begun = self._begun is None or self._begun.begins(inner, 0)
        if text[:1] != b"[" or not is_begun or inner[self._before :] != self._inner:
            typed(IDS, raw, where)
            raise Rejected(f"{where} differs from {self._where}")
        return True

    def followed_by(self, output_ids: list[int]) -> KnownTokens:
        """Prompt and output together: the known tokens of the next turn."""
        if output_ids:
            self._output = msgspec.json.encode(output_ids)[1:-1] + b","
            self._hasher.update(self._output)
        size = self._before + len(self._inner) + len(self._output)
        return KnownTokens(self.tokens + len(output_ids), size, self._hasher.hexdigest())

    def known_text(self, known: KnownTokens) -> KnownText:
        """The text of prompt and output together, which are `known`, what `followed_by` has returned."""
        added = b"".join((self._inner, self._output))
        if self._begun is None:
            return KnownText(known, bytearray(added), self._hasher)
        return self._begun.followed_by(added, known, self._hasher)


def _require_count(raw: msgspec.Raw, where: str, sent: bytes) -> None:
    """Raises Rejected if the engine reports neither prompt nor count, PromptDiffers if its count differs."""
    if is_null(raw):
        raise Rejected(f"{where} is missing, and so is the number of prompt tokens")
    count, expected = typed(_COUNT, raw, "prompt_tokens"), sent.count(b",")
    if count != expected:
        raise PromptDiffers(f"prompt_tokens is {count}, but {expected} tokens were sent")


def _separator(text: bytes) -> str | None:
    found = scan.bare_ids(text[1:-1]) if text else None
    return None if found is None else found.separator


def _inner(text: bytes) -> bytes:
    """The token text of a list."""
    compact = text.translate(None, b" \t\r\n")
    return b"".join((memoryview(compact)[1:-1], b",")) if len(compact) > 2 else b""


def _confirmed(text: bytes, where: str, sent: bytes) -> bytes:
    """The reported prompt, which must hold exactly the ids that were sent. Raises PromptDiffers."""
    expected = b"[" + sent[:-1] + b"]"
    if text == expected or text.translate(None, b" \t\r\n") == expected:
        return text
    reported: list[int] = typed(IDS, text, where)
    ours: list[int] = typed(IDS, expected, "the prompt that was sent")
    if reported == ours:
        raise Rejected(f"{where} holds a negative zero")
    pairs = enumerate(zip(reported, ours, strict=False))
    at = next((place for place, (reported_id, other) in pairs if reported_id != other), min(len(reported), len(ours)))
    raise PromptDiffers(
        f"{where} is not the prompt that was sent: they differ from token {at} on"
        f" ({len(ours)} tokens sent, {len(reported)} reported)"
    )
