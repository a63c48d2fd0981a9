"""What an OpenAI client makes of a stream: the official package's own models and its own accumulator."""

from __future__ import annotations

import json
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

FINAL = ("[DONE]", '"finish_reason":"', "content_block_stop", "message_stop", "output_item.done", "response.completed")
"""What a client of chat, Messages or Responses may take for the end of a reply, or of a part of it."""


def is_final(text: str) -> bool:
    return any(sign in text for sign in FINAL)


def chunks(text: str) -> list[dict[str, Any]]:
    """The stream's chunks; it must be whole."""
    *events, done = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def assembled(text: str) -> dict[str, Any]:
    """The reply that the client ends up with."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks(text):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.current_completion_snapshot.model_dump()


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The id, name and argument text of each tool call."""
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or []
    ]
