"""The prompt of a turn, as reported by the engine or as sent, compared and hashed by the text of its ids.

A prompt and its ids as JSON text grow with every turn. So tokens are compared, hashed and cut as text, and only new
ones are decoded (100k ids: 0.2 ms to hash, 3 ms to decode).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

from workers import scan
from workers.codec import TOKEN_BYTES
from workers.parse_json import Rejected, is_null, typed

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

IDS = msgspec.json.Decoder(list[TokenId])
_COUNT = msgspec.json.Decoder(int)

PLAIN_BYTES = 4 << 10
"""A longer list of ids is read without an object for each."""

PROMPT = "prompt_token_ids"

LONG_PROMPT = 8 << 10
"""Bytes of a prompt's ids that are worth finding: fewer are read with the rest, in some ten microseconds."""


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

    def begins(self, text: bytes, at: int) -> bool:
        """Does `text` go on with this one at `at`?"""
        with memoryview(self._buffer) as whole, whole[: self.known.text_bytes] as own:
            return text.startswith(own, at)

    def followed_by(self, added: bytes, known: KnownTokens, hasher: Hasher) -> KnownText:
        """The text with `added`. Another turn may have added its own to this one."""
        size = self.known.text_bytes
        buffer = self._buffer if len(self._buffer) == size else self._buffer[:size]
        buffer += added
        return KnownText(known, buffer, hasher)


class CutPrompt:
    """A prompt's ids that were cut out of a reply: the mark in their place, a JSON string, and the list's text.

    With `begun` the text is that of a list of the ids after these. `prompt` is what has read it.
    """

    def __init__(self, mark: bytes, text: bytes, begun: KnownText | None = None) -> None:
        self.mark, self.text, self.begun = mark, text, begun
        self.prompt: Prompt | None = None


def token_text(ids: Iterable[int]) -> bytes:
    """Token ids as text that can be concatenated: decimal, a comma after each."""
    text = msgspec.json.encode(list(ids))[1:-1]
    return text + b"," if text else b""


def _require_count(raw: msgspec.Raw | None, where: str, sent: bytes) -> None:
    """Raises Rejected if the engine reports neither prompt nor count, PromptDiffers if its count differs."""
    if raw is None or is_null(raw):
        raise Rejected(f"{where} is missing, and so is the number of prompt tokens")
    count, expected = typed(_COUNT, raw, "prompt_tokens"), sent.count(b",")
    if count != expected:
        raise PromptDiffers(f"prompt_tokens is {count}, but {expected} tokens were sent")


class Prompt:
    """The prompt's ids; only those after `known` are decoded: `suffix_ids`, as little-endian int32.

    `text` is the engine's spelling of them, empty if it reports none.
    """

    def __init__(
        self,
        raw: msgspec.Raw | None,
        where: str,
        known: KnownTokens | None,
        sent: bytes | None = None,
        count: msgspec.Raw | None = None,
        cut: CutPrompt | None = None,
        *,
        is_counted: bool = True,
    ) -> None:
        """`sent`: the token text of a prompt sent as ids. If the engine reports ids, they must be these.

        If it does not, its number of prompt tokens (`count`) must match: it may have ignored the ids. `cut`: the ids,
        if `raw` is the mark in their place. `is_counted`: the engine says how many there are.

        Raises Rejected, or PromptDiffers.
        """
        text = b"" if raw is None else bytes(raw)
        begun = None
        if cut is not None and text == cut.mark:
            text, begun, cut.prompt = cut.text, cut.begun, self
        if sent is not None:
            self.text = b"" if raw is None or is_null(raw) else _confirmed(text, where, sent)
            if not self.text and is_counted:
                _require_count(count, where, sent)
            inner = sent
        elif raw is None:
            raise Rejected(f"{where} is missing")
        else:
            self.text = text
            compact = _compact(text)
            inner = b"".join((memoryview(compact)[1:-1], b",")) if len(compact) > 2 else b""
        self.base = self._before = start = 0
        self._begun, self._output = begun, b""
        self._hasher: Hasher = hashlib.sha256()
        if begun is not None:
            self.base, self._before, self._hasher = begun.known.tokens, begun.known.text_bytes, begun.hasher()
        elif known is not None and len(inner) >= known.text_bytes:
            hasher = hashlib.sha256(memoryview(inner)[: known.text_bytes])
            if hasher.hexdigest() == known.hash:
                self.base, self._hasher, start = known.tokens, hasher, known.text_bytes
        rest = inner[start:-1]
        self.suffix_ids = _ids(b"[" + rest + b"]" if start or sent is not None else self.text, where)
        if b"-" in rest:
            raise Rejected(f"{where} holds a negative zero")
        self._hasher.update(memoryview(inner)[start:])
        self._inner, self._where = inner, where

    @property
    def tokens(self) -> int:
        return self.base + len(self.suffix_ids) // TOKEN_BYTES

    def repeated(self, raw: msgspec.Raw | None, where: str) -> list[bytes]:
        """The text of a second copy of the ids, if any, which must be equal.

        Raises Rejected, or PromptDiffers if it is the only copy.
        """
        if raw is None or is_null(raw):
            return []
        text = bytes(raw)
        if self._before:
            raise Rejected(f"{where} repeats ids of which only the end was cut out")
        if text == self.text:
            return [text]
        if not self.text:
            return [_confirmed(text, where, self._inner)]
        if _compact(text) != b"[" + self._inner[:-1] + b"]":
            typed(IDS, raw, where)
            raise Rejected(f"{where} is another prompt than {self._where}")
        return [text]

    def followed_by(self, output_ids: list[int]) -> KnownTokens:
        """Prompt and output together: the known tokens of the next turn."""
        self._output = token_text(output_ids)
        self._hasher.update(self._output)
        size = self._before + len(self._inner) + len(self._output)
        return KnownTokens(self.tokens + len(output_ids), size, self._hasher.hexdigest())

    def known_text(self, known: KnownTokens) -> KnownText:
        """The text of prompt and output together, which are `known`, what `followed_by` has returned."""
        return text_of(self._begun, b"".join((self._inner, self._output)), known, self._hasher)


def text_of(begun: KnownText | None, added: bytes, known: KnownTokens, hasher: Hasher) -> KnownText:
    """The text of tokens that are `known`: that of the first ones, if it is in memory, and what follows."""
    return KnownText(known, bytearray(added), hasher) if begun is None else begun.followed_by(added, known, hasher)


def _ids(text: bytes, where: str) -> bytes:
    """The ids of a JSON list as little-endian int32. Raises Rejected."""
    plain = scan.plain_ids(text) if len(text) > PLAIN_BYTES else None
    return int32(typed(IDS, text, where)) if plain is None else plain


def int32(ids: list[int]) -> bytes:
    """Little-endian, four bytes a token."""
    return array("i", ids).tobytes()


def _compact(text: bytes) -> bytes:
    has_white = b" " in text or b"\n" in text or b"\t" in text or b"\r" in text
    return text.translate(None, b" \t\r\n") if has_white else text


def _confirmed(text: bytes, where: str, sent: bytes) -> bytes:
    """The reported prompt, which must hold exactly the ids that were sent. Raises PromptDiffers."""
    expected = b"[" + sent[:-1] + b"]"
    if text == expected or _compact(text) == expected:
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
