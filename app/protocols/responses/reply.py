"""A committed reply, or one that is still generated, as a response and as its stream of events; a response's ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from app.domain.calls import with_given_ids
from app.protocols.base import CommittedReply, FirstText
from app.protocols.engine_reply import Counts, read_reply, reasoning_of, text_logprobs
from app.protocols.errors import ErrorFields
from app.protocols.pieces import Logprobs, pieces_of, text_pieces
from app.protocols.responses import ids
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

_INPUT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


def output_items(message: Mapping[str, Any], proof: str, named: Mapping[str, Named], encrypted: bool) -> list[Item]:
    """A reply without calls has a message, be it empty: a client that drops reasoning still returns something of it."""
    items: list[Item] = []
    if reasoning := reasoning_of(message):
        items.append(reasoning_item(ids.REASONING + proof, reasoning))
        if encrypted:
            items[-1]["encrypted_content"] = ids.ENCRYPTED + proof
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    content = message.get("content")
    if content or not calls:
        items.append(message_item(ids.MESSAGE + proof, content if isinstance(content, str) else ""))
    return items + [call_item(call, proof, index, named) for index, call in enumerate(calls)]


def compaction_item(message: Mapping[str, Any], proof: str) -> Item:
    """A model may leave its summary in its reasoning."""
    summary = message.get("content") or reasoning_of(message) or ""
    return {"id": ids.COMPACTION + proof, "type": "compaction", "encrypted_content": ids.SUMMARY + summary}


def reasoning_item(item_id: str, text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def message_item(item_id: str, text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def call_item(call: Mapping[str, Any], proof: str, index: int, named: Mapping[str, Named]) -> Item:
    """`index`: its place among the calls. The arguments are the sampled text."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    flat, arguments = _text(function.get("name")), _arguments(function.get("arguments"))
    spelled = named.get(flat) or Named(flat)
    called = _text(call.get("id")) or f"call_{proof}_{index}"
    item: Item = {"call_id": called, "name": spelled.name}
    if spelled.namespace is not None:
        item["namespace"] = spelled.namespace
    if not spelled.is_custom:
        item_id = ids.call_id(ids.FUNCTION, proof, index)
        return {"id": item_id, "type": "function_call", **item, "arguments": arguments, "status": "completed"}
    given = _input_of(arguments)
    item_id = ids.call_id(ids.CUSTOM, proof, index, given is None)
    status = "completed"
    return {
        "id": item_id,
        "type": "custom_tool_call",
        **item,
        "input": arguments if given is None else given,
        "status": status,
    }


def _input_of(arguments: str) -> str | None:
    """A custom tool's input; None if the arguments are not an object with one text, `input`."""
    try:
        fields = _INPUT.decode(arguments)
        return _TEXT.decode(fields["input"]) if fields.keys() == {"input"} else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "abort"}
"""Why a response is incomplete, by the engine's finish reason. OpenAI has no word for `abort`."""


def response_of(reply: CommittedReply, message: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Response object; JSON without raw parts. `message` is what there is of one that is still generated."""
    fields, echo = read_reply(reply.body), read_echo(reply.echo)
    given = with_given_ids(fields.message, reply.given_ids) if message is None else message
    if echo.compacts:
        output = [compaction_item(given, reply.proof)]
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
        "id": ids.RESPONSE + reply.proof,
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
        "usage": _usage(fields.counts),
    }


_DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
"""What the type requires, for a turn that came in another protocol."""


def render(reply: CommittedReply) -> bytes:
    return msgspec.json.encode(response_of(reply))


def render_compacted(reply: CommittedReply) -> bytes:
    """The whole new history."""
    response = response_of(reply)
    fields = {name: response[name] for name in ("id", "created_at", "model", "usage")}
    output = [*read_echo(reply.echo).retained, *response["output"]]
    return msgspec.json.encode({**fields, "object": "response.compaction", "output": output})


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.sampled,
    }


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


def item_events(item: Item, index: int = 0) -> list[Event]:
    return [{**one, "output_index": index} for one in _ITEMS[item["type"]](item)]


def failed(error: ErrorFields) -> bytes:
    """A whole stream of a response that failed: the openai package takes nothing before `response.created`."""
    response = {
        "id": f"{ids.RESPONSE}failed",
        "object": "response",
        "created_at": 0,
        "error": None,
        "model": "",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **_BEGINS,
    }
    return numbered([_of_response("created", response), failed_event(response, error)])


def failed_event(response: dict[str, Any], error: ErrorFields) -> Event:
    problem = {"code": _code(error), "message": error.message}
    return _of_response("failed", {**response, **_BEGINS, "status": "failed", "error": problem})


def _code(error: ErrorFields) -> str:
    """OpenAI's code, by which Codex tells whether it compacts, ends or tries again."""
    if error.is_context:
        return "context_length_exceeded"
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 and error.status not in (408, 409) else "server_error"


def numbered(events: list[Event], first: int = 0) -> bytes:
    """The events, of which the first has the number `first`."""
    return b"".join(
        [event({**one, "sequence_number": number}, one["type"]) for number, one in enumerate(events, first)]
    )


def _of_response(state: str, response: dict[str, Any]) -> Event:
    return {"type": f"response.{state}", "response": response}


def _begun(item: Item, **empty: Any) -> Event:
    return {"type": "response.output_item.added", "item": {**item, "status": "in_progress", **empty}}


def _done(item: Item) -> Event:
    return {"type": "response.output_item.done", "item": item}


def _content(item: Item, kind: str, pieces: Iterable[Event], more: Event, empty: Event) -> Iterator[Event]:
    """The events of an item with one part of text, which comes in these pieces. `more`: what the event at the end of
    its text has too, `empty`: the part before it has any."""
    at = {"item_id": item["id"], "content_index": 0}
    part = item["content"][0]
    yield _begun(item, content=[])
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": "", **empty}}
    for piece in pieces if part["text"] else ():
        yield {"type": f"response.{kind}.delta", **at, **piece}
    yield {"type": f"response.{kind}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}
    yield _done(item)


def _reasoning(item: Item) -> Iterator[Event]:
    pieces = ({"delta": piece} for piece in text_pieces(item["content"][0]["text"]))
    return _content(item, "reasoning_text", pieces, {}, {})


def _message(item: Item) -> Iterator[Event]:
    part = item["content"][0]
    entries = part["logprobs"]
    logprobs = Logprobs(
        [bytes(entry["bytes"]) for entry in entries],
        [len(msgspec.json.encode(entry)) for entry in entries],
        lambda first, last: entries[first:last],
    )
    # They are of just this text.
    found = pieces_of([("delta", part["text"])], logprobs if entries else None)
    pieces = ({"delta": piece.text, "logprobs": piece.logprobs or []} for piece in found)
    return _content(item, "output_text", pieces, {"logprobs": entries}, {"logprobs": []})


def _call(item: Item, kind: str, field: str) -> Iterator[Event]:
    at = {"item_id": item["id"]}
    yield _begun(item, **{field: ""})
    for piece in text_pieces(item[field]) if item[field] else ():
        yield {"type": f"response.{kind}.delta", **at, "delta": piece}
    yield {"type": f"response.{kind}.done", **at, field: item[field]}
    yield _done(item)


def _function_call(item: Item) -> Iterator[Event]:
    return _call(item, "function_call_arguments", "arguments")


def _custom_call(item: Item) -> Iterator[Event]:
    return _call(item, "custom_tool_call_input", "input")


def _compaction(item: Item) -> Iterator[Event]:
    yield {"type": "response.output_item.added", "item": item}
    yield _done(item)


_ITEMS = {
    "compaction": _compaction,
    "reasoning": _reasoning,
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
}


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
