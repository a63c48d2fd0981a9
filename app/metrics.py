"""The metrics of this process, for Prometheus, and the statistics of its last minute.

Values that are only read at a scrape are in `app/api/metrics.py`.

A turn counts in plain numbers, which are rendered at a scrape. Labels have few values, all known here or set
by an operator: never a session, a model, or a name that a client chose. With several processes
(`MetricValues`) counters and histograms are summed over all of them, dead ones included; gauges only
over the living ones.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import struct
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_type_hints

import msgspec

from app.domain.events import TYPES, BlobsTombstoned, Event, FailureKind, TurnAbandoned
from app.errors import (
    EnginesFailed,
    HeadersTooLarge,
    MethodNotAllowed,
    SessionChanged,
    TargetTooLong,
    Unauthorized,
    UpgradeRequired,
    codes,
)
from app.turn.in_flight import NEW_TURNS, OUTCOMES, SUCCEEDED, Stages, TurnStage

# Where a process keeps its metrics: numbers in its memory, or in a file of a folder that several processes share.
#
# `turnlog serve` sets PROMETHEUS_MULTIPROC_DIR; whoever starts several processes otherwise sets it to an empty folder.
# Each process maps a file of its own there and counts in it, so that a scrape of any process covers all, and nothing is
# lost when one is killed. It holds a lock on its file, which the kernel frees when it dies: a dead process is never
# taken for alive.

_SUFFIX = ".metrics"
_HEAD = struct.Struct("<Q")
_VALUE = struct.calcsize("d")

Series = tuple[str, str, int]
"""A series in a file: its metric's name, the value of its label, and how many numbers it has."""

_SERIES = msgspec.json.Decoder(list[Series])


def shared_folder() -> Path | None:
    """The shared folder, created if necessary; None where none is set. Raises OSError."""
    given = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not given:
        return None
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given)


class MetricValues:
    """This process's numbers, which `values` reads and writes. They begin as `numbers` (0 without), in the order of
    `series`.

    With a folder they are in a file there, locked until `close` or the end of the process. It takes the place of that
    of `before` in one step.
    """

    def __init__(
        self,
        folder: Path | None,
        series: Sequence[Series],
        numbers: Sequence[float] = (),
        before: MetricValues | None = None,
    ) -> None:
        first = array("d", numbers or [0.0] * sum(width for _, _, width in series))
        if folder is None:
            self._file = None
            self.values = memoryview(bytearray(first.tobytes())).cast("d")
            return
        head = msgspec.json.encode(series)
        head += b" " * (-len(head) % _VALUE)
        made = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._path: Path = made if before is None else before._path
        begun = made.with_suffix(".new")
        self._file = begun.open("w+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(_HEAD.pack(len(head)) + head + first.tobytes())
        self._file.flush()
        whole = memoryview(mmap.mmap(self._file.fileno(), 0))
        self.values = whole[_HEAD.size + len(head) :].cast("d")
        # Renamed when it is locked and whole: another process would take it for a dead one's.
        begun.rename(self._path)
        if before is not None:
            before.close()

    def close(self) -> None:
        """Free the lock; the numbers stay as a dead process's."""
        if self._file is not None:
            # The map holds the same open file, so closing alone would keep the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def read_values(folder: Path, name: str = "*") -> Iterator[tuple[bool, dict[tuple[str, str], list[float]]]]:
    """Of each process that has counted here: does it live, and the numbers of each of its series by metric
    and label. A file of another version is read by its own names. `name` is a pattern of the files' names."""
    for path in sorted(folder.glob(name + _SUFFIX)):
        with path.open("rb") as file:
            is_alive = _is_locked(file.fileno())
            content = file.read()
        (length,) = _HEAD.unpack_from(content)
        values = memoryview(content)[_HEAD.size + length :].cast("d")
        numbers: dict[tuple[str, str], list[float]] = {}
        place = 0
        for metric, label, width in _SERIES.decode(content[_HEAD.size : _HEAD.size + length]):
            numbers[metric, label] = list(values[place : place + width])
            place += width
        yield is_alive, numbers


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


FOLDER: Path | None = shared_folder()

OWN_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Seconds, for Turnlog's own work."""

STAGE_BUCKETS = (*OWN_BUCKETS, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds, also for an engine's work and for waiting at a gate."""

NOT_OF_TURNS = frozenset(
    error.code
    for error in (
        *(Unauthorized, TargetTooLong, HeadersTooLarge, MethodNotAllowed, UpgradeRequired),
        *(EnginesFailed, SessionChanged),
    )
)
"""Error codes of authorisation and of the table of routes, of pauses and of a `DELETE`, which no turn has."""

Kind = Literal["counter", "gauge", "largest", "histogram"]
"""A `gauge` is summed over the living processes; of `largest`, a gauge too, the largest counts."""


class Sample(NamedTuple):
    """One line: `name` is the metric's, with a histogram's suffix."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """A metric with its values at a scrape. A counter's name ends in `_total`."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample]


class Family(NamedTuple):
    """A metric of the process: `label` is its only label, which has one of `values`; of a histogram also
    the upper bounds of its buckets, in seconds."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers a series has: of a histogram a count for each bucket and the sum."""
        return len(self.buckets) + 2 if self.buckets else 1


def _counter(name: str, text: str, label: str = "", values: Iterable[str] = ("",)) -> Family:
    return Family(name, "counter", text, label, tuple(dict.fromkeys(values)))


def _gauge(name: str, text: str, label: str = "", values: Iterable[str] = ("",)) -> Family:
    return Family(name, "gauge", text, label, tuple(values))


def _reasons(event: type[Event]) -> tuple[str, ...]:
    """An event's possible reasons. A series that begins at 1 would hide its first increase."""
    return get_args(get_type_hints(event)["reason"])


_OF_TURNS = (*OUTCOMES, *(code for code in codes() if code not in NOT_OF_TURNS))
_CONTENTS = ("session", "messages", "tokens")

FAMILIES = (
    # turns
    _counter("turnlog_turns_total", "Requests for a turn by outcome.", "outcome", _OF_TURNS),
    Family(
        "turnlog_turn_stage_seconds",
        "histogram",
        "Time that committed turns spent in each stage.",
        "stage",
        tuple(stage.name.lower() for stage in TurnStage),
        STAGE_BUCKETS,
    ),
    Family(
        "turnlog_turn_overhead_seconds",
        "histogram",
        "Time that committed turns spent in Turnlog itself: all stages but gate and engine.",
        buckets=OWN_BUCKETS,
    ),
    _counter(
        "turnlog_turn_bytes_total",
        "Bytes of committed turns: request and reply as received, and their content as stored.",
        "kind",
        ("request", "reply", "stored"),
    ),
    _gauge("turnlog_turns_in_flight", "Turns in flight, also those at a gate."),
    _counter("turnlog_tool_errors_total", "Failed calls whose results committed turns brought."),
    _counter("turnlog_turns_rolled_back_total", "Live turns that a later turn of their session superseded."),
    # traffic
    _counter(
        "turnlog_request_errors_total",
        "Errors of other requests, and of turns refused by authorisation.",
        "code",
        codes(),
    ),
    _gauge("turnlog_inflight_bytes", "Bytes of all request and reply bodies in memory."),
    _gauge("turnlog_inflight_limit_bytes", "Limit of turnlog_inflight_bytes."),
    _gauge("turnlog_connections", "Open connections of clients."),
    _counter("turnlog_connections_refused_total", "Connections refused for lack of file descriptors."),
    Family("turnlog_loop_lag_seconds", "largest", "Largest delay of the event loop in the last minute."),
    _gauge("turnlog_cache_bytes", "Approximate memory of the session cache."),
    _gauge("turnlog_cache_sessions", "Sessions in the cache."),
    _counter("turnlog_cache_hits_total", "Lookups found in the session cache.", "content", _CONTENTS),
    _counter("turnlog_cache_misses_total", "Lookups that had to read the log.", "content", _CONTENTS),
    _gauge(
        "turnlog_pool_workers", "Worker processes: configured, alive, busy.", "state", ("configured", "alive", "busy")
    ),
    _gauge("turnlog_pool_queue_jobs", "Replies that wait for a worker process."),
    _counter("turnlog_pool_jobs_total", "Replies validated by worker processes."),
    _counter("turnlog_pool_restarts_total", "Worker processes that ended."),
    _counter("turnlog_feature_faults_total", "Faults of features after a commit, in turns and closes."),
    _gauge("turnlog_event_readers", "Open replies with the events of all sessions."),
    _gauge("turnlog_exports_running", "Exports in progress."),
    _counter("turnlog_exports_total", "Exports by outcome.", "outcome", ("whole", "cut")),
    _counter("turnlog_export_rows_total", "Rows of all exports."),
    _counter("turnlog_export_bytes_total", "Bytes sent by all exports."),
    _counter("turnlog_export_seconds_total", "Total duration of ended exports."),
    _gauge("turnlog_processes", "Living API processes."),
    Family(
        "turnlog_process_start_time_seconds",
        "largest",
        "Start time of the youngest API process, in seconds since the epoch.",
    ),
    # the store
    Family(
        "turnlog_store_commit_seconds",
        "histogram",
        "Duration of COMMIT of a durable transaction, its sync to disk included.",
        buckets=OWN_BUCKETS,
    ),
    _gauge("turnlog_writer_queue_operations", "Writes that wait for a transaction."),
    _gauge("turnlog_writer_queue_bytes", "Bytes of the writes that wait."),
    _counter("turnlog_writer_operations_total", "Writes committed."),
    _counter(
        "turnlog_writer_transactions_total", "Transactions that committed these writes.", "durable", ("yes", "no")
    ),
    _counter("turnlog_events_total", "Events appended to the sessions' logs.", "type", TYPES),
    _counter("turnlog_rollouts_failed_total", "Rollouts closed as failed.", "kind", get_args(FailureKind)),
    _counter("turnlog_turns_abandoned_total", "Claims released without a commit.", "reason", _reasons(TurnAbandoned)),
    _counter(
        "turnlog_turns_tombstoned_total",
        "Turns whose replay payloads were discarded.",
        "reason",
        _reasons(BlobsTombstoned),
    ),
    _counter("turnlog_chunks_freed_total", "Chunks of replay payloads deleted."),
    _counter(
        "turnlog_janitor_sessions_total", "Sessions that the janitor handled.", "action", ("closed", "freed", "erased")
    ),
    Family(
        "turnlog_janitor_last_round_timestamp_seconds",
        "largest",
        "End of the janitor's last round, in seconds since the epoch.",
    ),
)


class Metrics:
    """The process's metrics, the kernel's and `more`. Each turn is also counted in `recent`."""

    def __init__(self, recent: RecentTurnStats, more: Iterable[Family] = ()) -> None:
        self.recent = recent
        self._families = (*FAMILIES, *more)
        series = [(family.name, value, family.width) for family in self._families for value in family.values]
        self._file = MetricValues(FOLDER, series)
        self._values = self._file.values
        self._named: Mapping[tuple[str, str], float] = {}
        self._named_file: MetricValues | None = None
        self._places: dict[tuple[str, str], int] = {}
        place = 0
        for name, value, width in series:
            self._places[name, value] = place
            place += width
        self._outcomes = {code: self._places["turnlog_turns_total", code] for code in _OF_TURNS}
        self._stages = self._places["turnlog_turn_stage_seconds", "gate"]
        self._overhead = self._places["turnlog_turn_overhead_seconds", ""]
        self._bytes = self._places["turnlog_turn_bytes_total", "request"]
        self._commit = self._places["turnlog_store_commit_seconds", ""]
        self.set("turnlog_process_start_time_seconds", time.time())
        self.set("turnlog_processes", 1)

    def close(self) -> None:
        """Take this process's gauges out of other processes' scrapes."""
        self._file.close()
        if self._named_file is not None:
            self._named_file.close()

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge, or a counter that another component counts since the process began."""
        self._values[self._places[name, label]] = value

    def set_all(self, name: str, values: Mapping[str, float]) -> None:
        """Set the series of a metric by the value of its label; those that are absent stay."""
        for label, value in values.items():
            self._values[self._places[name, label]] = value

    def set_named(self, values: Mapping[tuple[str, str], float]) -> None:
        """Set the series whose labels an operator has named since the start, each by its metric and its label; in place
        of those before, so that one that is absent is shown no more."""
        if list(values) != list(self._named):
            series = [(name, label, 1) for name, label in values]
            self._named_file = MetricValues(FOLDER, series, list(values.values()), self._named_file)
        elif self._named_file is not None:
            for place, value in enumerate(values.values()):
                self._named_file.values[place] = value
        self._named = values

    def add(self, name: str, label: str = "") -> None:
        """Count one more."""
        self._values[self._places[name, label]] += 1

    def turn_ended(self, outcome: str, seconds: Sequence[float], stages: Stages) -> None:
        """Count a turn that has ended; `seconds` are `stages.seconds()`."""
        values = self._values
        overhead = sum(seconds) - seconds[TurnStage.GATE] - seconds[TurnStage.ENGINE]
        self.recent.turn_ended(outcome, overhead, seconds[TurnStage.ENGINE])
        values[self._outcomes[outcome]] += 1
        if outcome in NEW_TURNS:
            place, sums = self._stages, len(STAGE_BUCKETS) + 1
            for spent in seconds:
                values[place + bisect_left(STAGE_BUCKETS, spent)] += 1
                values[place + sums] += spent
                place += sums + 1
            values[self._overhead + bisect_left(OWN_BUCKETS, overhead)] += 1
            values[self._overhead + len(OWN_BUCKETS) + 1] += overhead
            place = self._bytes
            values[place] += stages.request_bytes
            values[place + 1] += stages.reply_bytes
            values[place + 2] += stages.stored_bytes

    def request_failed(self, code: str) -> None:
        """Count an error of a request that is not a turn, or that was refused before its turn began."""
        self.add("turnlog_request_errors_total", code)

    def committed(self, seconds: float) -> None:
        """Record the duration of a durable transaction's COMMIT, on the thread that writes."""
        self._values[self._commit + bisect_left(OWN_BUCKETS, seconds)] += 1
        self._values[self._commit + len(OWN_BUCKETS) + 1] += seconds

    def collected(self) -> list[Metric]:
        """The metrics of this process, or of all that share its folder."""
        if FOLDER is None:
            own = {key: [value] for key, value in self._named.items()}
            for family in self._families:
                for value in family.values:
                    place = self._places[family.name, value]
                    own[family.name, value] = list(self._values[place : place + family.width])
            processes = [(True, own)]
        else:
            processes = list(read_values(FOLDER))
        named: dict[str, list[str]] = {}
        for name, label in self._named:
            named.setdefault(name, []).append(label)
        return [_merged(family, (*family.values, *named.get(family.name, ())), processes) for family in self._families]


WINDOW_S = 60

PER_OCTAVE = 8
"""Histogram slots per factor of two: a percentile is accurate to about 5 %."""

SLOT_ZERO_S = 1e-6


class _Second(msgspec.Struct):
    """The turns that ended in one second. Times are counted by histogram slot."""

    number: int = -1
    turns: int = 0
    overhead: dict[int, int] = msgspec.field(default_factory=dict)
    engine: dict[int, int] = msgspec.field(default_factory=dict)
    errors: Counter[str] = msgspec.field(default_factory=Counter)


class RecentTurnsSummary(msgspec.Struct, frozen=True):
    """Statistics of the last minute, or since the start if shorter; None where no turn was committed.

    `errors` counts the minute's errors by code (`engine_error`: the engine's own), `errors_total` all since the start.
    """

    turns_per_s: float
    overhead_p50_ms: float | None
    overhead_p99_ms: float | None
    engine_p50_ms: float | None
    engine_p99_ms: float | None
    errors: dict[str, int]
    errors_total: dict[str, int]


class RecentTurnStats:
    """Statistics of the turns that ended in this process within the last minute. `clock` is
    monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = [_Second() for _ in range(WINDOW_S + 1)]
        self._errors: Counter[str] = Counter()

    def turn_ended(self, outcome: str, overhead: float, engine: float) -> None:
        """A reply or an error was sent. `outcome` is one of `OUTCOMES`, or an `AppError`'s code; the others are seconds
        of Turnlog's own work and of the engine's."""
        number = int(self._clock())
        index = number % len(self._seconds)
        second = self._seconds[index]
        if second.number != number:
            second = self._seconds[index] = _Second(number)
        if outcome in NEW_TURNS:
            second.turns += 1
            for slots, seconds in ((second.overhead, overhead), (second.engine, engine)):
                slot = int(math.log2(seconds / SLOT_ZERO_S) * PER_OCTAVE) if seconds > SLOT_ZERO_S else 0
                slots[slot] = slots.get(slot, 0) + 1
        elif outcome not in SUCCEEDED:
            second.errors[outcome] += 1
            self._errors[outcome] += 1

    def summary(self) -> RecentTurnsSummary:
        """Includes the second that has only begun."""
        now = self._clock()
        kept = [second for second in self._seconds if now - WINDOW_S < second.number + 1]
        overhead: Counter[int] = Counter()
        engine: Counter[int] = Counter()
        errors: Counter[str] = Counter()
        for second in kept:
            overhead.update(second.overhead)
            engine.update(second.engine)
            errors.update(second.errors)
        elapsed = min(max(now - self._began, 1.0), float(WINDOW_S))
        return RecentTurnsSummary(
            turns_per_s=sum(second.turns for second in kept) / elapsed,
            overhead_p50_ms=_percentile_ms(overhead, 0.5),
            overhead_p99_ms=_percentile_ms(overhead, 0.99),
            engine_p50_ms=_percentile_ms(engine, 0.5),
            engine_p99_ms=_percentile_ms(engine, 0.99),
            errors=dict(errors),
            errors_total=dict(self._errors),
        )


def _percentile_ms(slots: Counter[int], share: float) -> float | None:
    """The middle of the slot that holds the percentile `share`, in ms."""
    left = math.ceil(share * slots.total())
    for slot in sorted(slots):
        left -= slots[slot]
        if left <= 0:
            return SLOT_ZERO_S * 1000 * math.exp2((slot + 0.5) / PER_OCTAVE)
    return None


def _merged(
    family: Family, values: Iterable[str], processes: Sequence[tuple[bool, Mapping[tuple[str, str], list[float]]]]
) -> Metric:
    samples: list[Sample] = []
    for value in values:
        numbers = [
            process[family.name, value]
            for is_alive, process in processes
            if len(process.get((family.name, value), ())) == family.width  # another version may have other buckets
            and (is_alive or family.kind in ("counter", "histogram"))
        ]
        combine = max if family.kind == "largest" else sum
        merged = [combine(column) for column in zip(*numbers, strict=True)] or [0.0] * family.width
        labels = {family.label: value} if family.label else {}
        if family.buckets:
            samples += _histogram(family, labels, merged)
        else:
            samples.append(Sample(family.name, labels, merged[0]))
    return Metric(family.name, family.kind, family.help, samples)


def _histogram(family: Family, labels: Mapping[str, str], numbers: Sequence[float]) -> Iterator[Sample]:
    count = 0.0
    for bound, within in zip((*family.buckets, float("inf")), numbers, strict=False):
        count += within
        yield Sample(f"{family.name}_bucket", {**labels, "le": _number(bound)}, count)
    yield Sample(f"{family.name}_count", labels, count)
    yield Sample(f"{family.name}_sum", labels, numbers[-1])


def render(metrics: Iterable[Metric], *, openmetrics: bool = False) -> bytes:
    """Prometheus' text format, or OpenMetrics 1.0.

    Source: prometheus/docs/instrumenting/exposition_formats.md, OpenMetrics' specification 1.0.0.
    """
    lines: list[str] = []
    for metric in metrics:
        # OpenMetrics names a counter's family without the suffix of its samples.
        name = metric.name.removesuffix("_total") if openmetrics and metric.kind == "counter" else metric.name
        kind = "gauge" if metric.kind == "largest" else metric.kind
        lines += (f"# HELP {name} {metric.help}", f"# TYPE {name} {kind}")
        for sample in metric.samples:
            labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(sample.labels.items()))
            series = f"{sample.name}{{{labels}}}" if labels else sample.name
            lines.append(f"{series} {_number(sample.value)}")
    if openmetrics:
        lines.append("# EOF")
    return "\n".join([*lines, ""]).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))
