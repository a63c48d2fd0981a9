from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from app import errors
from app import metrics as app_metrics
from app.metrics import (
    NOT_OF_TURNS,
    Family,
    Metrics,
    RecentTurnStats,
    Sample,
    render,
)
from app.metrics import Metric as Rendered
from app.turn.in_flight import OUTCOMES, Stages, TurnStage

LABELS = {"outcome", "stage", "kind", "content", "state", "durable", "type", "reason", "action", "code"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(RecentTurnStats(time.monotonic))


def families(metrics: Metrics) -> dict[str, Metric]:
    text = render(metrics.collected()).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    samples = [sample for family in families(metrics).values() for sample in family.samples]
    (sample,) = (sample for sample in samples if (sample.name, sample.labels) == (name, labels))
    return sample.value


def turn(**seconds: float) -> tuple[list[float], Stages]:
    stages = Stages(time.monotonic)
    stages.request_bytes, stages.reply_bytes, stages.stored_bytes = 10, 200, 30
    return [seconds.get(stage.name.lower(), 0.0) for stage in TurnStage], stages


def test_a_process_with_other_buckets_is_left_out_of_their_sum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    older = [(f.name, label, f.width + bool(f.buckets)) for f in app_metrics.FAMILIES for label in f.values]
    before = app_metrics.MetricValues(tmp_path, older)
    before.values[0] = 2
    before.close()
    monkeypatch.setattr(app_metrics, "FOLDER", tmp_path)
    shared = Metrics(RecentTurnStats(time.monotonic))
    shared.turn_ended("committed", *turn(engine=5))
    assert value(shared, "turnlog_turns_total", outcome="committed") == 3
    assert value(shared, "turnlog_turn_stage_seconds_count", stage="engine") == 1
    shared.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_names_of_labels_may_change_while_their_numbers_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shared: bool
) -> None:
    monkeypatch.setattr(app_metrics, "FOLDER", tmp_path if is_shared else None)
    more = [Family("turnlog_run_turns_total", "counter", "By run.", "run", ("other",))]
    first, second = (Metrics(RecentTurnStats(time.monotonic), more) for _ in range(2))

    def shown(metrics: Metrics) -> dict[str, float]:
        return {sample.labels["run"]: sample.value for sample in families(metrics)["turnlog_run_turns"].samples}

    def tell(metrics: Metrics, other: int, **runs: int) -> None:
        metrics.set("turnlog_run_turns_total", other, "other")
        metrics.set_named({("turnlog_run_turns_total", run): turns for run, turns in runs.items()})

    elsewhere = 10 if is_shared else 0
    tell(second, 10, b=10, c=10)
    assert shown(first) == {"other": elsewhere}
    tell(first, 1, a=1, b=2)
    assert shown(first) == {"other": 1 + elsewhere, "a": 1, "b": 2 + elsewhere}
    tell(first, 1, a=3, b=2)
    second.close()
    tell(first, 2, b=2, c=5)
    assert shown(first) == {"other": 2 + elsewhere, "b": 2 + elsewhere, "c": 5 + elsewhere}
    living = sorted(is_alive for is_alive, _ in app_metrics.read_values(tmp_path))
    assert living == [False, False, True, True] * is_shared, "a file for the names of each process, and no former one"
    first.close()


def test_a_bucket_counts_what_is_at_most_its_bound(metrics: Metrics) -> None:
    for engine in (0.0, 0.005, 0.0051, 4000):
        metrics.turn_ended("committed", *turn(engine=engine))

    def within(bound: str) -> float:
        return value(metrics, "turnlog_turn_stage_seconds_bucket", stage="engine", le=bound)

    assert [within(bound) for bound in ("5e-05", "0.005", "0.01", "3600.0", "+Inf")] == [1, 2, 3, 3, 4]
    metrics.committed(0.003)
    assert value(metrics, "turnlog_store_commit_seconds_bucket", le="0.0025") == 0
    assert value(metrics, "turnlog_store_commit_seconds_bucket", le="0.005") == 1
    assert value(metrics, "turnlog_store_commit_seconds_sum") == 0.003


def test_each_error_that_a_client_can_meet_has_its_label_from_the_start(metrics: Metrics) -> None:
    codes = {
        error.code for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.AppError)
    }
    found = families(metrics)
    outcomes = {sample.labels["outcome"] for sample in found["turnlog_turns"].samples}
    assert outcomes == (codes - NOT_OF_TURNS) | set(OUTCOMES)
    assert len(outcomes) <= 60
    others = {sample.labels["code"] for sample in found["turnlog_request_errors"].samples}
    assert others == codes


def test_names_have_their_unit_and_labels_few_values(metrics: Metrics) -> None:
    found = [family for name, family in families(metrics).items() if not name.startswith("process_")]
    assert len(found) > 30
    for family in found:
        assert re.fullmatch(r"turnlog(_[a-z]+)+", family.name)
        assert family.documentation.endswith("."), family.name
        assert family.name.endswith(("seconds", "bytes")) or not re.search("second|byte|_ms|milli", family.name)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} <= LABELS, sample
            assert family.type != "counter" or sample.name.endswith("_total"), "no series beside it"


def test_series_that_alerts_rest_on_are_there_before_the_first_of_them(metrics: Metrics) -> None:
    assert value(metrics, "turnlog_turns_abandoned_total", reason="owner_dead") == 0
    assert value(metrics, "turnlog_turns_tombstoned_total", reason="window") == 0
    assert value(metrics, "turnlog_events_total", type="TurnRejected") == 0


def test_both_formats_say_the_same_and_a_label_may_hold_anything(metrics: Metrics) -> None:
    metrics.turn_ended("committed", *turn(engine=5))
    name = 'http://a/"b"\\n\n'
    shown = [*metrics.collected(), Rendered("up", "gauge", "Is it up?", [Sample("up", {"engine": name}, 1)])]
    plain = list(text_string_to_metric_families(render(shown).decode()))
    other = list(openmetrics(render(shown, openmetrics=True).decode()))
    assert [(family.name, family.type, family.samples) for family in plain] == [
        (family.name, family.type, family.samples) for family in other
    ]
    assert plain[-1].samples[0].labels == {"engine": name}
