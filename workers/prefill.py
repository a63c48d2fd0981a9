"""Joins a reply's rest to the beginning that its client wrote (`app.domain.prefill`)."""

from __future__ import annotations

import msgspec

from workers.join_text import CLOSE, OPEN, REASONING
from workers.parse_json import Fields

_FIELDS = msgspec.json.Decoder(Fields)
_TEXT = msgspec.json.Decoder(str | None)


def whole_message(beginning: bytes, rest: bytes) -> bytes:
    """One message, as the model saw it, of a beginning of text alone and a valid rest.

    An engine parses the rest by itself: what it takes for reasoning goes on with the beginning, whether that has opened
    a thought or, as where a parser expects one in every reply, is a part of the answer.
    """
    begun, message = _FIELDS.decode(beginning), _FIELDS.decode(rest)
    text = _text(begun, "content")
    reasoning = _text(message, REASONING[0]) or _text(message, REASONING[1])
    content = _text(message, "content")
    has_closed = OPEN in text and CLOSE not in text and reasoning and content
    message = {**begun, **{name: raw for name, raw in message.items() if name not in REASONING}}
    message["content"] = msgspec.Raw(
        msgspec.json.encode(f"{text}{reasoning}\n{CLOSE}\n\n{content}" if has_closed else text + reasoning + content)
    )
    return msgspec.json.encode(message)


def _text(fields: Fields, name: str) -> str:
    return _TEXT.decode(fields.get(name, msgspec.Raw(b"null"))) or ""
