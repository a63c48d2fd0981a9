"""Canonical messages: what two spellings of one message have in common, and its hash.

Harnesses change the engine's assistant message before they send it back: they drop reasoning, turn null into absent or
`""`, re-serialise tool arguments, reorder unknown fields. The `tolerant` matcher ignores that; the stored text stays
the engine's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from app.domain import bounds
from app.domain.calls import Message
from app.domain.events import Matcher
from app.domain.images import image_of
from app.domain.split import LONG, quoted_parts
from app.domain.surrogates import mended_text
from app.errors import InvalidRequest
from workers.parse_json import MAX_DEPTH, too_deep


def digest(data: bytes) -> str:
    """128 bits as hex."""
    return hashlib.sha256(data).hexdigest()[:32]


def canonical_hash(message: Message, matcher: Matcher) -> str:
    """128 bits over the canonical form of the message under `matcher`, as hex."""
    value = CANONICAL[matcher](message)
    if not any(isinstance(part, str) and len(part) > LONG for part in _members_of(value)):
        return digest(msgspec.json.encode(value, order="sorted"))
    hasher = hashlib.sha256()
    for piece in _encoded(value):
        hasher.update(piece)
    return hasher.hexdigest()[:32]


def _members_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _encoded(value: Any) -> Iterator[bytes]:
    """As msgspec encodes it with sorted keys, but a long text in pieces, so that other threads can run between them."""
    if isinstance(value, str):
        yield from quoted_parts(value)
    elif isinstance(value, Mapping):
        for index, key in enumerate(sorted(value)):
            yield (b"," if index else b"{") + msgspec.json.encode(key) + b":"
            yield from _encoded(value[key])
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _encoded(item)
        yield b"]" if value else b"[]"
    else:
        yield msgspec.json.encode(value)


def _tolerant(message: Message) -> list[Any]:
    """Role, text and calls: absent, null, "", [] and padding are equal, and so are equal arguments."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if isinstance(legacy := message.get("function_call"), Mapping):
        calls.append([None, *_function(legacy)])
    answers = message.get("tool_call_id") or message.get("id") if message["role"] == "tool" else None
    return [message["role"], _content(message.get("content")), calls, answers]


CANONICAL: Mapping[Matcher, Callable[[Message], Any]] = {
    "tolerant": _tolerant,
    "strict": lambda message: message,  # every field, whatever its order and spacing
    "role_content_only": lambda message: [message["role"], _content(message.get("content"))],
}


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list):
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content).strip()
        return [_part(part) for part in content]
    return _plain(content)


def _part(part: Any) -> Any:
    """Inline images are equal by their bytes and media type, however they are encoded."""
    image = image_of(part)
    return _plain(part) if image is None else ["image", image.media_type, image.sha256]


def _call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return [None, None, _plain(call)]
    function = call.get("function")
    return [call.get("id"), *_function(function if isinstance(function, Mapping) else call)]


def _function(function: Message) -> list[Any]:
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        text = arguments.strip()
        if not text:
            return {}
        if len(text) > bounds.FEW and bounds.is_too_much(text.encode(errors="surrogatepass")):
            return text
        try:
            return _plain(msgspec.json.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            mended = mended_text(text)
            return text if mended is None else _arguments(mended)
    return {} if arguments is None else _plain(arguments)


_EXACT = 2**53
"""Below it, every integer is a double."""

_DOUBLES = 2**1023
"""Below it, every integer has a nearest double."""


def _plain(value: Any) -> Any:
    """JSON without what a re-serialisation changes: 1e3, 1000.0 and 1000 are one number.

    JavaScript has only doubles: what it returns for an integer from 2**53 on is the nearest one.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and _EXACT <= abs(value) < _DOUBLES:
        return float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def calls_hash(message: Message) -> str | None:
    """A hash of an assistant's text, less leading reasoning, and its calls' ids and names; None without a call."""
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return None
    _, text, made, _ = _tolerant(without_reasoning(message))
    return digest(msgspec.json.encode([text, [call[:2] for call in made]]))


def bare_hash(message: Message, matcher: Matcher) -> str | None:
    """The canonical hash of an assistant's message without its leading reasoning; None if it has none."""
    if matcher != "tolerant" or message["role"] != "assistant" or (bare := without_reasoning(message)) is message:
        return None
    return canonical_hash(bare, matcher)


def is_beginning(part: Message, whole: Message) -> bool:
    """Is an assistant's message the beginning of another one: of its text, with the first of its tool calls?"""
    (_, text, calls, _), (_, whole_text, whole_calls, _) = _tolerant(part), _tolerant(whole)
    has_text = text == whole_text or (
        isinstance(text, str) and isinstance(whole_text, str) and whole_text.startswith(text)
    )
    return has_text and calls == whole_calls[: len(calls)]


def decode_message(raw: msgspec.Raw | bytes, where: str) -> Message:
    """A message object. Raises InvalidRequest if it is not an object with a role, or nests too deep."""
    if too_deep(bytes(memoryview(raw))):
        raise InvalidRequest(f"{where} nests deeper than {MAX_DEPTH} levels")
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string")
    if not isinstance(message.get("tool_calls") or [], list):
        raise InvalidRequest(f"{where}.tool_calls must be a list")
    return message


_DECODE = msgspec.json.Decoder[Any]().decode
_ENCODE = msgspec.json.Encoder().encode


def plain_message(raw: msgspec.Raw | bytes) -> tuple[Message, str] | None:
    """A message of a role and a text, perhaps with calls, and its canonical hash (`tolerant`), in one step; None for
    any other one, which `decode_message` and `canonical_hash` read, or refuse."""
    text = bytes(raw)
    if len(text) > LONG or text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        return None
    try:
        message = _DECODE(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if type(message) is not dict:
        return None
    role, content = message.get("role"), message.get("content")
    calls, answered = message.get("tool_calls") or (), message.get("tool_call_id") if role == "tool" else None
    if type(role) is not str or type(content) is not str or message.get("function_call"):
        return None
    if calls:
        try:
            value = _tolerant(message) if type(calls) is list else None
            return None if value is None else (message, digest(msgspec.json.encode(value, order="sorted")))
        except (TypeError, UnicodeEncodeError):
            return None
    if role == "tool" and (type(answered) is not str or not answered):
        return None
    return message, hashlib.sha256(_ENCODE((role, content.strip(), (), answered))).hexdigest()[:32]


# Reasoning inside a message's content: what an engine without a reasoning parser returns, and harnesses move or drop.
#
# <think>Paris is cold.</think>Take a coat.        ─┐
# Paris is cold.</think>Take a coat.                │  the same text: Take a coat.
# [{"type": "thinking", …}, {"type": "text", …}]   ─┘

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
)
"""What families open and close reasoning with: Qwen, DeepSeek, GLM, Kimi, Nemotron and MiniMax; prompted models;
Seed-OSS; Magistral; Command A; gpt-oss; Gemma 4."""

_PARTS = ("thinking", "redacted_thinking", "reasoning")


def without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without leading reasoning in its content; the message itself if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if not (isinstance(part, Mapping) and part.get("type") in _PARTS)]
        texts = [text for part in parts if isinstance(part, Mapping) and isinstance(text := part.get("text"), str)]
        if len(texts) < len(parts):
            return message if len(parts) == len(content) else {**message, "content": parts}
        bare = _behind_reasoning("".join(texts))
    elif isinstance(content, str):
        bare = _behind_reasoning(content)
        if bare is content:
            return message
    else:
        return message
    return {**message, "content": bare}


def _behind_reasoning(text: str) -> str:
    """What follows leading reasoning. Reasoning that is not closed has nothing behind it; reasoning may be closed
    without being opened, where the chat template opens it."""
    begun = text.lstrip()
    for opening, closing in REASONING_TAGS:
        if begun.startswith(opening):
            return begun.partition(closing)[2]
    for opening, closing in REASONING_TAGS:
        end = text.find(closing)
        if end >= 0 and opening not in text[:end]:
            return text[end + len(closing) :]
    return text
