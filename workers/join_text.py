"""What several generations of one turn said together.

An engine parses each generation by itself. One that was cut inside its reasoning, or a tool call, it sees as two
halves of neither. So the text is put together first, from the tokens' own bytes where a reply tells them, and parsed
again: `<think>…</think>` for reasoning, `<tool_call>{json}</tool_call>` (Hermes, Qwen) for calls. Calls in another form
stay text, unless an engine found them whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from workers.parse_json import Fields, is_null

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"
CALL_END = b"</tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_BROKEN = "\ufffd"


class _Token(msgspec.Struct):
    token: str | None = None
    bytes: list[int] | None = None


class _Call(msgspec.Struct):
    """A call as a model writes it; `arguments` is its JSON."""

    name: str
    arguments: msgspec.Raw


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Made(msgspec.Struct):
    """A call that an engine found, as it returns it."""

    id: str
    function: _Function


_TOKENS = msgspec.json.Decoder(list[_Token])
_TEXTS = msgspec.json.Decoder(list[str])
_TRIPLES = msgspec.json.Decoder(list[tuple[float, int, str | None]])
_CALL = msgspec.json.Decoder(_Call)
_MADE = msgspec.json.Decoder(list[_Made] | None)


class Stop(NamedTuple):
    """A stop string `text` that begins at byte `at` of all that was said, and is complete after `tokens` tokens."""

    tokens: int
    at: int
    text: str

    def cut(self, whole: bytes, *, keeps: bool) -> bytes:
        return whole[: self.at + (len(self.text.encode()) if keeps else 0)]


class MessageParts(NamedTuple):
    """One generation's message; `matched` is the stop token or string that ended it, where the engine names it."""

    fields: Fields
    content: str
    reasoning: str
    calls: list[_Made]
    finish: Any
    matched: Any

    @classmethod
    def of(cls, message: Fields, choice: Fields) -> MessageParts:
        """The message was judged, but for its calls: what is no call is none."""
        content, reasoning = (_text(message.get(name)) for name in ("content", "reasoning_content"))
        try:
            calls = _MADE.decode(message.get("tool_calls", b"null")) or []
        except msgspec.ValidationError:
            calls = []
        finish, matched = (msgspec.json.decode(choice.get(key, b"null")) for key in ("finish_reason", "matched_stop"))
        return cls(message, content, reasoning, calls, finish, matched)


def _text(raw: msgspec.Raw | None) -> str:
    value = None if raw is None else msgspec.json.decode(raw)
    return value if isinstance(value, str) else ""


def token_texts(meta: Fields, logprobs: Fields, count: int) -> list[bytes] | None:
    """Each output token's bytes, as a reply tells them with the logprobs; None where it does not."""
    try:
        if not is_null(logprobs.get("content")):
            found = [_bytes(one.token, one.bytes) for one in _TOKENS.decode(logprobs["content"])]
        elif not is_null(logprobs.get("tokens")):
            found = [text.encode() for text in _TEXTS.decode(logprobs["tokens"])]
        else:
            found = [_bytes(text, None) for _, _, text in _TRIPLES.decode(meta.get("output_token_logprobs", b"[]"))]
    except (msgspec.ValidationError, ValueError):
        return None
    known = [text for text in found if text is not None]
    return known if len(known) == count else None


def _bytes(text: str | None, raw: list[int] | None) -> bytes | None:
    return bytes(raw) if raw is not None else None if text is None else text.encode()


def stop_across(texts: Sequence[Sequence[bytes]], stops: Sequence[str]) -> Stop | None:
    """The stop string across a seam between these texts' tokens that is complete first.

    Of several that one token completes it is the first that the client named, as engines have it.
    """
    tokens = [token for text in texts for token in text]
    whole = b"".join(tokens)
    seams, at = [], 0
    for text in texts[:-1]:
        at += sum(map(len, text))
        seams.append(at)
    ends, end = [], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    found = []
    for stop in filter(None, stops):
        size = len(stop.encode())
        for seam in seams:
            start = whole.find(stop.encode(), max(seam - size + 1, 0), seam + size - 1)
            if start >= 0:
                count = next(number for number, end in enumerate(ends, 1) if end >= start + size)
                found.append(Stop(count, start, stop))
    return min(found, key=lambda stop: stop.tokens, default=None)


def raw_text(said: MessageParts, texts: Sequence[bytes] | None) -> bytes | None:
    """A generation's text from its tokens; None where the message shows that they do not tell it.

    Tokens that are shown apart may lack the spaces between them. What ended the generation is no part of it.
    """
    if texts is None:
        return None
    whole = b"".join(texts)
    shown = whole.decode("utf-8", "replace")
    if any(part.strip(_BROKEN) not in shown for part in (said.content, said.reasoning)):
        return None
    end = said.content or said.reasoning
    ended = isinstance(said.matched, int) or (said.finish == "tool_calls" and texts[-1:] != [CALL_END])
    if ended and texts and not end.encode().endswith(texts[-1]):
        return whole.removesuffix(texts[-1])
    if isinstance(said.matched, str) and said.matched and not end.endswith(said.matched):
        return whole.partition(said.matched.encode())[0]
    return whole


def joined_message(
    saids: Sequence[MessageParts],
    texts: Sequence[Sequence[bytes] | None],
    *,
    stop: Stop | None,
    keeps_stop: bool,
    has_tools: bool,
    name: bytes,
) -> tuple[Fields, bool]:
    """The message of all generations, and whether tool calls are in it. `name` is what new calls' ids are made of."""
    whole = b""
    for said, known in zip(saids, texts, strict=True):
        raw = raw_text(said, known) if stop is None else b"".join(known or ())
        whole += _rebuilt(said, whole) if raw is None else raw
    if stop is not None:
        whole = stop.cut(whole, keeps=keeps_stop)
    reasoning, content = _parted(whole.decode("utf-8", "replace"), saids)
    made = [call for said in saids for call in said.calls]
    calls: list[dict[str, Any]] = []
    if has_tools or made:
        content, calls = _called(content, saids, made, name)
    message = {**saids[0].fields, **{key: raw for key, raw in saids[-1].fields.items() if key not in saids[0].fields}}
    message["content"] = msgspec.Raw(msgspec.json.encode(content))
    if reasoning or "reasoning_content" in message:
        message["reasoning_content"] = msgspec.Raw(msgspec.json.encode(reasoning or None))
    if calls:
        message["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))
    elif made:
        message.pop("tool_calls", None)
    return message, bool(calls)


def _rebuilt(said: MessageParts, before: bytes) -> bytes:
    """What a generation's text must have been, by its message, behind `before`."""
    if not before:
        if not said.reasoning:
            return said.content.encode()
        answer = f"\n{CLOSE}\n\n{said.content}" if said.content or said.calls else ""
        return f"{OPEN}\n{said.reasoning}{answer}".encode()
    if OPEN.encode() in before and CLOSE.encode() not in before and said.reasoning and said.content:
        return f"{said.reasoning}\n{CLOSE}\n\n{said.content}".encode()
    # Outside of reasoning, what an engine took for it was answer.
    return (said.reasoning + said.content).encode()


def _parted(whole: str, saids: Sequence[MessageParts]) -> tuple[str, str]:
    """Reasoning and content, if the engine tells them apart: the first that said anything shows it."""
    first = next((said for said in saids if said.content or said.reasoning), saids[0])
    hidden = whole.startswith(OPEN) and not any(OPEN in said.content for said in saids)
    if not first.reasoning and not hidden:
        return "", whole
    reasoning, closed, content = whole.removeprefix(OPEN).partition(CLOSE)
    if first.reasoning[:1].isspace():
        return reasoning, content
    reasoning = reasoning.removeprefix("\n")
    if closed:
        reasoning = reasoning.removesuffix("\n")
    return reasoning, content.removeprefix("\n").removeprefix("\n")


def _called(
    content: str, saids: Sequence[MessageParts], made: list[_Made], name: bytes
) -> tuple[str, list[dict[str, Any]]]:
    """The content without the calls in it, and those; all of it content where one is not whole.

    Or where a generation shows a whole one as content: its engine does not parse calls.
    """
    if not made and any(_CALLS.search(said.content) for said in saids):
        return content, []
    found = _CALLS.findall(content)
    if not found or len(found) != content.count(CALL):
        if made and CALL not in content:
            shown = [_shown(one.id, number, one.function) for number, one in enumerate(made)]
            return "".join(said.content for said in saids), shown
        return content, []
    known = list(made)
    calls = []
    for number, text in enumerate(found):
        function = _function(text)
        if function is None:
            return content, []
        if known and known[0].function.name == function.name and _same(known[0].function.arguments, function.arguments):
            call_id = known.pop(0).id
        else:
            call_id = "call_" + hashlib.sha256(b"%b\0%d\0%b" % (name, number, text.encode())).hexdigest()[:24]
        calls.append(_shown(call_id, number, function))
    return content[: content.index(CALL)].strip(), calls


def _function(text: str) -> _Function | None:
    try:
        call = _CALL.decode(text)
        raw = bytes(call.arguments)
        arguments = msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw.decode()
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return _Function(call.name, arguments)


def _same(one: str, other: str) -> bool:
    try:
        return bool(msgspec.json.decode(one) == msgspec.json.decode(other))
    except (msgspec.DecodeError, RecursionError):
        return one == other


def _shown(call_id: str, number: int, function: _Function) -> dict[str, Any]:
    return {
        "id": call_id,
        "index": number,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }
