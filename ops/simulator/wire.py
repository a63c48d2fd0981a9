"""The request formats, and the reply type that every handler returns.

Fields that the simulator does not use are accepted and ignored, as in engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw, Struct

Headers = tuple[tuple[bytes, bytes], ...]

NOT_FOUND = {"detail": "Not Found"}
"""What both engines answer to a path that they do not have."""

MAX_ID = 2**31 - 1
"""The largest possible token id."""


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
    """A tool call in a message of the history."""

    function: CalledFunction
    id: str | int | None = None


class SentMessage(Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[SentToolCall] | None = None


class Experts(Struct, forbid_unknown_fields=True):
    """The shape of a routing payload; with ``unasked`` it is sent without a request for it. A generation with another
    ``shift`` routes the same tokens otherwise, the prompt's too."""

    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None
    nested: bool = False
    unasked: bool = False
    shift: int = 0


class FaultOrder(Struct, forbid_unknown_fields=True):
    """A fault to apply ``count`` times; the other fields are parameters of some faults.

    ``delay_s`` and ``pieces`` belong to ``drip``, ``at_byte`` (where the reply ends) to ``reset``, ``retry_after`` to
    ``status_429`` and ``location`` to ``redirect``. ``tokens`` is the number of tokens after which ``abort`` ends the
    generation.
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


class Abort(Struct, frozen=True, forbid_unknown_fields=True):
    """How SGLang's scheduler words an abort. With a status it refuses the request: only a stream still gives what was
    sampled."""

    message: str = "Aborted"
    status_code: int | None = None
    err_type: str | None = None


class Sim(Struct, forbid_unknown_fields=True):
    """The ``sim`` field of a request: instructions to the simulator, which a real engine ignores.

    ``abort_at`` is the number of tokens after which an abort cuts the generation, instead of the number that its time
    determines. The second number is for the generation that continues after the first abort, and so on. ``calls`` are
    the tool calls of the reply, whatever tools the request offers; their arguments may be any text. ``call_ids`` are
    the ids of the reply's calls in order; a call without one gets a drawn id. ``text`` may hold reasoning between its
    tags, which stays in the content, or be empty. ``reasoning`` says whether the reply has some or, with a ``text``,
    what it is. ``chunk_tokens`` is the number of tokens in each chunk of a stream of a plain text. ``speculative`` are
    the counters of speculative decoding: how often drafts were verified, how many tokens they had, and how many were
    accepted. ``abort`` words SGLang's aborts. ``queued``: SGLang's abort comes in the waiting queue, after the engine
    took the generation back.
    """

    completion_tokens: int | None = None
    latency_s: float | None = None
    tool_calls: bool | None = None
    reasoning: bool | str | None = None
    finish_reason: str | None = None
    text: str | None = None
    experts: Experts | None = None
    indexer_topk: Experts | None = None
    weight_version: str | None = None
    weight_versions: list[str] | None = None
    body_bytes: int | None = None
    fault: str | FaultOrder | None = None
    abort_at: list[int] | None = None
    calls: list[CalledFunction] | None = None
    call_ids: list[str | int | None] = []
    chunk_tokens: int | None = None
    speculative: tuple[int, int, int] | None = None
    abort: Abort = Abort()
    queued: bool = False


class PlannedReply(Struct, forbid_unknown_fields=True):
    """Body of ``/sim/replies``, for programs whose requests cannot hold a ``sim`` of their own.

    The next ``count`` chat requests whose last message holds ``when``, and that offer the tools that ``sim`` calls, are
    answered as ``sim`` says: of ``session`` alone if it is given, which is what `X-SMG-Routing-Key` names.
    """

    when: str
    sim: Sim
    count: int = 1
    session: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class Request(Struct, kw_only=True):
    """The fields that chat and completion requests of both dialects share."""

    model: str = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    rid: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    routed_experts_prompt_start: int = 0
    stop: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    sim: Sim | None = None

    @property
    def alternatives(self) -> int:
        """How many of the most likely tokens are asked for at each sampled token."""
        return 0


class KvTransfer(Struct):
    """vLLM's ``kv_transfer_params``: a chat may have its prompt's ids there."""

    prompt_token_ids: Raw = Raw(b"")


class ChatRequest(Request, kw_only=True):
    """The body of a chat request in both dialects. Messages stay raw, since they are cache keys."""

    messages: list[Raw]
    tools: Raw = Raw(b"")
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | msgspec.UnsetType | None = msgspec.UNSET
    input_ids: Raw = Raw(b"")
    kv_transfer_params: KvTransfer | None = None
    continue_final_message: bool | None = None
    return_meta_info: bool = False
    return_prompt_token_ids: bool = False
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    top_k: int | None = None

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0 if isinstance(self.top_logprobs, int) else 0

    def prompt_ids(self, dialect: str) -> bytes:
        """The prompt's ids as JSON, from the field that an engine of this dialect reads; empty if there are none."""
        raw = self.input_ids if dialect == "sglang" else (self.kv_transfer_params or KvTransfer()).prompt_token_ids
        return b"" if bytes(raw) == b"null" else bytes(raw)


class CompletionRequest(Request, kw_only=True):
    """The body of a completion in both dialects. ``logprobs`` is the number of alternatives for each token; 0 means
    none."""

    prompt: Raw
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


class BadRequest(Exception):
    """An engine would refuse the request; the message is sent to the client."""

    status = 400
    kind = "BadRequestError"


class InvalidBody(BadRequest):
    """A field's value breaks the rules of the body, whatever the rest says."""

    kind = "Bad Request"


class BadConversion(BadRequest):
    """SGLang cannot make a generation of it."""

    kind = "BadRequest"


class UnknownModel(BadRequest):
    """vLLM has no model and no adapter with this name."""

    status = 404


class Delivery(Enum):
    """How the body of a reply reaches the client."""

    WHOLE = "whole"
    DRIP = "drip"
    RESET = "reset"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. Large bodies stay in parts, so that 50 MiB are not copied. The parts of a stream are sent over
    ``over_s`` seconds."""

    parts: tuple[bytes, ...] = ()
    status: int = 200
    headers: Headers = ()
    content_type: bytes = b"application/json"
    delivery: Delivery = Delivery.WHOLE
    order: FaultOrder | None = None
    over_s: float = 0.0

    @property
    def body(self) -> bytes:
        """The whole body in one piece."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def with_body(self, body: bytes) -> Reply:
        """The same response with another body."""
        return replace(self, parts=(body,))


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply((msgspec.json.encode(value),), status)
