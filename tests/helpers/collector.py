"""A collector that receives OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import gzip
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from helpers.answering import Answer, Answering, Asked


class Received(NamedTuple):
    """A span as a collector sees it: ids are hex, links their span ids by what they are, times in nanoseconds."""

    trace: str
    id: str
    parent: str
    name: str
    kind: str
    attributes: dict[str, Any]
    links: dict[str, str]
    error: str | None
    began: int
    ended: int
    resource: dict[str, Any]


class Collector(Answering):
    def __init__(self, port: int = 0) -> None:
        super().__init__(self._take, port)
        self.spans: list[Received] = []

    def _take(self, asked: Asked) -> Answer:
        is_packed = asked.header("content-encoding") == "gzip"
        self.spans += received(gzip.decompress(asked.body) if is_packed else asked.body)
        return Answer(headers=(("Content-Type", "application/x-protobuf"),))

    def turns(self, session_id: str) -> list[Received]:
        """The spans of a session's turns, in their order."""
        turns = [span for span in self.spans if "turnlog.turn" in span.attributes]
        own = [span for span in turns if span.attributes["gen_ai.conversation.id"] == session_id]
        return sorted(own, key=lambda span: span.began)

    def stages(self, span: Received) -> list[Received]:
        return sorted((child for child in self.spans if child.parent == span.id), key=lambda child: child.began)


def received(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        _received(span, _attributes(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _received(span: Span, resource: dict[str, Any]) -> Received:
    links = {_attributes(link.attributes)["turnlog.link"]: link.span_id.hex() for link in span.links}
    failed = span.status.code == span.status.STATUS_CODE_ERROR
    return Received(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        _attributes(span.attributes),
        links,
        span.status.message if failed else None,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
