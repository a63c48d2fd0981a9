"""A committed reply as the whole stream of events, and the end of a stream that cannot be completed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.protocols.base import CommittedReply
from app.protocols.errors import ErrorFields
from app.protocols.responses import ids
from app.protocols.responses.output import Item
from app.protocols.responses.reply import response_of
from app.protocols.sse import event

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


def _content(item: Item, kind: str, more: Event) -> Iterator[Event]:
    """The events of an item with one part of text. `more`: what the events of its text have too."""
    at = {"item_id": item["id"], "content_index": 0}
    part = item["content"][0]
    yield _begun(item, content=[])
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    if part["text"]:
        yield {"type": f"response.{kind}.delta", **at, "delta": part["text"], **more}
    yield {"type": f"response.{kind}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}
    yield _done(item)


def _reasoning(item: Item) -> Iterator[Event]:
    return _content(item, "reasoning_text", {})


def _message(item: Item) -> Iterator[Event]:
    return _content(item, "output_text", {"logprobs": []})


def _call(item: Item, kind: str, field: str) -> Iterator[Event]:
    at = {"item_id": item["id"]}
    yield _begun(item, **{field: ""})
    if item[field]:
        yield {"type": f"response.{kind}.delta", **at, "delta": item[field]}
    yield {"type": f"response.{kind}.done", **at, field: item[field]}
    yield _done(item)


def _function_call(item: Item) -> Iterator[Event]:
    return _call(item, "function_call_arguments", "arguments")


def _custom_call(item: Item) -> Iterator[Event]:
    return _call(item, "custom_tool_call_input", "input")


_ITEMS = {
    "reasoning": _reasoning,
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
}
