"""What goes in and out: the start-up settings, what a request may hold, and the reply that every handler returns.

Fields that the simulator does not use are accepted and ignored, as in engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

Dialect = Literal["sglang", "vllm", "openai"]
Headers = tuple[tuple[bytes, bytes], ...]

MAX_ID = 2**31 - 1
"""The largest possible token id."""


class Payload:
    """A large part of JSON, of which a whole reply has no copy."""

    __slots__ = ("json",)

    def __init__(self, json: bytes) -> None:
        self.json = json


def _copied(payload: Payload) -> Raw:
    return Raw(payload.json)


encode = msgspec.json.Encoder(enc_hook=_copied).encode


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the process; everything else comes with each request."""

    dialect: Dialect = "sglang"
    seed: int = 0
    latency_s: float = 0.0  # of a generation whose request names none
    prefill_s: float = 0.0  # for each token of a prompt that is not in the prefix cache
    cache_tokens: int = 2**22
    context_length: int = 2**20  # SGLang refuses what does not fit
    model: str = "simulator"
    adapters: tuple[str, ...] = ()  # loaded ones: other names are refused; without any, every name is accepted
    weight_version: str = "default"
    reasoning: float = 0.25  # the share of generations with reasoning
    experts: tuple[int, int, int] = (4, 2, 64)  # layers, top_k and experts of a routing payload
    indexer: tuple[int, int] = (2, 8)
    token_in: bool = True  # a chat takes its prompt's ids from the dialect's own field, as newer builds do
    api_key: str = ""  # what the vendor of the dialect `openai` wants in each request
    # vLLM: as 0.32, replies name no weight version, and its route for prompts of ids, which `scale_out` adds, parses no
    # message. With `logprobs_mode`, `/server_info` names it; it does not change the logprobs.
    silent_versions: bool = False
    scale_out: bool = False
    logprobs_mode: str | None = None
    # SGLang: `/generate` streams what is new in each event; `usage` counts cached tokens; where a chat takes the
    # parameters that a request does not name.
    incremental: bool = False
    cache_report: bool = False
    sampling_defaults: str = "openai"
    keep_requests: int = 256


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
    """A fault to apply to ``count`` requests; the other fields are parameters of some faults."""

    fault: str
    count: int = 1
    delay_s: float = 0.05  # of `drip`, between its pieces
    pieces: int = 20
    at_byte: int | None = None  # of `reset`: where the reply ends
    retry_after: str = "1"  # of `status_429`
    location: str = "http://127.0.0.1:9/elsewhere"  # of `redirect`
    message: str | None = None  # of a status
    tokens: int | None = None  # of `abort`: the number of tokens after which it ends the generation


class Abort(Struct, frozen=True, forbid_unknown_fields=True):
    """How SGLang's scheduler words an abort. With a status it refuses the request: only a stream still gives what was
    sampled."""

    message: str = "Aborted"
    status_code: int | None = None
    err_type: str | None = None


class Sim(Struct, forbid_unknown_fields=True):
    """The ``sim`` field of a request: instructions to the simulator, which a real engine ignores."""

    completion_tokens: int | None = None
    latency_s: float | None = None
    tool_calls: bool | None = None
    reasoning: bool | str | None = None  # whether the reply has some or, with a `text`, what it is
    finish_reason: str | None = None
    text: str | None = None  # may be empty, or hold reasoning between its tags, which stays in the content
    experts: Experts | None = None
    indexer_topk: Experts | None = None
    weight_version: str | None = None
    weight_versions: list[str] | None = None  # each for an equal share of the tokens
    body_bytes: int | None = None
    fault: str | FaultOrder | None = None
    # The number of tokens after which an abort cuts the generation, instead of what its time determines; the second is
    # for the generation that continues after the first abort, and so on.
    abort_at: list[int] | None = None
    calls: list[CalledFunction] | None = None  # whatever tools the request offers; arguments may be any text
    call_ids: list[str | int | None] = []  # of the calls in order; one without gets a drawn id
    chunk_tokens: int | None = None  # in each chunk of a stream of a plain text
    # Of speculative decoding: how often drafts were verified, how many tokens they had, how many were accepted.
    speculative: tuple[int, int, int] | None = None
    abort: Abort = Abort()
    queued: bool = False  # SGLang's abort comes in the waiting queue, after the engine took the generation back


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
    """The fields that several routes share."""

    model: str = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    rid: str | None = None
    lora_path: str | list[str | None] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    routed_experts_prompt_start: int = 0
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    sim: Sim | None = None

    @property
    def limit(self) -> int | None:
        """The number of tokens that the reply may have."""
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        """How many of the most likely tokens are asked for at each sampled token."""
        return 0

    @property
    def wants_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class KvTransfer(Struct):
    """vLLM's ``kv_transfer_params``: a chat may have its prompt's ids there."""

    prompt_token_ids: Raw = Raw(b"")


class ChatRequest(Request, kw_only=True):
    """The body of a chat request in all dialects. Messages stay raw, since they are cache keys."""

    messages: list[Raw]
    tools: Raw = Raw(b"")
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | msgspec.UnsetType | None = msgspec.UNSET
    top_k: int | None = None
    input_ids: Raw = Raw(b"")
    kv_transfer_params: KvTransfer | None = None
    continue_final_message: bool | None = None
    return_meta_info: bool = False
    return_prompt_token_ids: bool = False
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0 if isinstance(self.top_logprobs, int) else 0


class CompletionRequest(Request, kw_only=True):
    """The body of a completion in all dialects. ``logprobs`` is the number of alternatives for each token; 0 means
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

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. Large bodies stay in parts, so that 50 MiB are not copied. The parts are sent over ``over_s``
    seconds. One that ``ends_at`` a byte is cut there, with its connection; one that is ``never`` sent holds it until
    the client leaves."""

    parts: tuple[bytes, ...] = ()
    status: int = 200
    headers: Headers = ()
    content_type: bytes = b"application/json"
    over_s: float = 0.0
    ends_at: int | None = None
    never: bool = False

    @property
    def body(self) -> bytes:
        """The whole body in one piece."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


EMPTY = Reply((b"",), content_type=b"")
"""What several control routes answer."""


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply((encode(value),), status)


DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """An event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def stream_reply(events: list[bytes]) -> Reply:
    return Reply((*events, DONE), content_type=b"text/event-stream")
