"""The ids of calls in a chat's reply where its client could not use the engine's."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.calls import given_prefix, with_ids
from app.domain.request import join_object
from app.protocols.base import CommittedReply

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


class LiveIds:
    """The ids of a reply's calls as they come: the same that `app.domain.calls.given_ids` makes of the whole one."""

    def __init__(self, proof: str) -> None:
        self._prefix = given_prefix("chat", proof)
        self._places: set[int] = set()
        self._ids: set[str] = set()

    def of(self, call: dict[str, Any]) -> dict[str, Any]:
        """A piece of a call; its first has an id."""
        place, call_id = call["index"], call.get("id")
        if place in self._places:
            return call
        self._places.add(place)
        if not isinstance(call_id, str) or not call_id or call_id in self._ids:
            return {**call, "id": f"{self._prefix}_{place}"}
        self._ids.add(call_id)
        return call
