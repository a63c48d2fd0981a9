"""What requests look like, and the reply every handler hands back.

Fields a simulator does not act on are accepted and ignored, as engines do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw, Struct

Headers = tuple[tuple[bytes, bytes], ...]

MAX_ID = 2**31 - 1
"""The largest token id there can be."""


class ToolFunction(Struct):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(Struct):
    function: ToolFunction


class CalledFunction(Struct):
    """The ``function`` of a tool call; arguments are JSON text or an object."""

    name: str = ""
    arguments: str | dict[str, Any] = "{}"


class SentToolCall(Struct):
    """A tool call in a message, sent back or about to be."""

    function: CalledFunction
    id: str | None = None


class SentMessage(Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[SentToolCall] | None = None


class Experts(Struct, forbid_unknown_fields=True):
    """Shape of a routing payload; ``unasked`` sends it without being asked."""

    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None
    nested: bool = False
    unasked: bool = False


class FaultOrder(Struct, forbid_unknown_fields=True):
    """A fault to commit ``count`` times; the other fields shape some faults.

    ``delay_s`` and ``pieces`` shape ``drip``, ``at_byte`` is where ``reset``
    cuts, ``retry_after`` belongs to ``status_429`` and ``location`` to
    ``redirect``. ``tokens`` is after how many ``abort`` ends the generation.
    """

    fault: str
    count: int = 1
    delay_s: float = 0.05
    pieces: int = 20
    at_byte: int | None = None
    retry_after: str = "1"
    location: str = "http://127.0.0.1:9/elsewhere"
    message: str | None = None
    tokens: int | None = None


class Sim(Struct, forbid_unknown_fields=True):
    """The ``sim`` field of a request: wishes a real engine would ignore.

    ``abort_at`` is after how many tokens an abort finds the generation, instead of
    where its time says; the second number is for the generation of what the first
    abort left, and so on.
    """

    completion_tokens: int | None = None
    latency_s: float | None = None
    tool_calls: bool | None = None
    reasoning: bool | None = None
    finish_reason: str | None = None
    text: str | None = None
    experts: Experts | None = None
    indexer_topk: Experts | None = None
    weight_version: str | None = None
    weight_versions: list[str] | None = None
    body_bytes: int | None = None
    fault: str | FaultOrder | None = None
    abort_at: list[int] | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class Request(Struct, kw_only=True):
    """What chat requests and completions have in common, in both dialects."""

    model: str = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    rid: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    routed_experts_prompt_start: int = 0
    stop: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None
    sim: Sim | None = None


class ChatRequest(Request, kw_only=True):
    """The body of a chat request, both dialects; messages stay raw as cache keys."""

    messages: list[Raw]
    tools: Raw = Raw(b"")
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | msgspec.UnsetType | None = msgspec.UNSET
    input_ids: Raw = Raw(b"")
    return_meta_info: bool = False
    return_prompt_token_ids: bool = False
    return_indexer_topk: bool = False


class CompletionRequest(Request, kw_only=True):
    """The body of a completion, both dialects. ``logprobs`` is how many alternatives a token gets, 0 being none."""

    prompt: Raw
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None


class BadRequest(Exception):
    """The request is not one an engine would run; the text goes to the client."""

    status = 400


class UnknownModel(BadRequest):
    """vLLM has neither a model nor an adapter of this name."""

    status = 404


class Delivery(Enum):
    """How the body of a reply reaches the client."""

    WHOLE = "whole"
    DRIP = "drip"
    RESET = "reset"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; large bodies stay in parts, so that nothing copies 50 MiB."""

    parts: tuple[bytes, ...] = ()
    status: int = 200
    headers: Headers = ()
    content_type: bytes = b"application/json"
    delivery: Delivery = Delivery.WHOLE
    order: FaultOrder | None = None

    @property
    def body(self) -> bytes:
        """The whole body in one piece."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def with_body(self, body: bytes) -> Reply:
        """The same response around another body."""
        return replace(self, parts=(body,))


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply((msgspec.json.encode(value),), status)
