"""What validation takes and gives: the same in the API process and from a worker."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.parse import KnownTokens, Protocol, Span
from workers.payloads import StoredPayload, Want


class PayloadRange(msgspec.Struct, frozen=True, array_like=True):
    """Position of a payload's value in the engine's body, or of the prompt's ids: [start, end)."""

    kind: str
    start: int
    end: int
    is_list: bool = False


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The input of validation, and what is stored with the reply: see `parse_reply`, `Want` and `Wire`.

    `sent` is empty if the prompt was not sent as ids.
    """

    dialect: Literal["auto", "sglang", "vllm"]
    known: KnownTokens | None
    wants: list[Want]
    messages: list[bytes]
    headers: list[tuple[str, str]]
    status: int
    rid: str
    own: bytes
    protocol: Protocol = "chat"
    sent: bytes = b""
    ids_field: str = ""
    is_part: bool = False


class WorkerResult(msgspec.Struct, frozen=True, array_like=True):
    """A valid reply, ready to be committed. `facts` and `wire` are compressed frames (`codec.pack_turn`); the rest is
    as in `Parsed`.

    `output_ids` are set if the prompt was sent as ids, since the next one will be too. A `miscounted` reply is valid
    only if its request carries images. `prompt` is the place of the prompt's ids in the body, if they are long.
    """

    dialect: Literal["sglang", "vllm"]
    message: bytes
    base: int
    suffix_tokens: int
    output_tokens: int
    sequence: KnownTokens
    finish_reason: str | None
    weight_versions: list[Span]
    facts: bytes | None
    wire: bytes
    payloads: list[StoredPayload]
    places: list[PayloadRange]
    cached_tokens: int | None = None
    output_ids: bytes = b""
    miscounted: str | None = None
    prompt: PayloadRange | None = None
