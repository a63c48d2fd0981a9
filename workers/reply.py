"""What validation takes and gives: the same in the API process and from a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from workers.parse_prompt import KnownText, KnownTokens
from workers.payloads import PayloadSpec, StoredPayload
from workers.top_logprobs import LogprobWish

Dialect = Literal["sglang", "vllm", "openai"]
DialectChoice = Literal["auto", "sglang", "vllm", "openai"]
"""`openai` has neither ids nor logprobs: it is never guessed, and its replies are text alone."""

Protocol = Literal["chat", "completions"]
"""The OpenAI route that a reply answers: `/v1/chat/completions` or `/v1/completions`."""

LogprobsOf = Literal["raw", "scaled", "processed", "logits"]
"""Which distribution an engine's logprobs are of: the model's at temperature 1; that at the turn's temperature; the one
that was sampled from, also less what top-k, top-p and min-p left out. `logits`: the numbers are no logprobs."""

ReplayKind = Literal["routed_experts", "indexer_topk", "sampling_mask"]
"""What an engine can return for a trainer to replay its choices, a row for each token but the last: the experts that a
token was routed to, the positions that sparse attention selected for it, the ids that the next one was drawn from."""

REPLAY: tuple[ReplayKind, ...] = get_args(ReplayKind)
"""The replay payloads: in SGLang's `meta_info` or `sglext`, or on vLLM's choice."""

NAMES: Mapping[Dialect, Mapping[ReplayKind, str]] = {
    "sglang": {**{kind: kind for kind in REPLAY}, "sampling_mask": "output_token_sampling_mask"},
    "vllm": {kind: kind for kind in REPLAY},
}
"""What an engine calls the field of a kind."""

MAX_VERSION = 256
"""Maximum length of a weight version: it is repeated in every event and row."""

UNKNOWN_VERSION = "unknown"
"""The weight version of an engine that names none."""

MARK = b'"@turnlog:'
"""How what stands for a long value begins, while the rest of its reply is read."""

FAILED = b'"error"'
"""The finish reason, as JSON, of a generation that failed although the engine, or a proxy before it, answered 200."""


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Output tokens [start, end) of one turn were sampled under the weight version `version`."""

    version: str
    start: int
    end: int


class Speculative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Speculative decoding of a generation: how often the model verified drafts, how many tokens the drafts had, and
    how many of these it took."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int


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

    @property
    def size(self) -> int:
        return self.end - self.start


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The input of validation, and what is stored with the reply.

    With the dialect `auto` the structure tells the engine. The prompt may begin with `known`. `sent` is the token text
    of a prompt that was sent as ids, else empty: the reply need not repeat them, but if it does they must be equal.
    `is_part`: it continues a generation, and may be only its end token. `wish`: what else of the logprobs was asked
    for. `beginning` is the message that the reply goes on with, if its client began it.
    """

    dialect: DialectChoice
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


class ValidatedReply(msgspec.Struct, array_like=True):
    """A valid reply, the source of a turn's event and of its stored content.

    What its rules found (`workers.parse`): `message` is the raw JSON of the assistant message (of a completion: of its
    text). The prompt is `base` known tokens (0: it does not begin with them) and `suffix_tokens` others; `sequence`
    describes prompt and output together, for the next turn. Of text alone (`openai`) there are only the numbers, the
    upstream's. `cached_tokens`: how many of the prompt's tokens the engine had cached, if it says so. `miscounted`:
    which of its counts of the prompt's tokens differs from the number of ids; only allowed for a request with images.
    `logprobs_of` is what the reply itself says its logprobs are of.

    What is stored of it (`workers.job`): `tokens` and `exchange` are compressed frames (`codec.pack_turn`). `places`
    are those of its payloads in the body, `prompt` that of the prompt's ids, if they could be cut out. `rest` is the
    engine's message where the client began it, and `message` both.

    What the caller adds: `engine` was asked at `requested_at` (seconds since the epoch) with weight version
    `dispatched`, if known. `message_hash` is the canonical hash of the message, `calls_hash`, `bare_hash` and
    `logprobs_of` are as in `TurnCommitted`, `calls` are the message's. `sent_ids`: the prompt was sent as ids.
    `trimmed`: how many of the parent's last tokens it leaves out. `parts`: which engine generated which output tokens,
    if there were several. `text` and `plain` are as in `Read`.
    """

    dialect: Dialect
    message: bytes
    base: int
    suffix_tokens: int
    output_tokens: int
    sequence: KnownTokens
    finish_reason: str | None
    weight_versions: tuple[VersionSpan, ...]
    output_ids: bytes = b""
    cached_tokens: int | None = None
    miscounted: str | None = None
    speculative: Speculative | None = None
    logprobs_of: LogprobsOf | None = None
    tokens: bytes | None = None
    exchange: bytes = b""
    payloads: list[StoredPayload] = []
    places: list[PayloadRange] = []
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
    text: Any = None
    plain: Any = None


class Read(NamedTuple):
    """A valid reply; what makes the text of all its tokens, if the prompt's ids are long; and the object that its body
    encodes, with texts that begin as MARK in place of its long lists, if it has no payloads and that was found."""

    reply: ValidatedReply
    text: Callable[[], KnownText | None] | None = None
    plain: Any = None
