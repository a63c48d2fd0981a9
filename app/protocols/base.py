"""What the service asks of a protocol: one spelling of a turn on the wire.

Every protocol's request becomes a chat of messages, tools and parameters (or a completion's prompt), and every reply
is rendered from the engine's committed one. The turn knows a protocol only by its name in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from app.domain.events import GivenIds, History
from app.domain.known_body import ContinuedBody
from app.domain.request import ChatRequest, CompletionRequest
from app.errors import UpstreamInvalid
from app.protocols.errors import ErrorFields
from app.protocols.sse import KEEPALIVE


class CommittedReply(msgspec.Struct, frozen=True):
    """A committed turn as a client gets it. `body` is the engine's JSON reply, `echo` what the request's parser kept of
    the request for its reply, `proof` names the turn (`app.domain.proofs`), `given_ids` as in `TurnCommitted`."""

    body: bytes
    proof: str
    echo: bytes | None = None
    given_ids: GivenIds | None = None


class StoredTurn(msgspec.Struct, frozen=True):
    """A committed turn that a request refers to, as raw chat messages: its whole history with its reply, or its reply
    alone where the request needs no more."""

    messages: list[msgspec.Raw]
    echo: bytes | None = None


class LiveRenderer(Protocol):
    """Renders one reply while it is generated. Nothing before `end` may be taken for final."""

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """What can be sent of the message's next piece (`app.upstream.streams`); may be empty."""

    def end(self, reply: CommittedReply) -> bytes:
        """The rest, once the reply is committed. Raises UpstreamInvalid if it does not begin with what was sent."""

    def error(self, error: ErrorFields) -> bytes:
        """The end of a stream that cannot be completed."""


class Parse(Protocol):
    """Reads a request. Raises InvalidRequest, which names the field, and Unsupported.

    `has_few_values`: the body has no more values than `bounds.FEW`. `continued`: what is known of the body, for a
    protocol that has layouts.
    """

    def __call__(
        self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
    ) -> ChatRequest | CompletionRequest: ...


def _as_it_is(request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
    return request


class WireProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """One protocol, at `route` below a base URL.

    `reply` gives the reply's JSON, `events` the reply as a whole stream of server-sent events, `live` what renders one
    that is still generated: it is given what the first chunk says, with an empty message. `error` gives an error's
    JSON, `error_event` the end of a stream that has begun and cannot be completed. `complete` adds what a request
    refers to, from the turns that it `continues` and `needs`, by proof; it raises InvalidRequest.

    `schema` is a request's JSON schema, with a title, for the OpenAPI document, and `example` a request. `is_native`:
    engines speak it, so that their replies and errors pass as they are. `gives_payloads`: its clients read replay
    payloads that they did not ask for. `gives_lists`: its replies may have what an engine lists by token, as ids or
    logprobs. `has_layouts`: its requests say where a long body's messages are, so that the next body is known by its
    bytes. `history` is that of a session whose first turn comes in this protocol and that has none yet. `keepalive` is
    sent while a stream waits for its turn."""

    name: str
    route: str
    parse: Parse
    reply: Callable[[CommittedReply], bytes]
    events: Callable[[CommittedReply], bytes]
    live: Callable[[CommittedReply], LiveRenderer]
    error: Callable[[ErrorFields], bytes]
    error_event: Callable[[ErrorFields], bytes]
    schema: Mapping[str, Any]
    example: Mapping[str, Any]
    complete: Callable[[ChatRequest, Mapping[str, StoredTurn]], ChatRequest] = _as_it_is
    methods: tuple[str, ...] = ("POST",)
    is_native: bool = False
    gives_payloads: bool = False
    gives_lists: bool = True
    has_layouts: bool = False
    history: History = "linear"
    keepalive: bytes = KEEPALIVE


class FirstText:
    """`kind` is None until there is something to send."""

    def __init__(self) -> None:
        self.kind: Literal["reasoning", "content"] | None = None
        self._pieces: list[str] = []

    def add(self, delta: Mapping[str, Any]) -> str:
        """What of the delta belongs to the first text. Whitespace does not begin one: reasoning may yet come."""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text: str = reasoning if self.kind == "reasoning" else delta.get("content") or ""
        if self.kind is None and reasoning:
            self.kind, self._pieces, text = "reasoning", [], reasoning
        if text:
            self._pieces.append(text)
        if self.kind is None and text.strip():
            self.kind, text = "content", "".join(self._pieces)
        return "" if self.kind is None else text

    def rest(self, kind: str, text: str) -> str:
        """What is left of the committed reply's first text.

        Raises UpstreamInvalid if the reply does not begin with what was sent.
        """
        sent = "".join(self._pieces)
        if kind != self.kind or not text.startswith(sent):
            raise UpstreamInvalid("the reply does not begin with what the engine streamed first")
        return text[len(sent) :]


Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ONE: Schema = {"const": 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


COMMON: Mapping[str, Schema] = {
    "model": {"description": "For the engine; a known adapter's name makes it the turn's adapter."},
    "stream": {
        **nullable({"type": "boolean"}),
        "description": "The committed reply as events, sent together; until then the stream is kept alive.",
    },
    "stream_mode": {
        **nullable({"enum": ["whole", "live"]}),
        "description": "`live`: deltas are sent as they are generated (docs/streaming.md). By default the session's.",
    },
    "n": nullable(ONE),
    "lora_path": {"maxLength": 512, "description": "The turn's adapter; beside another of the session's: 400."},
    "nvext": {"description": "`session_control` is Turnlog's, docs/fleet.md; the rest goes to the engine."},
}
"""Fields that are not listed are passed to the engine unchanged."""
