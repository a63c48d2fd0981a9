"""A response's events while it is generated: those of the first item, if that is reasoning or a message.

Every `response.output_item.done` waits for the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.protocols.base import CommittedReply
from app.protocols.errors import ErrorFields
from app.protocols.live import FirstText
from app.protocols.responses.events import Event, begun_events, failed_event, item_events, numbered, rest_of
from app.protocols.responses.reply import response_of

_KINDS = {"reasoning": "reasoning", "message": "content"}


class LiveResponse:
    def __init__(self, begun: CommittedReply) -> None:
        self._begun = begun
        self._first = FirstText()
        self._delta: Event = {}
        self._count = 0

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        text = self._first.add(delta)
        if not text:
            return b""
        if self._delta:
            return self._numbered([{**self._delta, "delta": text}])
        response = response_of(self._begun, {str(self._first.kind): text})
        added, part, self._delta, *_ = item_events(response["output"][0])
        return self._numbered([*begun_events(response), added, part, self._delta])

    def end(self, reply: CommittedReply) -> bytes:
        response = response_of(reply)
        if self._first.kind is None:
            return self._numbered([*begun_events(response), *rest_of(response)])
        item = response["output"][0]
        text = item["content"][0]["text"] if "content" in item else ""
        rest = self._first.rest(_KINDS.get(item["type"], ""), text)
        _, _, delta, *others = rest_of(response)
        return self._numbered([*([{**delta, "delta": rest}] if rest else []), *others])

    def error(self, error: ErrorFields) -> bytes:
        response = response_of(self._begun)
        begun = [] if self._count else begun_events(response)
        return self._numbered([*begun, failed_event(response, error)])

    def _numbered(self, events: list[Event]) -> bytes:
        self._count += len(events)
        return numbered(events, self._count - len(events))
