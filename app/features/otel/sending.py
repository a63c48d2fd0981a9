"""Sends spans in batches, on a thread of its own. What does not fit in the queue, or is refused, is dropped."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

if TYPE_CHECKING:
    from app.features.otel.spans import NotedSpan, SpanMaker

log = logging.getLogger("turnlog.otel")

QUEUE_BYTES = 64 << 20
"""Of content that waits; without content an entry has about 2 KiB."""

STOP_S = 3.0
"""How long a stopping server waits for its last spans to be sent."""


class SpanSender:
    """`put` never blocks. Endpoint, headers, timeout and compression are as OTEL_EXPORTER_OTLP_* say; the queue (in
    turns), the pause and the batch (in spans) as OTEL_BSP_*. The exporter repeats what may succeed later.

    `counts`: the spans that the collector took, that it did not take, and for which the queue had no room.
    """

    def __init__(self, maker: SpanMaker) -> None:
        self._maker = maker
        self._exporter = OTLPSpanExporter()
        self._pause_s = _number("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        self._most = _number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._batch = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._queue: deque[NotedSpan] = deque()
        self._put_bytes = self._taken_bytes = 0
        self.counts = Counter(sent=0, refused=0, queue_full=0)
        self._wake = threading.Event()
        self._is_stopping = self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="turnlog-otel", daemon=True)
        # It would write a line for each try.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

    def start(self) -> None:
        self._thread.start()

    def put(self, noted: NotedSpan) -> None:
        size = noted.content_bytes
        if len(self._queue) >= self._most or self._put_bytes - self._taken_bytes + size > QUEUE_BYTES:
            self.counts["queue_full"] += noted.spans
            return
        self._put_bytes += size
        self._queue.append(noted)
        if len(self._queue) * noted.spans >= self._batch:
            self._wake.set()

    async def stop(self) -> None:
        """Send what waits, for at most `STOP_S` seconds."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_S)
        end_repetitions: Callable[[], None] = self._exporter.shutdown
        end_repetitions()

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._pause_s)
            self._wake.clear()
            while self._queue:
                self._send(self._taken())

    def _taken(self) -> list[ReadableSpan]:
        """The spans of the turns that have waited longest, about a batch."""
        spans: list[ReadableSpan] = []
        while self._queue and len(spans) < self._batch:
            noted = self._queue.popleft()
            self._taken_bytes += noted.content_bytes
            try:
                spans.extend(self._maker.spans(noted))
            except Exception:  # the thread's outermost edge: the others' spans are still sent
                self.counts["refused"] += noted.spans
                log.exception("a span of session %s could not be created", noted.session_id)
        return spans

    def _send(self, spans: list[ReadableSpan]) -> None:
        if not spans:
            return
        is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        self.counts["sent" if is_taken else "refused"] += len(spans)
        if is_taken is self._is_failing:
            self._is_failing = not is_taken
            if is_taken:
                log.info("the OpenTelemetry collector accepts spans again")
            else:
                log.warning(
                    "the OpenTelemetry collector does not accept spans: they are dropped, turns are not "
                    "affected; turnlog_otel_spans_total counts them"
                )


def _number(name: str, default: int) -> int:
    given = os.environ.get(name, "").strip()
    return int(given) if given.isdecimal() and int(given) else default
