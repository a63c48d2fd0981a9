"""`/metrics` and the log of a real server; alert rules and the dashboard name nothing that it does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from integration.places import Places
from integration.stand import Stand, error_of, held, standing, until, user
from ops.server import ROOT

DEPLOY = ROOT / "ops" / "deploy"
BY_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds."""

KEY = {"idempotency-key": "canary-key-of-a-client"}

Samples = dict[str, list[dict[str, str]]]
"""The labels of each sample, by its name."""


@pytest.fixture(scope="module")
def watched(places: Places) -> Iterator[Stand]:
    """A server of the module's own, whose counts are those of its tests alone."""
    environment = {"TURNLOG_LOG_FORMAT": "json", "TURNLOG_STREAM_KEEPALIVE_S": "0", "TURNLOG_FEATURES": "all"}
    with standing(places.new("watched"), "--weight-version", "7", environment=environment) as made:
        yield made


def scrape(stand: Stand, **headers: str) -> httpx.Response:
    response = stand.http.get("/metrics", headers=headers)
    assert response.status_code == 200, response.text
    return response


def value(stand: Stand, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(scrape(stand).text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"there is no {name} {labels}")


def lines(stand: Stand, event: str) -> list[dict[str, Any]]:
    """The server's log lines whose text begins so."""
    found = [json.loads(line) for line in stand.server.log_path.read_text().splitlines()]
    return [line for line in found if line["event"].startswith(event)]


def test_each_way_in_which_a_turn_ends_is_counted_once(watched: Stand) -> None:
    def counted(outcome: str) -> float:
        return value(watched, "turnlog_turns_total", outcome=outcome)

    outcomes = ("committed", "aborted", "replayed", "joined", "engine_error", "upstream_invalid", "session_not_found")
    before = {outcome: counted(outcome) for outcome in outcomes}
    talk = watched.talk()
    sent = [user("Hello")]
    talk.say("Hello", headers=KEY)
    assert talk.chat(sent, headers=KEY).headers["x-turnlog-replayed"] == "true"
    assert talk.say("Stop here", sim={"fault": "abort"}).json()["choices"][0]["finish_reason"] == "abort"
    more = [*talk.messages, user("x")]
    assert talk.chat(more, sim={"fault": "status_429"}).status_code == 429
    assert error_of(talk.chat(more, sim={"fault": "not_json"})) == (502, "upstream_invalid")
    assert watched.known("nobody").chat(sent).status_code == 404
    other = watched.talk()
    with held(watched.sim):
        leading = watched.meanwhile(other.chat, sent, headers={"idempotency-key": "k"})
        watched.until_generating(other)
        alone = value(watched, "turnlog_inflight_bytes")
        joining = watched.meanwhile(other.chat, sent, headers={"idempotency-key": "k"})
        until(lambda: value(watched, "turnlog_inflight_bytes") > alone)
    assert joining.result().headers["x-turnlog-replayed"] == "true"
    assert leading.result().status_code == 200
    assert {outcome: counted(outcome) - before[outcome] for outcome in outcomes} == {
        **dict.fromkeys(outcomes, 1),
        "committed": 2,
    }


def test_the_stages_are_what_the_log_says_and_add_up_to_what_the_client_waited(watched: Stand) -> None:
    def spent(stage: str) -> float:
        return value(watched, "turnlog_turn_stage_seconds_sum", stage=stage)

    stages = ("gate", "claim", "prepare", "engine", "validate")
    before = {stage: spent(stage) for stage in stages}
    talk = watched.talk()
    assert watched.http.post("/fleet/pause", json={"lease_s": 60}).status_code == 200
    waiting = watched.meanwhile(talk.say, "Hello", sim={"latency_s": 0.3})
    until(lambda: value(watched, "turnlog_turns_gated") == 1)
    assert value(watched, "turnlog_gates_shut", scope="fleet") == 1
    assert value(watched, "turnlog_gate_shut_seconds", scope="fleet") > 0
    assert value(watched, "turnlog_turns_in_flight") == 1
    assert watched.http.post("/fleet/resume").status_code == 200
    response = waiting.result()
    assert value(watched, "turnlog_gate_shut_seconds", scope="fleet") == 0
    timing = dict(zip(stages, talk.committed()[0]["timing"], strict=True))
    for stage in stages:
        assert timing[stage] / 1e6 == pytest.approx(spent(stage) - before[stage], abs=2e-6), stage
    assert timing["gate"] > 0
    assert timing["engine"] >= 300_000
    assert sum(timing.values()) / 1e6 < response.elapsed.total_seconds()


def test_the_store_the_engines_and_the_process_are_told_of(watched: Stand) -> None:
    talk = watched.talk()
    before = value(watched, "turnlog_events_total", type="TurnCommitted")
    bytes_before = value(watched, "turnlog_turn_bytes_total", kind="reply")
    response = talk.say("Hello")
    assert value(watched, "turnlog_events_total", type="TurnCommitted") == before + 1
    assert value(watched, "turnlog_turn_bytes_total", kind="reply") == bytes_before + len(response.content)
    assert value(watched, "turnlog_store_commit_seconds_count") > 0
    (url,) = (engine["url"] for engine in watched.http.get("/engines").json()["engines"])
    until(lambda: value(watched, "turnlog_engine_up", engine=url) == 1)
    assert value(watched, "turnlog_engine_weight_version", engine=url) == 7
    assert value(watched, "turnlog_database_up") == 1
    assert value(watched, "turnlog_database_bytes") > 0
    until(lambda: value(watched, "turnlog_sessions", status="open") > 0)
    assert value(watched, "turnlog_processes") == 1
    assert value(watched, "process_start_time_seconds") > 0


def test_turns_are_counted_by_those_runs_that_were_given_something(watched: Stand) -> None:
    def by_run(what: str) -> dict[str, float]:
        found = {family.name: family for family in text_string_to_metric_families(scrape(watched).text)}
        return {sample.labels["run"]: sample.value for sample in found[f"turnlog_run_{what}"].samples}

    def give(run: str) -> None:
        assert watched.http.put(f"/runs/{run}", json={}).status_code == 200

    before = {what: by_run(what)["other"] for what in ("turns", "failed_turns", "output_tokens")}
    give("a-run")
    give("other")
    tokens = []
    for run in ("a-run", "other", "not-given"):
        talk = watched.talk(run=run)
        talk.say("Hello")
        assert talk.chat([*talk.messages, user("x")], sim={"fault": "not_json"}).status_code == 502
        tokens.append(talk.committed()[0]["output_tokens"])
    for what, own, others in (("turns", 1, 2), ("failed_turns", 1, 2), ("output_tokens", tokens[0], sum(tokens[1:]))):
        found = by_run(what)
        assert (found["a-run"], found["other"] - before[what]) == (own, others), what
    until(lambda: by_run("open_sessions").get("a-run") == 1)
    assert by_run("turns")["a-run"] == 1, "its numbers go on when the names are read anew"

    for number in range(50):
        give(f"a-{number:02}")
    assert set(by_run("turns")) == {"other", *(f"a-{number:02}" for number in range(50))}
    other = by_run("turns")["other"]
    watched.talk(run="a-run").say("Hello")
    assert by_run("turns")["other"] == other + 1
    assert watched.http.delete("/runs/a-00").status_code == 204
    until(lambda: "a-run" in by_run("turns"))
    assert "a-00" not in by_run("turns")


def test_a_failed_turn_is_one_line_with_its_request_and_session(watched: Stand) -> None:
    talk = watched.talk()
    response = talk.chat([user("x")], sim={"fault": "not_json"}, headers={"x-request-id": "rollout-7"})
    assert response.headers["x-request-id"] == "rollout-7"
    until(lambda: [line for line in lines(watched, "turn failed") if line.get("request_id") == "rollout-7"])
    (line,) = (line for line in lines(watched, "turn failed") if line.get("request_id") == "rollout-7")
    assert (line["session_id"], line["code"], line["stage"]) == (talk.id, "upstream_invalid", "validate")
    assert line["level"] == "info"
    assert line["duration_ms"] > 0


def test_an_error_of_what_is_no_turn_is_counted_by_its_code(watched: Stand) -> None:
    for method, path, host, code in (
        ("GET", "/sessions", "evil", "forbidden"),
        ("POST", "/sessions/x/v1/chat/completions", "evil", "forbidden"),
        ("GET", "/sessions/none", "localhost", "session_not_found"),
        ("GET", "/sessions?limit=0", "localhost", "invalid_request"),
        ("PUT", "/metrics", "localhost", "method_not_allowed"),
        ("GET", "/" + "x" * 20_000, "localhost", "target_too_long"),
    ):
        before = value(watched, "turnlog_request_errors_total", code=code)
        assert error_of(watched.http.request(method, path, headers={"host": host}))[1] == code
        assert value(watched, "turnlog_request_errors_total", code=code) == before + 1


def expressions() -> list[tuple[str, str]]:
    """What alerts and panels ask Prometheus for, and who asks."""
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    found = [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            found.append((panel["title"], text))
    return found


def selectors(text: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The name of each series that an expression selects, and its labels with their operators and values."""
    found = re.findall(r"\b((?:turnlog|process)_\w+)(?:\{([^}]*)\})?", text)
    return [(name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', within)) for name, within in found]


def missing(name: str, labels: list[tuple[str, str, str]], samples: Samples) -> Iterator[str]:
    """What a selector names and the server does not have."""
    if name not in samples:
        yield name
        return
    for label, operator, wanted in labels:
        there = {of.get(label) for of in samples[name]}
        # Each of the alternatives must be there, or one of them is misspelt.
        every = wanted.split("|") if "~" in operator else [wanted]
        yield from (f"{name}{{{label}={one}}}" for one in every if label not in BY_PROMETHEUS and one not in there)


def test_alerts_and_dashboard_parse_and_name_what_there_is(watched: Stand) -> None:
    watched.talk().say("Hello")
    assert watched.http.put("/runs/any", json={}).status_code == 200
    until(lambda: "turnlog_engine_weight_version{" in scrape(watched).text)
    samples: Samples = {}
    for family in text_string_to_metric_families(scrape(watched).text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    used = set()
    for who, text in expressions():
        promql_parser.parse(text)
        found = selectors(text)
        used |= {name for name, _ in found}
        assert found, who
        assert [one for name, labels in found for one in missing(name, labels, samples)] == [], who
        known = {label for name, _ in found for labels in samples.get(name, ()) for label in labels}
        grouped = {one.strip() for by in re.findall(r"\bby \(([^)]*)\)", text) for one in by.split(",")}
        assert grouped <= known | BY_PROMETHEUS, who
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in samples if name.startswith("turnlog_")}
    shown = {re.sub("_(bucket|count|sum)$", "", name) for name in used}
    assert families == shown & families, f"nobody looks at {families - shown}"


def test_each_alert_says_what_it_is_and_where_to_read_on() -> None:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (path, anchor in anchors) == ("docs/operations.md", True), anchor
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_turns_that_were_rolled_back_are_counted_once(watched: Stand) -> None:
    before = value(watched, "turnlog_turns_rolled_back_total")
    talk = watched.talk(rollback_window=2)
    for text in ("One", "Two", "Three"):
        talk.say(text)
    sent = [*talk.messages[:2], user("Instead")]
    told = [talk.chat(sent, headers=KEY).headers["x-turnlog-rolled-back"] for _ in range(2)]
    assert (told, value(watched, "turnlog_turns_rolled_back_total")) == (["2", "2"], before + 2)


def test_own_overhead_leaves_engine_and_gate_out(watched: Stand) -> None:
    before = value(watched, "turnlog_turn_overhead_seconds_sum"), value(watched, "turnlog_turn_overhead_seconds_count")
    elapsed = watched.talk().say("Hello", sim={"latency_s": 0.5}).elapsed.total_seconds()
    assert value(watched, "turnlog_turn_overhead_seconds_count") == before[1] + 1
    assert 0 < value(watched, "turnlog_turn_overhead_seconds_sum") - before[0] < elapsed - 0.5


def test_exports_are_counted_when_they_have_been_read(watched: Stand) -> None:
    before = [value(watched, f"turnlog_export_{what}_total") for what in ("rows", "bytes")]
    watched.talk().say("Hello")
    sent = watched.http.get("/export")
    assert value(watched, "turnlog_export_rows_total") == before[0] + len(sent.text.splitlines())
    assert value(watched, "turnlog_export_bytes_total") == before[1] + len(sent.content)
    assert value(watched, "turnlog_exports_running") == 0


def test_what_an_operator_changes_is_one_line(watched: Stand) -> None:
    talk = watched.talk()
    talk.say("Hello")
    url = "http://127.0.0.1:9"
    assert watched.http.post("/engines", json={"url": url, "state": "draining"}).status_code == 200
    assert watched.http.delete("/engines", params={"url": url}).status_code == 204
    assert watched.http.delete(talk.path, params={"erase": "true"}).status_code == 204
    assert len([line for line in lines(watched, "fleet event") if url in line["event"]]) == 2
    (erased,) = (line for line in lines(watched, "session erased") if line["session_id"] == talk.id)
    assert erased["request_id"]


def test_an_error_of_a_turn_is_counted_once(watched: Stand) -> None:
    others = value(watched, "turnlog_request_errors_total", code="session_not_found")
    turns = value(watched, "turnlog_turns_total", outcome="session_not_found")
    response = watched.http.post("/sessions/none/v1/chat/completions", json={"messages": [user("Hello")]})
    assert error_of(response) == (404, "session_not_found")
    assert value(watched, "turnlog_turns_total", outcome="session_not_found") == turns + 1
    assert value(watched, "turnlog_request_errors_total", code="session_not_found") == others


def test_openmetrics_is_given_to_who_asks_for_it(watched: Stand) -> None:
    response = scrape(watched, accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert "turnlog_turns" in {family.name for family in openmetrics(response.text)}
    assert scrape(watched).headers["content-type"].startswith("text/plain")
