"""OpenAI chat completions: the engines' own protocol, whose replies pass as they are."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.domain import control
from app.domain.calls import given_prefix, with_ids
from app.domain.control import SessionControl
from app.domain.events import StreamMode
from app.domain.known_body import ContinuedBody
from app.domain.left_out import IMAGE_DETAIL, SERVER_TOOL, left_out_at
from app.domain.request import (
    ChatRequest,
    TokenIds,
    as_raw,
    engine_params,
    fields_of,
    flag,
    items_of,
    join_object,
    require_one,
    stream_mode,
    token_ids,
    value_of,
)
from app.errors import Unsupported
from app.protocols.base import COMMON, IDS, TEXT, CommittedReply, Schema, WireProtocol, nullable
from app.protocols.engine_reply import TokenLogprob
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.pieces import PIECE, Logprobs, pieces_of, text_pieces
from app.protocols.sse import event
from workers.reply import REPLAY

_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": TEXT, "content": {}, "tool_calls": {}, "tool_call_id": {}, "name": {}},
    "required": ["role"],
}

REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "ChatRequest",
    "type": "object",
    "description": "An OpenAI chat request. Fields that Turnlog does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "messages": {
            "type": "array",
            "items": _MESSAGE,
            "minItems": 1,
            "description": "The whole history, and what is new.",
        },
        "tools": {"description": "For the engine; stored once a session."},
        "input_ids": {**nullable(IDS), "description": "The client's own prompt ids."},
    },
    "required": ["messages"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {"model": "simulator", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}


_KNOWN, _KNOWN_BYTES = 32, 256 << 10
"""How many lists of tools up to which size are remembered: agents send the same ones with every turn."""

_CARRIED = (None, "function", "custom")

ORIGINAL = b'"original"'
"""In every body that has such a detail."""


class _Tool(msgspec.Struct):
    type: Any = None


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_TOOL = msgspec.json.Decoder(_Tool)

Places = tuple[str, ...]


def offered_tools(text: bytes, params: dict[str, msgspec.Raw]) -> tuple[bytes | None, Places]:
    """The tools that an engine can be sent, and what is left out. Where none are left, `params` lose the choice too.

    Raises Unsupported where the choice forces a tool that is left out. Tools that are no list of objects are the
    engine's to refuse.
    """
    tools, left_out = _remembered(text) if len(text) <= _KNOWN_BYTES else _carried(text)
    if not left_out:
        return text, ()
    choice = value_of(params.get("tool_choice"), "tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    forces = kind not in (*_CARRIED, "allowed_tools") if tools else choice not in (None, "auto", "none")
    if forces:
        raise Unsupported("tool_choice forces a tool that cannot be sent to an engine")
    if not tools:
        params.pop("tool_choice", None)
        params.pop("parallel_tool_calls", None)
        return None, left_out
    return tools, left_out


def _carried(text: bytes) -> tuple[bytes, Places]:
    """The list without a server's tools, empty if none is left."""
    try:
        items = _ITEMS.decode(text)
        places = [place for place, item in enumerate(items) if _TOOL.decode(item).type not in _CARRIED]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text, ()
    kept = [bytes(item) for place, item in enumerate(items) if place not in places]
    left_out = tuple(left_out_at(SERVER_TOOL, f"tools[{place}]") for place in places)
    return b"[" + b",".join(kept) + b"]" if kept else b"", left_out


_remembered = functools.lru_cache(_KNOWN)(_carried)


def with_known_details(messages: Sequence[msgspec.Raw], known: int) -> tuple[Sequence[msgspec.Raw], Places]:
    """The messages with `detail: "auto"` for images that have `original`, which no engine knows, and their places.

    The first `known` messages have none. Raises InvalidRequest.
    """
    changed: dict[int, msgspec.Raw] = {}
    left_out: list[str] = []
    for index in range(known, len(messages)):
        raw = messages[index]
        if ORIGINAL in bytes(raw):
            message = value_of(raw, f"messages[{index}]")
            content = message.get("content") if isinstance(message, dict) else None
            before = len(left_out)
            for number, part in enumerate(content if isinstance(content, list) else ()):
                image = part.get("image_url") if isinstance(part, dict) else None
                if isinstance(image, dict) and image.get("detail") == "original":
                    image["detail"] = "auto"
                    left_out.append(left_out_at(IMAGE_DETAIL, f"messages[{index}].content[{number}]"))
            if len(left_out) > before:
                changed[index] = as_raw(message)
    if not changed:
        return messages, ()
    return [changed.get(index, raw) for index, raw in enumerate(messages)], tuple(left_out)


def parse_chat(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
    """`has_few_values`: the body has no more values than `bounds.FEW`. `continued`: what is known of it.

    Raises InvalidRequest, which names the field, and Unsupported for `n` other than 1.

    Messages are only split here; `history.RequestHistory.check` checks the new ones.
    """
    others: _Others | None = None if continued is None else continued.others
    fields, many_values = ({}, False) if others is not None else fields_of(body, has_few_values, continued)
    messages, layout = items_of(body, "messages", fields.pop("messages", None), many_values, continued)
    if others is None:
        # Those of the layout are views of copies without the known messages: they do not keep the body.
        others = _others(fields if layout is None else dict(layout.fields), many_values)
    details: Places = ()
    shared, shared_bytes = (0, 0) if continued is None else (continued.shared, continued.end)
    if body.find(ORIGINAL, shared_bytes) >= 0:
        messages, details = with_known_details(messages, shared)
    if details:
        layout = None  # Its messages are not the body's: the next body is read as a whole.
    if layout is not None and others.ids is None:
        layout.others = others
    return ChatRequest(
        messages,
        others.tools,
        others.params,
        others.stream,
        others.ids,
        others.control,
        stream_mode=others.mode,
        layout=layout,
        prefix=None if continued is None else continued.history(),
        left_out=(*others.left_out, *details) if details else others.left_out,
    )


class _Others(msgspec.Struct, frozen=True):
    """What a request's fields beside its messages say, as in `ChatRequest`."""

    tools: bytes | None
    params: dict[str, msgspec.Raw]
    stream: bool
    ids: TokenIds | None
    control: SessionControl | None
    mode: StreamMode | None
    left_out: Places


def _others(fields: dict[str, msgspec.Raw], many_values: bool) -> _Others:
    """Raises as `parse_chat`."""
    tools = fields.pop("tools", None)
    ids = token_ids(fields.pop("input_ids"), "input_ids") if "input_ids" in fields else None
    stream = "stream" in fields and flag(fields.pop("stream"), "stream")
    mode = stream_mode(fields) if "stream_mode" in fields else None
    if "n" in fields:
        require_one(fields.pop("n"))
    params = engine_params({"tools": tools, **fields} if tools is not None else fields, many_values)
    offered: bytes | None = None
    left_out: Places = ()
    if tools is not None:
        del params["tools"]
        if bytes(tools) != b"null":
            offered, left_out = offered_tools(bytes(tools), params)
    own = control.remove_control(params) if control.EXTENSIONS in params else None
    return _Others(offered, params, stream, ids, own, mode, left_out)


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def with_given_ids(reply: CommittedReply) -> bytes:
    """The engine's reply, with the ids that the client was given; all else is raw."""
    if reply.given_ids is None:
        return reply.body
    fields: dict[str, bytes] = {**_FIELDS.decode(reply.body)}
    [choice] = _CHOICES.decode(fields["choices"])
    message = with_ids(choice["message"], reply.given_ids.by_place())
    fields["choices"] = b"[" + join_object({**choice, "message": message}) + b"]"
    return join_object(fields)


DONE = b"data: [DONE]\n\n"

_NOT_IN_A_CHUNK = ("meta_info", "message", "prompt_token_ids", "response_token_ids", "token_ids", *REPLAY)

_IDS_IN_A_CHUNK = PIECE // 12
"""An id has at most ten digits."""

_IN_EVERY_CHUNK = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier"))
"""Fields of a reply that each chunk repeats; the others (such as `usage`) come with the last."""

_WITH_CONTENT = frozenset(("index", "logprobs"))
"""Fields of a choice that come with its content; the others (such as `finish_reason`) come with the last chunk."""


_TEXTS = frozenset(("content", "reasoning_content", "reasoning"))
"""A message's texts, whose tokens may have logprobs."""

Fields = dict[str, msgspec.Raw]

_CHUNK = msgspec.Raw(b'"chat.completion.chunk"')
_NULL = msgspec.Raw(b"null")
_TEXT = msgspec.json.Decoder(str)
_STRINGS = msgspec.json.Decoder(list[str])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_TOKENS = msgspec.json.Decoder(list[TokenLogprob])


def as_stream(body: bytes) -> bytes:
    """A whole reply as chunks and `[DONE]`; unchanged JSON stays raw.

    A chat: the message without its tool calls, each call as a head and its arguments, then the end. Clients take only
    the first of several calls in a chunk (Codex 0.58), or join their arguments (LiteLLM's adapter for Messages).
    """
    reply = _without(_FIELDS.decode(body), _NOT_IN_A_CHUNK)
    [choice] = _CHOICES.decode(reply["choices"])
    if "message" in choice:
        return chunks_of(reply, _with_ids(list(_parts(choice)), choice, {"delta": {}}))
    parts = list(_completion_parts(_without(choice, _NOT_IN_A_CHUNK)))
    return chunks_of(reply, _with_ids(parts, choice, {"text": "", "logprobs": None}), reply["object"])


def chunks_of(reply: Fields, parts: Sequence[Mapping[str, Any]], kind: msgspec.Raw = _CHUNK) -> bytes:
    """The parts as chunks, to the end of the stream; the last has also what no other repeats."""
    *first, last = parts
    repeated = repeated_fields(reply, kind)
    chunks = [{**repeated, "choices": [part]} for part in first]
    chunks.append({**_without(reply, _NOT_IN_A_CHUNK), "object": kind, "choices": [last]})
    return b"".join(map(event, chunks)) + DONE


def repeated_fields(reply: Fields, kind: msgspec.Raw = _CHUNK) -> Fields:
    """What each chunk of a reply has."""
    return {**{name: value for name, value in reply.items() if name in _IN_EVERY_CHUNK}, "object": kind}


def _with_ids(parts: list[dict[str, Any]], choice: Fields, empty: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A choice's parts with the output's ids, where the client asked for them: clients join them, as vLLM's. They come
    with the last part, and before it in parts that are otherwise `empty` if they are many."""
    raw = choice.get("token_ids", _NULL)
    if raw == _NULL:
        return parts
    ids: list[int] = msgspec.json.decode(raw)
    *many, last = range(0, len(ids) or 1, _IDS_IN_A_CHUNK)
    begun = {"index": choice.get("index", 0), "finish_reason": None, **empty}
    pieces = [{**begun, "token_ids": ids[first : first + _IDS_IN_A_CHUNK]} for first in many]
    return [*parts[:-1], *pieces, {**parts[-1], "token_ids": ids[last:]}]


def _parts(choice: Fields, sent: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """A chat's choice, split over several chunks. `sent` are the message's fields that need not be."""
    message = _without(_FIELDS.decode(choice["message"]), sent)
    calls = msgspec.json.decode(message.pop("tool_calls", b"null")) or []
    begun = {"index": choice.get("index", 0), "finish_reason": None}
    for delta in _deltas(message, choice.get("logprobs"), not calls):
        yield {**begun, **delta}
    for number, call in enumerate(calls):
        for piece in call_pieces(call):
            yield {**begun, "delta": {"tool_calls": [{**piece, "index": number}]}}
    yield {"index": begun["index"], "delta": {}, **_without(choice, (*_NOT_IN_A_CHUNK, *_WITH_CONTENT))}


def _deltas(message: Fields, raw: msgspec.Raw | None, is_last: bool) -> Iterator[dict[str, Any]]:
    """A message without calls as deltas, the first of which has what is no text; logprobs beside their text.
    `is_last` as in `pieces_of`."""
    logprobs = None if raw is None else _logprobs(raw)
    with_all = {} if raw is None or logprobs is not None else {"logprobs": raw}
    if logprobs is None and sum(map(len, map(bytes, message.values()))) <= PIECE:
        yield {**with_all, "delta": message}
        return
    # A field that clients join piece by piece, unless it is short and none of those that each reply may have.
    texts = {
        name: _TEXT.decode(value)
        for name, value in message.items()
        if bytes(value)[:1] == b'"' and name != "role" and (name in _TEXTS or len(bytes(value)) > PIECE)
    }
    # Clients show reasoning first, and it was sampled first, but engines name it after the content.
    ordered = sorted(texts.items(), key=lambda text: text[0] == "content")
    head: Mapping[str, Any] = _without(message, texts)
    for piece in pieces_of(ordered, logprobs, is_last):
        text = {piece.name: piece.text} if piece.name else {}
        yield {**with_all, **({"logprobs": piece.logprobs} if piece.logprobs else {}), "delta": {**head, **text}}
        with_all, head = {}, {}
    if head:
        yield {**with_all, "delta": head}


def _logprobs(raw: msgspec.Raw) -> Logprobs | None:
    """A chat's logprobs; None if there are none, or in another shape than OpenAI's."""
    if raw == _NULL:
        return None
    try:
        fields = _FIELDS.decode(raw)
        entries = _ENTRIES.decode(fields["content"])
    except (msgspec.ValidationError, KeyError):
        return None
    if not entries:
        return None
    others = _without(fields, ("content",))
    return Logprobs(
        _spelled(fields["content"], len(entries)),
        [len(bytes(entry)) for entry in entries],
        lambda first, last: {**({} if first else others), "content": entries[first:last]},
    )


def _spelled(content: msgspec.Raw, count: int) -> list[bytes]:
    """Unknown tokens of an engine that spells entries in its own way make up no text."""
    try:
        return [token.spelled() for token in _TOKENS.decode(content)]
    except msgspec.ValidationError:
        return [b""] * count


def _completion_parts(choice: Fields) -> Iterator[dict[str, Any]]:
    """A completion's choice: in one chunk, or in several that have its text and logprobs and one with the end."""
    logprobs = _completion_logprobs(choice.get("logprobs", _NULL))
    if logprobs is None and len(bytes(choice["text"])) <= PIECE:
        yield choice
        return
    empty = {"logprobs": None} if logprobs is not None else {}
    begun = {"index": choice.get("index", 0), "finish_reason": None}
    for piece in pieces_of([("text", _TEXT.decode(choice["text"]))], logprobs):
        yield {**begun, "text": piece.text, "logprobs": piece.logprobs}
    yield {**choice, **empty, "text": ""}


def _completion_logprobs(raw: msgspec.Raw) -> Logprobs | None:
    """A completion's logprobs, which are lists of one length; None if there are none, or in another shape."""
    if raw == _NULL:
        return None
    try:
        fields = _FIELDS.decode(raw)
        tokens = _STRINGS.decode(fields["tokens"])
        lists = {
            name: entries for name, value in fields.items() if value != _NULL and (entries := _ENTRIES.decode(value))
        }
    except (msgspec.ValidationError, KeyError):
        return None
    if not tokens or any(len(entries) != len(tokens) for entries in lists.values()):
        return None
    return Logprobs(
        [token.encode() for token in tokens],
        [sum(len(bytes(entry)) for entry in row) for row in zip(*lists.values(), strict=True)],
        lambda first, last: {**fields, **{name: entries[first:last] for name, entries in lists.items()}},
    )


def call_pieces(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tool call's head with empty arguments, then its arguments."""
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        yield call
        return
    yield {**call, "function": {**function, "arguments": ""}}
    arguments = function["arguments"]
    for piece in text_pieces(arguments) if isinstance(arguments, str) else (arguments,):
        yield {"function": {"arguments": piece}}


def _without(fields: Fields, names: Collection[str]) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


class LiveChat:
    def __init__(self, begun: CommittedReply) -> None:
        self._repeated = repeated_fields(_FIELDS.decode(begun.body))
        self._sent: set[str] = set()
        self._prefix = given_prefix("chat", begun.proof)
        self._places: set[int] = set()
        self._ids: set[str] = set()

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        texts = {name: text for name, text in delta.items() if name != "tool_calls"}
        if not self._sent:
            texts = {"role": "assistant", **texts}
            self._sent.add("role")
        self._sent.update(texts)
        raw = {name: as_raw(text) for name, text in texts.items()}
        deltas = [delta["delta"] for delta in _deltas(raw, None, is_last=True)] if texts else []
        for call in map(self._with_id, delta.get("tool_calls", ())):
            deltas += [{"tool_calls": [{**piece, "index": call["index"]}]} for piece in call_pieces(call)]
        choices = ({"index": 0, "delta": piece, "finish_reason": None} for piece in deltas)
        return b"".join(event({**self._repeated, "choices": [choice]}) for choice in choices)

    def _with_id(self, call: dict[str, Any]) -> dict[str, Any]:
        """A piece of a call. Its first has the id that `app.domain.calls.given_ids` makes of the whole reply."""
        place, call_id = call["index"], call.get("id")
        if place in self._places:
            return call
        self._places.add(place)
        if not isinstance(call_id, str) or not call_id or call_id in self._ids:
            return {**call, "id": f"{self._prefix}_{place}"}
        self._ids.add(call_id)
        return call

    def end(self, reply: CommittedReply) -> bytes:
        """The message's fields that were not sent, the logprobs, and the end."""
        fields = _FIELDS.decode(reply.body)
        [choice] = _CHOICES.decode(fields["choices"])
        parts = list(_parts(choice, {*self._sent, "tool_calls"}))
        return chunks_of(fields, _with_ids(parts, choice, {"delta": {}}))

    def error(self, error: ErrorFields) -> bytes:
        return error_event(error)


def error_event(error: ErrorFields) -> bytes:
    """Without `[DONE]`, which would end the stream as if it were whole."""
    return event(msgspec.Raw(openai_error(error)))


CHAT = WireProtocol(
    name="chat",
    route="/v1/chat/completions",
    parse=parse_chat,
    reply=with_given_ids,
    events=lambda reply: as_stream(with_given_ids(reply)),
    live=LiveChat,
    error=openai_error,
    error_event=error_event,
    schema=REQUEST,
    example=EXAMPLE,
    is_native=True,
    has_layouts=True,
)
