"""A committed reply as a Response object."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.calls import with_given_ids
from app.protocols.base import CommittedReply
from app.protocols.engine_reply import Counts, read_reply
from app.protocols.responses import ids
from app.protocols.responses.echo import read_echo
from app.protocols.responses.output import output_items

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "abort"}
"""Why a response is incomplete, by the engine's finish reason. OpenAI has no word for `abort`."""


def response_of(reply: CommittedReply, message: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Response object; JSON without raw parts. `message` is what there is of one that is still generated."""
    found, echo = read_reply(reply.body), read_echo(reply.echo)
    given = with_given_ids(found.message, reply.given_ids) if message is None else message
    output = output_items(given, reply.proof, echo.named, echo.encrypted)
    reason = _INCOMPLETE.get(found.finish_reason or "")
    if reason is not None:
        output[-1]["status"] = "incomplete"
    return {
        "id": ids.RESPONSE + reply.proof,
        "object": "response",
        "created_at": found.created,
        "status": "completed" if reason is None else "incomplete",
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        **_DEFAULTS,
        **echo.shown,
        **({"completed_at": found.created} if reason is None else {}),
        "model": found.model,
        "output": output,
        "usage": _usage(found.counts),
    }


_DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
"""What the type requires, for a turn that came in another protocol."""


def render(reply: CommittedReply) -> bytes:
    return msgspec.json.encode(response_of(reply))


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.sampled,
    }
