"""Joins the messages of several generations of one turn.

An engine parses each generation separately, so one cut inside its reasoning or a tool call becomes two broken halves.
So the text is joined first, from the tokens' bytes if the reply has them, and parsed again: `<think>…</think>` for
reasoning, `<tool_call>{json}</tool_call>` (Hermes, Qwen) for calls. Calls in another format stay text, unless an engine
parsed them whole.
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
REASONING = ("reasoning_content", "reasoning")
"""A message's reasoning, as SGLang and earlier vLLM name it, and as vLLM does now."""

_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_BROKEN = "\ufffd"


class _Token(msgspec.Struct):
    token: str | None = None
    bytes: list[int] | None = None


class _Call(msgspec.Struct):
    """A call as a model writes it; `arguments` is raw JSON."""

    name: str
    arguments: msgspec.Raw


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ParsedCall(msgspec.Struct):
    """A call that an engine parsed, as it returns it."""

    id: str
    function: _Function


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Reply(msgspec.Struct):
    """Part of a chat's reply."""

    choices: list[_Choice]


_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(_Reply)
_TOKENS = msgspec.json.Decoder(list[_Token])
_TEXTS = msgspec.json.Decoder(list[str])
_TRIPLES = msgspec.json.Decoder(list[tuple[float, int, str | None]])
_CALL = msgspec.json.Decoder(_Call)
_PARSED_CALLS = msgspec.json.Decoder(list[_ParsedCall] | None)


class Stop(NamedTuple):
    """A stop string `text` that begins at byte `at` of the joined text and is complete after `tokens` tokens."""

    tokens: int
    at: int
    text: str

    def cut(self, whole: bytes, *, keeps: bool) -> bytes:
        return whole[: self.at + (len(self.text.encode()) if keeps else 0)]


class MessageParts(NamedTuple):
    """One generation's message; `matched` is the stop token or string that ended it, if the engine names it.

    `at_end`: its last token is the end token, which vLLM tells by a `stop_reason` of null and leaves out of the text.
    """

    fields: Fields
    content: str
    reasoning: str
    calls: list[_ParsedCall]
    finish: Any
    matched: Any
    at_end: bool = False

    @classmethod
    def of(cls, message: Fields, choice: Fields) -> MessageParts:
        """The message was validated except for its calls: invalid ones are ignored."""
        content, reasoning, short = (_text(message.get(name)) for name in ("content", *REASONING))
        try:
            calls = _PARSED_CALLS.decode(message.get("tool_calls", b"null")) or []
        except msgspec.ValidationError:
            calls = []
        finish = msgspec.json.decode(choice.get("finish_reason", b"null"))
        matched = msgspec.json.decode(choice.get("matched_stop", choice.get("stop_reason", b"null")))
        at_end = finish == "stop" and matched is None and "stop_reason" in choice
        return cls(message, content, reasoning or short, calls, finish, matched, at_end)


def _text(raw: msgspec.Raw | None) -> str:
    value = None if raw is None else msgspec.json.decode(raw)
    return value if isinstance(value, str) else ""


def token_texts(meta: Fields, logprobs: Fields, count: int) -> list[bytes] | None:
    """Each output token's bytes, as reported with the logprobs; None if they are not reported."""
    try:
        if not is_null(logprobs.get("content")):
            texts = [_bytes(token.token, token.bytes) for token in _TOKENS.decode(logprobs["content"])]
        elif not is_null(logprobs.get("tokens")):
            texts = [text.encode() for text in _TEXTS.decode(logprobs["tokens"])]
        else:
            texts = [_bytes(text, None) for _, _, text in _TRIPLES.decode(meta.get("output_token_logprobs", b"[]"))]
    except (msgspec.ValidationError, ValueError):
        return None
    known = [text for text in texts if text is not None]
    return known if len(known) == count else None


def text_of(body: bytes) -> str:
    """The text of a chat reply's tokens, as reported with the logprobs."""
    [choice] = _CHOICES.decode(body).choices
    return b"".join(_bytes(token.token, token.bytes) or b"" for token in choice.logprobs.content).decode(
        "utf-8", "replace"
    )


def _bytes(text: str | None, raw: list[int] | None) -> bytes | None:
    return bytes(raw) if raw is not None else None if text is None else text.encode()


def stop_across(texts: Sequence[Sequence[bytes]], stops: Sequence[str]) -> Stop | None:
    """The first stop string to be completed across a boundary between these generations' tokens.

    If one token completes several, it is the first that the client named, as in the engines.
    """
    tokens = [token for text in texts for token in text]
    whole = b"".join(tokens)
    boundaries, at = [], 0
    for text in texts[:-1]:
        at += sum(map(len, text))
        boundaries.append(at)
    ends, end = [], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    matches = []
    for stop in filter(None, stops):
        size = len(stop.encode())
        for boundary in boundaries:
            start = whole.find(stop.encode(), max(boundary - size + 1, 0), boundary + size - 1)
            if start >= 0:
                count = next(number for number, end in enumerate(ends, 1) if end >= start + size)
                matches.append(Stop(count, start, stop))
    return min(matches, key=lambda stop: stop.tokens, default=None)


def raw_text(part: MessageParts, texts: Sequence[bytes] | None) -> bytes | None:
    """A generation's text from its tokens; None if the message shows that they do not determine it.

    Tokens decoded one by one may lack the spaces between them. What ended the generation is not included.
    """
    if texts is None:
        return None
    whole = b"".join(texts)
    shown = whole.decode("utf-8", "replace")
    if any(text.strip(_BROKEN) not in shown for text in (part.content, part.reasoning)):
        return None
    end = part.content or part.reasoning
    ended = part.at_end or isinstance(part.matched, int) or (part.finish == "tool_calls" and texts[-1:] != [CALL_END])
    if ended and texts and not end.encode().endswith(texts[-1]):
        return whole.removesuffix(texts[-1])
    if isinstance(part.matched, str) and part.matched and not end.endswith(part.matched):
        return whole.partition(part.matched.encode())[0]
    return whole


def joined_message(
    parts: Sequence[MessageParts],
    texts: Sequence[Sequence[bytes] | None],
    *,
    stop: Stop | None,
    keeps_stop: bool,
    has_tools: bool,
    is_raw: bool = False,
    name: bytes,
) -> tuple[Fields, bool]:
    """The joined message, and whether it has tool calls. New calls' ids are derived from `name`."""
    whole = b""
    for part, known in zip(parts, texts, strict=True):
        raw = raw_text(part, known) if stop is None else b"".join(known or ())
        whole += _rebuilt(part, whole) if raw is None else raw
    if stop is not None:
        whole = stop.cut(whole, keeps=keeps_stop)
    if is_raw:
        return {**parts[0].fields, "content": _encoded(whole.decode("utf-8", "replace"))}, False
    reasoning, content = _parted(whole.decode("utf-8", "replace"), parts)
    engine_calls = [call for part in parts for call in part.calls]
    calls: list[dict[str, Any]] = []
    if has_tools or engine_calls:
        content, calls = _called(content, parts, engine_calls, name)
    message = {**parts[0].fields, **{key: raw for key, raw in parts[-1].fields.items() if key not in parts[0].fields}}
    message["content"] = _encoded(content)
    named = [key for key in REASONING if key in message]
    for key in named or REASONING[: bool(reasoning)]:
        message[key] = msgspec.Raw(msgspec.json.encode(reasoning or None))
    if calls:
        message["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))
    elif engine_calls:
        message.pop("tool_calls", None)
    return message, bool(calls)


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _rebuilt(part: MessageParts, before: bytes) -> bytes:
    """A generation's text, reconstructed from its message, to follow `before`."""
    if not before:
        if not part.reasoning:
            return part.content.encode()
        answer = f"\n{CLOSE}\n\n{part.content}" if part.content or part.calls else ""
        return f"{OPEN}\n{part.reasoning}{answer}".encode()
    if OPEN.encode() in before and CLOSE.encode() not in before and part.reasoning and part.content:
        return f"{part.reasoning}\n{CLOSE}\n\n{part.content}".encode()
    # Outside of reasoning, what the engine took for reasoning was part of the answer.
    return (part.reasoning + part.content).encode()


def _parted(whole: str, parts: Sequence[MessageParts]) -> tuple[str, str]:
    """Reasoning and content, if the engine separates them: the first message that has either shows it."""
    first = next((part for part in parts if part.content or part.reasoning), parts[0])
    hidden = whole.startswith(OPEN) and not any(OPEN in part.content for part in parts)
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
    content: str, parts: Sequence[MessageParts], engine_calls: list[_ParsedCall], name: bytes
) -> tuple[str, list[dict[str, Any]]]:
    """The content without its calls, and the calls; all of it is content if one is incomplete.

    Also if a generation has a complete call in its content: then its engine does not parse calls.
    """
    if not engine_calls and any(_CALLS.search(part.content) for part in parts):
        return content, []
    names = _CALLS.findall(content)
    if not names or len(names) != content.count(CALL):
        if engine_calls and CALL not in content:
            shown = [_shown(call.id, number, call.function) for number, call in enumerate(engine_calls)]
            return "".join(part.content for part in parts), shown
        return content, []
    known = list(engine_calls)
    calls = []
    for number, text in enumerate(names):
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


def _same(first: str, other: str) -> bool:
    try:
        return bool(msgspec.json.decode(first) == msgspec.json.decode(other))
    except (msgspec.DecodeError, RecursionError):
        return first == other


def _shown(call_id: str, number: int, function: _Function) -> dict[str, Any]:
    return {
        "id": call_id,
        "index": number,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


def whole_message(beginning: bytes, rest: bytes) -> bytes:
    """One message, as the model saw it, of a beginning that its client wrote (`app.domain.prefill`), of text alone, and
    a valid rest.

    An engine parses the rest by itself: what it takes for reasoning goes on with the beginning, whether that has opened
    a thought or, as where a parser expects one in every reply, is a part of the answer.
    """
    begun, message = _FIELDS.decode(beginning), _FIELDS.decode(rest)
    text = _text(begun.get("content"))
    reasoning = _text(message.get(REASONING[0])) or _text(message.get(REASONING[1]))
    content = _text(message.get("content"))
    has_closed = OPEN in text and CLOSE not in text and reasoning and content
    message = {**begun, **{name: raw for name, raw in message.items() if name not in REASONING}}
    closing = f"\n{CLOSE}\n\n" if has_closed else ""
    message["content"] = _encoded(f"{text}{reasoning}{closing}{content}")
    return msgspec.json.encode(message)
