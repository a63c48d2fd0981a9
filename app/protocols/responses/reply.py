"""A committed reply, or one that is still generated, as a response and as its stream of events; a turn's input
items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.domain.calls import with_given_ids
from app.errors import InvalidRequest
from app.protocols.base import CommittedReply, FirstText
from app.protocols.engine_reply import object_of, read_reply, reasoning_of, text_logprobs
from app.protocols.errors import ErrorFields
from app.protocols.pieces import Logprobs, pieces_of, text_pieces
from app.protocols.responses.items import (
    BETWEEN_SYSTEM,
    COMPACTION,
    CUSTOM,
    ENCRYPTED,
    FUNCTION,
    MESSAGE,
    REASONING,
    RESPONSE,
    SUMMARY,
    call_id,
)
from app.protocols.responses.tools import Named
from app.protocols.sse import event


class Echo(msgspec.Struct, frozen=True, tag="responses", tag_field="protocol", omit_defaults=True):
    """`shown` are the request's fields that its response repeats. `named` are the tools whose calls are spelled
    otherwise than a function's, by the name that the engine knows. `logprobs`: its text has them. `compacts`: the reply
    is a summary, which the client gets as a compaction; `retained` are the items that stay beside it, if the client is
    given the whole new history."""

    shown: dict[str, Any]
    named: dict[str, Named] = {}
    encrypted: bool = False
    logprobs: bool = False
    compacts: bool = False
    retained: list[dict[str, Any]] = []

    @property
    def instructions(self) -> str:
        return self.shown.get("instructions") or ""

    @property
    def is_stored(self) -> bool:
        """Does `GET` find the response? False for `store: false`."""
        return self.shown.get("store") is not False


NO_ECHO = Echo({})

_ECHO = msgspec.json.Decoder(Echo)


def read_echo(raw: bytes | None) -> Echo:
    """A turn's echo; empty for a turn of another protocol."""
    try:
        return NO_ECHO if raw is None else _ECHO.decode(raw)
    except msgspec.DecodeError:
        return NO_ECHO


Item = dict[str, Any]


class _CustomInput(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of a custom tool's call: an object with one text."""

    input: str


_INPUT = msgspec.json.Decoder(_CustomInput)


def output_items(message: Mapping[str, Any], proof: str, named: Mapping[str, Named], encrypted: bool) -> list[Item]:
    """A reply without calls has a message, be it empty: a client that drops reasoning still returns something of it."""
    items: list[Item] = []
    if reasoning := reasoning_of(message):
        content: list[Item] = [{"type": "reasoning_text", "text": reasoning}]
        item: Item = {"id": REASONING + proof, "type": "reasoning", "summary": [], "content": content}
        items.append({**item, "status": "completed", **({"encrypted_content": ENCRYPTED + proof} if encrypted else {})})
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    if (text := message.get("content")) or not calls:
        content = [{"type": "output_text", "text": _text(text), "annotations": [], "logprobs": []}]
        item = {"id": MESSAGE + proof, "type": "message", "role": "assistant", "status": "completed"}
        items.append({**item, "content": content})
    return items + [call_item(call, proof, index, named) for index, call in enumerate(calls)]


def call_item(call: Mapping[str, Any], proof: str, index: int, named: Mapping[str, Named]) -> Item:
    """`index`: its place among the calls. The arguments are the sampled text."""
    function = object_of(call.get("function"))
    flat, arguments = _text(function.get("name")), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    spelled = named.get(flat) or Named(flat)
    called = _text(call.get("id")) or f"call_{proof}_{index}"
    item: Item = {"call_id": called, "name": spelled.name}
    if spelled.namespace is not None:
        item["namespace"] = spelled.namespace
    if not spelled.is_custom:
        item_id = call_id(FUNCTION, proof, index)
        return {"id": item_id, "type": "function_call", **item, "arguments": arguments, "status": "completed"}
    try:
        given: str | None = _INPUT.decode(arguments).input
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        given = None
    shown = arguments if given is None else given
    item_id = call_id(CUSTOM, proof, index, given is None)
    return {"id": item_id, "type": "custom_tool_call", **item, "input": shown, "status": "completed"}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "abort"}
"""Why a response is incomplete, by the engine's finish reason. OpenAI has no word for `abort`."""


def response_of(reply: CommittedReply, message: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Response object; JSON without raw parts. `message` is what there is of one that is still generated."""
    fields, echo = read_reply(reply.body), read_echo(reply.echo)
    counts = fields.counts
    given = with_given_ids(fields.message, reply.given_ids) if message is None else message
    if echo.compacts:  # A model may leave its summary in its reasoning.
        summary = SUMMARY + (given.get("content") or reasoning_of(given) or "")
        output: list[Item] = [{"id": COMPACTION + reply.proof, "type": "compaction", "encrypted_content": summary}]
    else:
        output = output_items(given, reply.proof, echo.named, echo.encrypted)
    reason = _INCOMPLETE.get(fields.finish_reason or "")
    if reason is not None:
        output[-1]["status"] = "incomplete"
    if echo.logprobs and message is None:
        for item in output:
            if item["type"] == "message":
                [part] = item["content"]
                part["logprobs"] = text_logprobs(reply.body, part["text"])
    return {
        "id": RESPONSE + reply.proof,
        "object": "response",
        "created_at": fields.created,
        "status": "completed" if reason is None else "incomplete",
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        **_DEFAULTS,
        **echo.shown,
        **({"completed_at": fields.created} if reason is None else {}),
        "model": fields.model,
        "output": output,
        "usage": {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.sampled,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.sampled,
        },
    }


_DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
"""What the type requires, for a turn that came in another protocol."""


def render_compacted(reply: CommittedReply) -> bytes:
    """The whole new history."""
    response = response_of(reply)
    fields = {name: response[name] for name in ("id", "created_at", "model", "usage")}
    output = [*read_echo(reply.echo).retained, *response["output"]]
    return msgspec.json.encode({**fields, "object": "response.compaction", "output": output})


Event = dict[str, Any]

_BEGINS: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}


def as_events(reply: CommittedReply) -> bytes:
    response = response_of(reply)
    return numbered([*begun_events(response), *rest_of(response)])


def begun_events(response: dict[str, Any]) -> list[Event]:
    begun = {**response, **_BEGINS}
    begun.pop("completed_at", None)
    return [_of_response("created", begun), _of_response("in_progress", begun)]


def rest_of(response: dict[str, Any]) -> list[Event]:
    """All events behind the first two."""
    items = [one for index, item in enumerate(response["output"]) for one in item_events(item, index)]
    return [*items, _of_response(response["status"], response)]


def failed(error: ErrorFields) -> bytes:
    """A whole stream of a response that failed: the openai package takes nothing before `response.created`."""
    empty = {"id": f"{RESPONSE}failed", "object": "response", "created_at": 0, "error": None, "model": ""}
    response = {**empty, **_DEFAULTS, **_BEGINS}
    return numbered([_of_response("created", response), failed_event(response, error)])


def failed_event(response: dict[str, Any], error: ErrorFields) -> Event:
    """With OpenAI's code, by which Codex tells whether it compacts, ends or tries again."""
    code = "invalid_prompt" if error.status < 500 and error.status not in (408, 409) else "server_error"
    if error.is_context or error.status == 429:
        code = "context_length_exceeded" if error.is_context else "rate_limit_exceeded"
    problem = {"code": code, "message": error.message}
    return _of_response("failed", {**response, **_BEGINS, "status": "failed", "error": problem})


def numbered(events: list[Event], first: int = 0) -> bytes:
    """The events, of which the first has the number `first`."""
    return b"".join(
        [event({**one, "sequence_number": number}, one["type"]) for number, one in enumerate(events, first)]
    )


def _of_response(state: str, response: dict[str, Any]) -> Event:
    return {"type": f"response.{state}", "response": response}


_CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""By item type, the name of the events and the field that they fill."""


def item_events(item: Item, index: int = 0) -> list[Event]:
    kind = item["type"]
    if kind == "compaction":
        events = [{"type": "response.output_item.added", "item": item}]
    elif kind in _CALLS:
        events = _call_events(item, *_CALLS[kind])
    else:
        events = _text_events(item)
    return [{**one, "output_index": index} for one in (*events, {"type": "response.output_item.done", "item": item})]


def _begun(item: Item, **empty: Any) -> Event:
    return {"type": "response.output_item.added", "item": {**item, "status": "in_progress", **empty}}


def _call_events(item: Item, kind: str, field: str) -> list[Event]:
    at, given = {"item_id": item["id"]}, item[field]
    deltas = [{"type": f"response.{kind}.delta", **at, "delta": piece} for piece in text_pieces(given) if given]
    return [_begun(item, **{field: ""}), *deltas, {"type": f"response.{kind}.done", **at, field: given}]


def _text_events(item: Item) -> list[Event]:
    """Those of an item with one part of text: reasoning, or a message, whose text may have logprobs."""
    at, part = {"item_id": item["id"], "content_index": 0}, item["content"][0]
    kind = "reasoning_text"
    pieces: list[Event]
    more: Event = {}
    empty: Event = {}
    if item["type"] == "message":
        entries = part["logprobs"]
        kind, more, empty = "output_text", {"logprobs": entries}, {"logprobs": []}
        logprobs = Logprobs(
            [bytes(entry["bytes"]) for entry in entries],
            [len(msgspec.json.encode(entry)) for entry in entries],
            lambda first, last: entries[first:last],
        )
        # They are of just this text.
        found = pieces_of([("delta", part["text"])], logprobs if entries else None)
        pieces = [{"delta": piece.text, "logprobs": piece.logprobs or []} for piece in found]
    else:
        pieces = [{"delta": piece} for piece in text_pieces(part["text"])]
    return [
        _begun(item, content=[]),
        {"type": "response.content_part.added", **at, "part": {**part, "text": "", **empty}},
        *({"type": f"response.{kind}.delta", **at, **piece} for piece in pieces if part["text"]),
        {"type": f"response.{kind}.done", **at, "text": part["text"], **more},
        {"type": "response.content_part.done", **at, "part": part},
    ]


_KINDS = {"reasoning": "reasoning", "message": "content"}


class LiveResponse:
    def __init__(self, begun: CommittedReply) -> None:
        self._begun = begun
        self._is_whole = read_echo(begun.echo).compacts
        self._first = FirstText()
        self._delta: Event = {}
        self._count = 0

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        text = "" if self._is_whole else self._first.add(delta)
        if not text:
            return b""
        if self._delta:
            return self._numbered(self._deltas(text))
        response = response_of(self._begun, {str(self._first.kind): text})
        added, part, self._delta, *_ = item_events(response["output"][0])
        return self._numbered([*begun_events(response), added, part, *self._deltas(text)])

    def _deltas(self, text: str) -> list[Event]:
        return [{**self._delta, "delta": piece} for piece in text_pieces(text)]

    def end(self, reply: CommittedReply) -> bytes:
        response = response_of(reply)
        if self._first.kind is None:
            return self._numbered([*begun_events(response), *rest_of(response)])
        item = response["output"][0]
        text = item["content"][0]["text"] if "content" in item else ""
        rest = self._first.rest(_KINDS.get(item["type"], ""), text)
        events = rest_of(response)
        while events[0]["type"] != f"{self._delta['type'].removesuffix('.delta')}.done":
            del events[0]
        return self._numbered([*(self._deltas(rest) if rest else []), *events])

    def error(self, error: ErrorFields) -> bytes:
        response = response_of(self._begun)
        begun = [] if self._count else begun_events(response)
        return self._numbered([*begun, failed_event(response, error)])

    def _numbered(self, events: list[Event]) -> bytes:
        self._count += len(events)
        return numbered(events, self._count - len(events))


Order = Literal["asc", "desc"]


def input_items(
    messages: Sequence[msgspec.Raw],
    proof: str,
    echo: bytes | None = None,
    order: Order = "desc",
    limit: int = 20,
    after: str | None = None,
) -> bytes:
    """The list object of a turn's request, for `GET …/responses/{id}/input_items`: `messages` are its chat messages,
    less the reply. Instructions are no item.

    Raises InvalidRequest for an `after` that is no item's id.
    """
    kept = read_echo(echo)
    items = [item for message in messages for item in _input_items(msgspec.json.decode(message), kept.named)]
    if items and kept.instructions and items[0].get("role") == "system":
        part = items[0]["content"][0]
        rest = part["text"].removeprefix(kept.instructions).removeprefix(BETWEEN_SYSTEM)
        items = [{**items[0], "content": [{**part, "text": rest}]}, *items[1:]] if rest else items[1:]
    custom = {item["call_id"] for item in items if item["type"] == "custom_tool_call"}
    for index, item in enumerate(items):
        if item["type"] == "function_call_output" and item["call_id"] in custom:
            item["type"] = "custom_tool_call_output"
        item["id"] = f"{_PREFIXES.get(item['type'], 'item')}_{proof}_in{index}"
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise InvalidRequest("after names no input item of this response")
    start = 0 if after is None else names.index(after) + 1
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _input_items(message: dict[str, Any], named: Mapping[str, Named]) -> list[Item]:
    role = message["role"]
    if role == "assistant":
        texts = "".join(part.get("text", "") for part in _parts(message.get("content")))
        return output_items({**message, "content": texts}, "0", named, encrypted=False)
    if role == "tool":
        output = _parts(message.get("content"))
        answer = output[0]["text"] if len(output) == 1 and "text" in output[0] else output
        called = message.get("tool_call_id")
        return [{"type": "function_call_output", "call_id": called, "output": answer, "status": "completed"}]
    kind = "user" if role not in ("system", "developer") else role
    return [{"type": "message", "role": kind, "status": "completed", "content": _parts(message.get("content"))}]


def _parts(content: Any) -> list[Item]:
    """Chat content as input parts."""
    if not isinstance(content, list):
        return [{"type": "input_text", "text": content if isinstance(content, str) else ""}]
    return [_part(part) for part in content if isinstance(part, dict)]


def _part(part: dict[str, Any]) -> Item:
    image = part.get("image_url")
    if image is None:
        text = part.get("text")
        return {"type": "input_text", "text": text if isinstance(text, str) else ""}
    fields = image if isinstance(image, dict) else {"url": image}
    return {"type": "input_image", "image_url": fields.get("url"), "detail": fields.get("detail") or "auto"}
