"""Makes spans of what was noted, on the sender's thread: names and attributes are those of OpenTelemetry's GenAI
conventions (github.com/open-telemetry/semantic-conventions-genai, `gen_ai.*`), our own begin with `turnlog.`.

A session is a trace, whose id is the hash of the session's id, so its turns are in one trace whichever process took
them, and after a restart. A client's `traceparent` is a link: as a parent it would tear a session apart, since clients
begin a trace for each request, each run or not at all, and it would let an agent write into another's trace.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

SAMPLED = TraceFlags(TraceFlags.SAMPLED)


Attributes = dict[str, str | bool | int | float | Sequence[str]]


class NotedSpan(NamedTuple):
    """A turn, or a session that was closed (`turn` 0). Times are in seconds since the epoch.

    `parent` is the turn that it continues, as session and turn; of a session its parent session. `traceparent` is the
    client's header. `stages` are the turn's, each with its beginning; the last ends with the turn. `content` are the
    new messages and the sampled one, as JSON. `error` is the error's type, `reason` its message, `failed` the place of
    the stage in which it came.
    """

    session_id: str
    turn: int
    began: float
    ended: float
    attributes: Attributes
    parent: tuple[str, int] | None = None
    traceparent: str | None = None
    stages: Sequence[tuple[str, float]] = ()
    error: str | None = None
    reason: str | None = None
    failed: int = -1
    content: tuple[Sequence[bytes], bytes | None] | None = None

    @property
    def spans(self) -> int:
        return 1 + len(self.stages)

    @property
    def content_bytes(self) -> int:
        return 0 if self.content is None else sum(map(len, self.content[0])) + len(self.content[1] or b"")


def trace_id(session_id: str) -> int:
    return int.from_bytes(hashlib.sha256(session_id.encode()).digest()[:16], "big") or 1


def span_id(session_id: str, turn: int, stage: int = 0) -> int:
    """A turn's span, that of its `stage`-th stage, or with turn 0 the session's. A turn that is sent twice is one."""
    name = f"{session_id}/{turn}/{stage}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") or 1


def span_context(session_id: str, turn: int) -> SpanContext:
    return SpanContext(trace_id(session_id), span_id(session_id, turn), is_remote=True, trace_flags=SAMPLED)


class SpanMaker:
    """Resource, sampler and limits are as OTEL_* variables say. One thread at a time may use it."""

    def __init__(self, release: str) -> None:
        resource = Resource.create({SERVICE_VERSION: release})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "turnlog"}))
        self._ids, self._ended = _GivenIds(), _EndedSpans()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(self._ended)
        self._tracer = self._provider.get_tracer("turnlog", release)

    def spans(self, noted: NotedSpan) -> Sequence[ReadableSpan]:
        """A turn's span with its stages, or a session's; none where the sampler leaves the session out."""
        session_id, attributes = noted.session_id, {"gen_ai.conversation.id": noted.session_id, **noted.attributes}
        name = " ".join(
            str(attributes[part]) for part in ("gen_ai.operation.name", "gen_ai.request.model") if part in attributes
        )
        kind = SpanKind.CLIENT if noted.turn else SpanKind.INTERNAL
        sampling = self._provider.sampler.should_sample(None, trace_id(session_id), name, kind, attributes)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return ()
        if noted.content is not None:
            new, sampled = noted.content
            attributes["gen_ai.input.messages"] = input_messages(new)
            if sampled is not None:
                finish = attributes.get("gen_ai.response.finish_reasons")
                reason = finish[0] if isinstance(finish, tuple) else ""
                attributes["gen_ai.output.messages"] = output_messages(sampled, reason)
        parent = set_span_in_context(NonRecordingSpan(span_context(session_id, 0))) if noted.turn else Context()
        self._ids.trace, self._ids.span = trace_id(session_id), span_id(session_id, noted.turn)
        span = self._tracer.start_span(
            name, parent, kind, attributes, _links(noted), start_time=_nanoseconds(noted.began)
        )
        failed = Status(StatusCode.ERROR, noted.reason)
        ends = [*(began for _, began in noted.stages[1:]), noted.ended]
        for place, (stage, began) in enumerate(noted.stages):
            self._ids.span = span_id(session_id, noted.turn, place + 1)
            own: Attributes = {"turnlog.stage": stage}
            if stage == "engine":
                own |= {key: attributes[key] for key in ("server.address", "server.port") if key in attributes}
            child = self._tracer.start_span(
                stage, set_span_in_context(span), attributes=own, start_time=_nanoseconds(began)
            )
            if place == noted.failed:
                child.set_status(failed)
            child.end(_nanoseconds(ends[place]))
        if noted.error is not None:
            span.set_attribute("error.type", noted.error)
            span.set_status(failed)
        span.end(_nanoseconds(noted.ended))
        return self._ended.taken()


def _links(noted: NotedSpan) -> list[Link]:
    links = []
    if noted.parent is not None:
        what = "parent_turn" if noted.parent[1] else "parent_session"
        links.append(Link(span_context(*noted.parent), {"turnlog.link": what}))
    client = _TRACEPARENT.fullmatch(noted.traceparent or "")
    if client is not None:
        trace, span, flags = (int(part, 16) for part in client.groups()[:3])
        links.append(
            Link(SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags)), {"turnlog.link": "client"})
        )
    return [link for link in links if link.context.is_valid]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _GivenIds(IdGenerator):
    """The ids of the span that is made next."""

    trace = span = 1

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _EndedSpans(SpanProcessor):
    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def taken(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


# Messages as the conventions' schema has them (`gen-ai-input-messages.json`, `gen-ai-output-messages.json`).


def input_messages(messages: Iterable[bytes]) -> str:
    """A turn's new messages, as JSON; earlier ones are in the spans of the turns that it continues."""
    return _encoded([_message(msgspec.json.decode(raw)) for raw in messages])


def output_messages(message: bytes, finish_reason: str) -> str:
    """The sampled message, as JSON; of a completion it is the text alone."""
    value = msgspec.json.decode(message)
    given = value if isinstance(value, dict) else {"content": value}
    return _encoded([{**_message({"role": "assistant", **given}), "finish_reason": finish_reason}])


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [part]}
    parts: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        parts.append({"type": "reasoning", "content": reasoning})
    if isinstance(content, list):
        parts.extend(_part(part) for part in content)
    elif content is not None:
        parts.append({"type": "text", "content": content})
    parts.extend(_call(call) for call in message.get("tool_calls") or ())
    return {"role": role, "parts": parts}


def _part(part: Any) -> dict[str, Any]:
    """A part of another type than text stays as it is, which the schema allows."""
    if not isinstance(part, dict):
        return {"type": "text", "content": str(part)}
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
    return {"type": "unknown", **part}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may write what is no JSON, or too deep: then it is the text.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
