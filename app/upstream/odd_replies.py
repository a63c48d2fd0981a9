"""What is looked for in a 200 that breaks a rule: an error that it tells, and a content in text parts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from app.domain.request import as_raw, join_object
from workers.content import text_of_parts
from workers.parse_json import NULL, Fields, Rejected, is_null, object_at
from workers.reply import FAILED

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Rejected)


class _Code(msgspec.Struct):
    code: int | str | None = None


class _Root(msgspec.Struct):
    choices: list[Fields] | None = None
    object: msgspec.Raw = NULL
    error: msgspec.Raw = NULL
    code: int | str | None = None


_ROOT = msgspec.json.Decoder(_Root)
_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])
_CODE = msgspec.json.Decoder(_Code)


class Failure(NamedTuple):
    """An error as an engine would have answered it with its status."""

    status: int
    body: bytes


def failure_in(body: bytes) -> Failure | None:
    """The error in place of a reply, with the status that it names, or that of a choice whose generation failed.

    None where there is none. A key that is not taken is the operator's business: it is no client's 401.
    """
    try:
        body.decode()
        root = _ROOT.decode(body)
        if root.choices:
            is_failed = bytes(root.choices[0].get("finish_reason", NULL)) == FAILED
            error = root.choices[0].get("error", root.error)
            return Failure(502, join_object({"error": bytes(error)})) if is_failed and not is_null(error) else None
        if is_null(root.error) and bytes(root.object) != b'"error"':
            return None
        is_object = bytes(memoryview(root.error)[:1]) == b"{"
        named = str(_CODE.decode(root.error).code if is_object else root.code)
    except _UNREADABLE:
        return None
    status = int(named) if named.isdecimal() and len(named) == 3 else 502
    return Failure(status if 400 <= status < 600 and status != 401 else 502, body)


def with_text(body: bytes) -> bytes | None:
    """The reply with the text of its content's parts as its content; None where it is no list of such parts."""
    try:
        root = _FIELDS.decode(body)
        [choice] = _CHOICES.decode(root["choices"])
        message = object_at(choice.get("message"), "choices[0].message")
        parts = text_of_parts(msgspec.json.decode(message["content"]))
    except (*_UNREADABLE, ValueError, KeyError):
        return None
    if parts is None:
        return None
    message["content"] = as_raw(parts.text)
    if parts.reasoning and is_null(message.get("reasoning_content")) and is_null(message.get("reasoning")):
        message["reasoning_content"] = as_raw(parts.reasoning)
    choice["message"] = msgspec.Raw(join_object(message))
    return join_object({**root, "choices": b"[" + join_object(choice) + b"]"})
