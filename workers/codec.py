"""Encodes content for the store: a typed msgpack map in one zstd frame with its size and checksum.

`StoredTokens` is what a trainer reads, `Exchange` what went over the wire and is replayed to a retry. A large
turn has a frame of each, so that an export of tokens does not read conversations; a small one has
one frame of both, since a frame costs more than its bytes.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
import zstandard

LEVEL = 1
"""zstd level: on turns of some KiB higher levels save nothing (measured: 602 against 601 bytes)."""

TOKEN_BYTES = 4
"""Bytes of a stored token id."""

MAX_RAW = 1 << 30
"""Bytes that one frame may unpack to; a frame that declares more is damaged."""


class CorruptContent(Exception):
    """Stored bytes that do not decode to what the log says."""


class TopRows(msgspec.Struct, frozen=True, array_like=True):
    """The `k` most likely tokens at each of some places, packed: see `workers.top_logprobs`."""

    k: int
    ids: bytes
    logprobs: bytes


class TopLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine reports besides the sampled tokens' logprobs, where it was asked to.

    `output` has a row for each output token. `prompt_logprobs` (little-endian float32) and the rows of `prompt` are
    those of the last new prompt tokens: the first of a prompt has none, and an engine may leave out others.
    """

    output: TopRows | None = None
    prompt: TopRows | None = None
    prompt_logprobs: bytes = b""


class StoredTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn's tokens: new prompt ids and output ids as little-endian int32, output logprobs as float64."""

    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes
    top: TopLogprobs | None = None


class Cut(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replay payload's value, removed from the stored reply at `at`, and how it was written.

    `base64`: of the rows as little-endian int32. `npy`: base64 of a .npy file with header `head` and the rows as
    `dtype` (numpy's notation). `lists`: nested lists of inner shape `dims`, `separator` between items; `sets`: lists of
    different lengths. `text`: written in a way that the rows do not determine, so its `length` bytes stay in place.
    """

    kind: str
    at: int
    form: Literal["base64", "npy", "lists", "sets", "text"]
    length: int = 0
    dims: tuple[int, ...] = ()
    head: bytes = b""
    dtype: str = "<i4"
    separator: str = ","


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn's messages and its reply.

    `messages` are the request's new messages, `message` the reply's, each raw JSON. `reply` is the engine's body
    without what is stored elsewhere and restored byte for byte: at `prompt_ids_at`, if set, the text of the prompt's
    ids with `separator` between them; and the values in `cuts`. All positions count in the remaining text. `rid` and
    `own` (raw JSON) are what Turnlog added to this request only. `ids_field` is the field of a chat
    that the prompt's ids were sent in; empty for `input_ids`, and where none were sent. `tokens` are
    the turn's tokens, if they have no frame of their own. `beginning` is the request's last message,
    with which the reply's begins, if its client began it.
    """

    messages: list[bytes]
    message: bytes
    reply: bytes
    headers: list[tuple[str, str]]
    status: int = 200
    prompt_ids_at: int | None = None
    separator: str = ","
    rid: str = ""
    own: bytes = b""
    cuts: list[Cut] = []
    ids_field: str = ""
    tokens: StoredTokens | None = None
    beginning: bytes = b""


class Messages(msgspec.Struct, frozen=True):
    """The messages of an exchange: what the request added, and the reply's."""

    messages: list[bytes]
    message: bytes


APART_BYTES = 8 << 10
"""A turn with less content has one frame. In the frame of a reply of at least this size the messages come first, so
that an export of conversations need not unpack the rest."""

APART = b"\x02"
"""First byte of an exchange packed so; a zstd frame begins differently."""

_APART_HEAD = struct.Struct("<cIII")
"""APART, then the messages' packed size, unpacked size and CRC-32: the frame's own checksum covers all of it."""


class _TokensOnly(msgspec.Struct):
    """Of an exchange, only its tokens."""

    tokens: StoredTokens


Content = TypeVar("Content", StoredTokens, Exchange, _TokensOnly)


class _Contexts(threading.local):
    """A thread's own: making one takes ten microseconds, as long as a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Contexts()
_encode = msgspec.msgpack.Encoder().encode


def compress(raw: bytes) -> bytes:
    return _local.compressor.compress(raw)


def decompress(frame: bytes | None, most: int = MAX_RAW) -> bytes:
    """Raises CorruptContent for a damaged or missing frame, or one that unpacks to more than `most` bytes.

    Checks the declared size: the library ignores its own limit where a frame declares one.
    """
    if frame is None:
        raise CorruptContent("the content is missing")
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise CorruptContent(f"a frame declares {size} bytes; the limit is {most}")
        return _local.decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise CorruptContent(str(error)) from error


def describe(*kinds: Any) -> None:
    """Have msgspec describe these types now, when a module is imported.

    It does so where a type is first decoded to, and two threads that do this at once crash the process (msgspec 0.22).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


describe(StoredTokens, Exchange, Messages, _TokensOnly)


def pack(content: Any) -> bytes:
    """StoredTokens, Exchange or a snapshot as one compressed frame. The messages of a large exchange come first."""
    if isinstance(content, Exchange) and len(content.reply) >= APART_BYTES:
        return _pack_apart(content)
    return compress(_encode(content))


def pack_turn(exchange: Exchange) -> tuple[bytes | None, bytes]:
    """A turn's frames, those of its tokens and of the rest; only the latter, with its tokens, if it is small."""
    raw = _encode(exchange)
    if len(raw) < APART_BYTES:
        return None, _local.compressor.compress(raw)
    return compress(_encode(exchange.tokens)), pack(msgspec.structs.replace(exchange, tokens=None))


def unpack(frame: bytes | None, kind: type[Content]) -> Content:
    """Raises CorruptContent."""
    try:
        if kind is Exchange and frame is not None and frame[:1] == APART:
            apart: Content = _unpack_apart(frame)
            return apart
        return msgspec.msgpack.decode(decompress(frame), type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptContent(f"not {kind.__name__}: {error}") from error


def unpack_tokens(tokens: bytes | None, exchange: bytes | None) -> StoredTokens:
    """A turn's tokens, from its frames. Raises CorruptContent."""
    return unpack(exchange, _TokensOnly).tokens if tokens is None else unpack(tokens, StoredTokens)


def unpack_messages(frame: bytes | None) -> Messages:
    """A turn's messages, from its packed Exchange, without unpacking a large reply. Raises CorruptContent."""
    if frame is None or frame[:1] != APART:
        exchange = unpack(frame, Exchange)
        return Messages(exchange.messages, exchange.message)
    packed, size, check, body = _apart(frame)
    try:
        if not 0 <= size <= min(zstandard.frame_content_size(body), MAX_RAW):
            raise CorruptContent(f"a frame declares {size} bytes of messages")
        raw = _local.decompressor.stream_reader(body[:packed]).read(size)
        if zlib.crc32(raw) != check:
            raise CorruptContent("the messages differ from what was stored")
        return msgspec.msgpack.decode(raw, type=Messages)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CorruptContent(f"not valid messages: {error}") from error


def _pack_apart(exchange: Exchange) -> bytes:
    """One zstd frame in which the messages end with a block, so that they can be unpacked alone."""
    packed_messages = msgspec.msgpack.encode(Messages(exchange.messages, exchange.message))
    rest = msgspec.msgpack.encode(msgspec.structs.replace(exchange, messages=[], message=b""))
    compressing = _local.compressor.compressobj(size=len(packed_messages) + len(rest))
    first = compressing.compress(packed_messages) + compressing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    head = _APART_HEAD.pack(APART, len(first), len(packed_messages), zlib.crc32(packed_messages))
    return head + first + compressing.compress(rest) + compressing.flush()


def _unpack_apart(frame: bytes) -> Any:
    """The Exchange; typed as Any, because `unpack` returns the requested type."""
    _, size, _, body = _apart(frame)
    raw = memoryview(decompress(body))
    turn_messages = msgspec.msgpack.decode(raw[:size], type=Messages)
    rest = msgspec.msgpack.decode(raw[size:], type=Exchange)
    return msgspec.structs.replace(rest, messages=turn_messages.messages, message=turn_messages.message)


def _apart(frame: bytes) -> tuple[int, int, int, bytes]:
    """The messages' packed and unpacked size and CRC-32, and the zstd frame. Raises CorruptContent."""
    if len(frame) < _APART_HEAD.size:
        raise CorruptContent(f"{len(frame)} bytes are not a valid frame")
    _, packed, size, check = _APART_HEAD.unpack_from(frame)
    return packed, size, check, frame[_APART_HEAD.size :]


def content_hash(tokens: bytes | None, exchange: bytes) -> str:
    """The hash of a turn's stored frames that the log keeps, to detect flipped bits: 128 bits as hex."""
    hasher = hashlib.sha256(tokens or b"")
    hasher.update(exchange)
    return hasher.hexdigest()[:32]


def render_ids(ids: memoryview, separator: str) -> bytes:
    """Token ids (an int32 view) as the JSON list that an engine wrote."""
    text = msgspec.json.encode(ids.tolist())
    return text if separator == "," else text.replace(b",", separator.encode())


def paste(exchange: Exchange, ids: memoryview | None, payloads: Mapping[str, bytes]) -> bytes:
    """The reply, byte for byte; `ids` is the turn's whole prompt as an int32 view, `payloads` the values by kind.

    A missing payload, and the prompt's ids if they are not given, are written as null; of a payload that was left in
    place only the kind is used.
    """
    values = [(cut.at, cut.length, _value(exchange, cut, payloads)) for cut in exchange.cuts]
    if exchange.prompt_ids_at is not None:
        prompt = b"null" if ids is None else render_ids(ids, exchange.separator)
        values.append((exchange.prompt_ids_at, 0, prompt))
    parts: list[bytes] = []
    done = 0
    for at, length, value in sorted(values, key=lambda value: value[0]):
        parts += [exchange.reply[done:at], value]
        done = at + length
    return b"".join((*parts, exchange.reply[done:]))


def _value(exchange: Exchange, cut: Cut, payloads: Mapping[str, bytes]) -> bytes:
    if cut.form == "text" and cut.kind in payloads:
        return exchange.reply[cut.at : cut.at + cut.length]
    return payloads.get(cut.kind, b"null")
