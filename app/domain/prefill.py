"""A reply that its client begins: the last message is an assistant's, and the engine goes on in the middle of it.

Chat says so with `continue_final_message`, Responses with a last item that is `in_progress`, and in Messages a last
message of the assistant means it. The beginning is no message of the history: engines return the rest alone, and
beginning and rest are one message, as the model saw it, in the row and in what later requests are compared with.
"""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.request import ChatRequest, value_of
from workers.content import text_of_parts

CONTINUES, GENERATION_PROMPT = "continue_final_message", "add_generation_prompt"

PARAMS = {CONTINUES: msgspec.Raw(b"true"), GENERATION_PROMPT: msgspec.Raw(b"false")}
"""With these an engine goes on: vLLM wants both, SGLang reads the first."""

_TOLD = f"{CONTINUES} (the last message begins the reply): "


def with_beginning(request: ChatRequest) -> ChatRequest:
    """The request with its last message as the reply's beginning, if it asks so; with a refusal if it cannot be."""
    raw = request.params[CONTINUES]
    if bytes(raw) in (b"false", b"null"):
        return request
    *before, last = request.messages
    beginning = _beginning_of(value_of(last, "messages"))
    if beginning is None:
        why = "it must be an assistant message with text alone"
    elif bytes(raw) != b"true":
        why = "it must be true or false"
    elif not before:
        why = "another message must come before it"
    elif bytes(request.params.get(GENERATION_PROMPT, b"null")) not in (b"false", b"null"):
        why = f"{GENERATION_PROMPT} must be false"
    elif bytes(request.params.get("echo", b"null")) not in (b"false", b"null"):
        why = "echo must be false, or the reply would repeat that message"
    else:
        # The next body is read as a whole: a known one's last message is taken for a message of the history.
        return msgspec.structs.replace(request, messages=before, beginning=beginning, layout=None, prefix=None)
    return msgspec.structs.replace(_plain(request), refusal=_TOLD + why)


def _plain(request: ChatRequest) -> ChatRequest:
    params = {name: raw for name, raw in request.params.items() if name not in PARAMS}
    return msgspec.structs.replace(request, params=params)


def unprefilled(request: ChatRequest) -> ChatRequest:
    """The request that the beginning would be a cut reply to: Messages has one spelling for both."""
    return msgspec.structs.replace(_plain(request), beginning=None)


def _beginning_of(message: Any) -> bytes | None:
    """The message as every engine continues it, with its text as one string; None if it is not an assistant's of text
    alone."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return None
    content = message.get("content")
    parts = text_of_parts(content)
    text = content if isinstance(content, str) else None if parts is None or parts.reasoning else parts.text
    others = (value for name, value in message.items() if name not in ("role", "content", "name"))
    return None if text is None or any(others) else msgspec.json.encode({**message, "content": text})
