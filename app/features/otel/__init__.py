"""OpenTelemetry: each turn as a span of the GenAI conventions, sent to a collector (OTLP over HTTP).

    a turn     that had its claim is noted at its end, and becomes spans on a thread   (`TurnPoints.ended`)
    a close    sends the session's own span, `invoke_agent`                            (`Sessions.on_close`)

On where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set; otherwise nothing is imported or
added to a turn. What the collector does not take is dropped and counted.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from app.extras import install_command
from app.metrics import Family

if TYPE_CHECKING:
    from app.features.otel.turns import TracedTurns
    from app.services import Services

log = logging.getLogger("turnlog.otel")

METRICS = (
    Family(
        "turnlog_otel_spans_total",
        "counter",
        "Spans for the OpenTelemetry collector, by what became of them.",
        "outcome",
        ("sent", "refused", "queue_full"),
    ),
)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variables' names and values are OpenTelemetry's; those of queue, sampler and resource its SDK reads."""


def add_to(services: Services) -> TracedTurns | None:
    if not _is_wanted():
        return None
    try:
        from app.features.otel.sending import SpanSender
        from app.features.otel.spans import SpanMaker
    except ImportError as error:
        log.warning(
            "no spans are sent to OpenTelemetry, because %s is not installed: %s", error.name, install_command("otel")
        )
        return None
    from app.features.otel.turns import TracedTurns

    sender = SpanSender(SpanMaker(services.release))
    content = os.environ.get(CONTENT, "").strip().upper() in ("SPAN_ONLY", "SPAN_AND_EVENT", "TRUE")
    traced = TracedTurns(services, sender, with_content=content)

    async def open_paths() -> None:
        for path in services.turns.paths.values():  # that of sessions of text too
            path.points.ended.append(traced.ended)

    services.opens.append(open_paths)
    services.sessions.on_close(traced.session_closed)
    services.starts.append(sender.start)
    services.turn_ends.append(traced.stop)
    services.refreshes.append(lambda: services.metrics.set_all("turnlog_otel_spans_total", sender.counts))
    return traced


def _is_wanted() -> bool:
    """Does the environment name a collector that can be sent to? What is wrong there costs no turn: it is a warning."""
    given = os.environ
    if not any(given.get(name, "").strip() for name in ENDPOINTS):
        return False
    exporter = given.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if given.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    protocol = next((value for name in PROTOCOLS if (value := given.get(name, "").strip())), "http/protobuf")
    if exporter in ("", "otlp") and protocol == "http/protobuf":
        return True
    log.warning("no spans are sent to OpenTelemetry: %s over %s is not supported", exporter or "otlp", protocol)
    return False
