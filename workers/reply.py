"""What validation takes and gives: the same in the API process and from a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from workers.parse import KnownTokens, Protocol, VersionSpan
from workers.parse_parts import LogprobsOf as LogprobsOf
from workers.parse_parts import Speculative
from workers.parse_prompt import KnownText
from workers.payloads import PayloadSpec, StoredPayload
from workers.top_logprobs import LogprobWish


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) of a turn came from one generation, of the engine with this base URL."""

    engine: str
    start: int
    end: int


class SampledCall(msgspec.Struct, frozen=True):
    """A call of a committed reply. `id` is the engine's, of any type, None where there is none; `arguments` are kept
    where they are no object (`is_object`)."""

    id: Any
    arguments: Any = msgspec.UNSET

    @property
    def has_object(self) -> bool:
        return self.arguments is msgspec.UNSET


class PayloadRange(msgspec.Struct, frozen=True, array_like=True):
    """Position of a payload's value in the engine's body, or of the prompt's ids: [start, end)."""

    kind: str
    start: int
    end: int
    is_list: bool = False


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The input of validation, and what is stored with the reply: see `parse_reply` and the fields' types.

    `sent` is empty if the prompt was not sent as ids. `beginning` is the message that the reply goes on with, if its
    client began it.
    """

    dialect: Literal["auto", "sglang", "vllm", "openai"]
    known: KnownTokens | None
    payload_specs: list[PayloadSpec]
    messages: list[bytes]
    headers: list[tuple[str, str]]
    status: int
    rid: str
    own: bytes
    protocol: Protocol = "chat"
    sent: bytes = b""
    ids_field: str = ""
    is_part: bool = False
    wish: LogprobWish | None = None
    beginning: bytes = b""


class ValidatedReply(msgspec.Struct, frozen=True, array_like=True):
    """A valid reply, the source of a turn's event and of its stored content.

    From its bytes: `message` is the raw JSON of the assistant message (of a completion: of its text). The prompt is
    `base` known tokens and `suffix_tokens` others; `sequence` describes prompt and output together, for the next turn.
    `tokens` and `exchange` are compressed frames (`codec.pack_turn`). Of text alone (`openai`) there are only the
    numbers, the upstream's. `rest` is the engine's message where the client began it, and `message` both. A
    `miscounted` reply is valid only if its request carries images. `places` are those of its
    payloads in the body, `prompt` that of the prompt's ids, if they are long.

    What the caller adds: `engine` was asked at `requested_at` (seconds since the epoch) with weight version
    `dispatched`, if known. `message_hash` is the canonical hash of the message, `calls_hash`, `bare_hash` and
    `logprobs_of` are as in `TurnCommitted`, `calls` are the message's. `sent_ids`: the prompt was sent as ids.
    `trimmed`: how many of the parent's last tokens it leaves out. `parts`: which engine generated which output tokens,
    if there were several. `text` makes the text of all tokens (a function without arguments, to `KnownText`), if the
    prompt's ids are long.
    """

    dialect: Literal["sglang", "vllm", "openai"]
    message: bytes
    base: int
    suffix_tokens: int
    output_tokens: int
    sequence: KnownTokens
    finish_reason: str | None
    weight_versions: tuple[VersionSpan, ...]
    tokens: bytes | None
    exchange: bytes
    payloads: list[StoredPayload]
    places: list[PayloadRange]
    cached_tokens: int | None = None
    output_ids: bytes = b""
    miscounted: str | None = None
    speculative: Speculative | None = None
    prompt: PayloadRange | None = None
    rest: bytes = b""
    engine: str = ""
    requested_at: float = 0.0
    message_hash: str = ""
    calls_hash: str | None = None
    bare_hash: str | None = None
    calls: tuple[SampledCall, ...] = ()
    trimmed: int = 0
    sent_ids: bool = False
    dispatched: str | None = None
    parts: tuple[Part, ...] = ()
    logprobs_of: LogprobsOf | None = None
    text: Any = None


Read = tuple[ValidatedReply, Callable[[], KnownText | None] | None]
"""A valid reply, and what makes the text of all its tokens if the prompt's ids are long."""
