"""Spans for OpenTelemetry: a real server, and a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from helpers.collector import Collector, Received

from integration.places import Places
from integration.stand import Stand, Talk, serving, until, user
from ops.server import reserve_port
from ops.simulator.process import SimulatorProcess

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def environment(collector_url: str, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector_url, "OTEL_BSP_SCHEDULE_DELAY": "20", **more}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def stand(sglang: SimulatorProcess, collector: Collector, places: Places) -> Iterator[Stand]:
    names = {
        "OTEL_SERVICE_NAME": "rollouts",
        "OTEL_RESOURCE_ATTRIBUTES": "run=7",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    with serving(places.new("otel"), sglang.base_url, environment=environment(collector.base_url, **names)) as made:
        yield made


def trace_of(session_id: str) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def spans_of(collector: Collector, talk: Talk, turns: int) -> list[Received]:
    until(lambda: len(collector.turns(talk.id)) >= turns)
    return collector.turns(talk.id)


def test_a_turn_is_a_span_with_its_stages(stand: Stand, collector: Collector) -> None:
    talk = stand.talk(group_id="one", attempt=3)
    talk.say("canary-of-the-client", temperature=0.5, headers={"traceparent": CLIENT, "x-claude-code-agent-id": "sub"})
    talk.say("and on")
    first, second = spans_of(collector, talk, 2)
    committed = talk.committed()[0]
    assert (first.name, first.kind, first.error) == ("chat simulator", "CLIENT", None)
    assert (
        first.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sglang",
            "gen_ai.conversation.id": talk.id,
            "gen_ai.request.model": "simulator",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.input_tokens": committed["suffix_tokens"],
            "gen_ai.usage.output_tokens": committed["output_tokens"],
            "server.address": "127.0.0.1",
            "server.port": stand.sim.base_url.port,
            "turnlog.turn": 1,
            "turnlog.protocol": "chat",
            "turnlog.group_id": "one",
            "turnlog.attempt": 3,
        }.items()
    )
    assert first.attributes["gen_ai.response.finish_reasons"] == [committed["finish_reason"]]
    assert first.attributes["turnlog.weight_versions"] == ["default"]
    assert first.resource.items() >= {"service.name": "rollouts", "run": "7"}.items()
    stages = collector.stages(first)
    assert [stage.name for stage in stages] == ["claim", "prepare", "engine", "validate", "commit"]
    assert (stages[0].began, stages[-1].ended) == (first.began, first.ended)
    assert all(stage.ended == later.began for stage, later in pairwise(stages))
    engine_us = (stages[2].ended - stages[2].began) / 1000
    assert engine_us == pytest.approx(committed["timing"][3], abs=50)
    # One trace a session; the client's is a link, as is the turn that this one continues.
    assert {span.trace for span in (first, second, *stages)} == {trace_of(talk.id)}
    assert first.links == {"client": "b7ad6b7169203331"}
    assert second.links == {"parent_turn": first.id}
    assert first.parent == second.parent
    assert "canary" not in repr(collector.spans)
    assert stand.http.delete(f"/sessions/{talk.id}").status_code == 204
    until(lambda: any(span.id == first.parent for span in collector.spans))
    [whole] = [span for span in collector.spans if span.id == first.parent]
    assert (whole.name, whole.kind, whole.parent, whole.trace) == ("invoke_agent", "INTERNAL", "", first.trace)
    assert whole.began <= first.began < second.ended <= whole.ended
    assert whole.attributes["turnlog.turns"] == 2


@pytest.mark.parametrize(
    ("fault", "error", "stage"),
    [
        ("status_500", "500", "engine"),
        ("empty_200", "upstream_invalid", "validate"),
        ("reset", "upstream_unreachable", "engine"),
    ],
)
def test_a_turn_that_fails_has_its_error(
    stand: Stand, collector: Collector, fault: str, error: str, stage: str
) -> None:
    talk = stand.talk()
    stand.sim.post("/sim/faults", json={"fault": fault})
    assert talk.chat([user("canary")]).status_code >= 500
    [span] = spans_of(collector, talk, 1)
    assert span.attributes["error.type"] == error
    assert span.error
    assert {child.name: child.error for child in collector.stages(span) if child.error} == {stage: span.error}
    assert "canary" not in repr(span)


def test_content_is_sent_where_the_conventions_variable_says_so(
    sglang: SimulatorProcess, collector: Collector, places: Places
) -> None:
    given = environment(
        collector.base_url,
        **{CONTENT: "SPAN_ONLY", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.0"},
    )
    with serving(places.new("content"), sglang.base_url, environment=given) as stand:
        talk = stand.talk()
        talk.say("Look", sim={"calls": [{"name": "look", "arguments": '{"at": 7}'}], "call_ids": ["call_7"]})
        talk.add({"role": "tool", "tool_call_id": "call_7", "content": "nothing"})
        first, second = spans_of(collector, talk, 2)
    assert json.loads(first.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "Look"}]}
    ]
    [sampled] = json.loads(first.attributes["gen_ai.output.messages"])
    assert sampled["role"] == "assistant"
    assert sampled["finish_reason"] == "tool_calls"
    assert {"type": "tool_call", "id": "call_7", "name": "look", "arguments": {"at": 7}} in sampled["parts"]
    assert json.loads(second.attributes["gen_ai.input.messages"]) == [
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_7", "response": "nothing"}]}
    ]


def test_a_collector_that_is_down_costs_spans_and_no_turn(sglang: SimulatorProcess, places: Places) -> None:
    port = reserve_port(places)
    given = environment(
        f"http://127.0.0.1:{port}",
        OTEL_BSP_MAX_QUEUE_SIZE="2",
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
        TURNLOG_LOG_FORMAT="json",
    )
    with serving(places.new("down"), sglang.base_url, environment=given) as stand:
        talk = stand.talk()
        for number in range(8):
            talk.say(f"Turn {number}")
        until(lambda: counted(stand, "refused") + counted(stand, "queue_full") == 8 * 6)
        with Collector(port) as collector:
            talk.say("It is back")
            spans_of(collector, talk, 1)
            until(lambda: counted(stand, "sent") == 6)
            # What is killed is lost with its queue, and the log has the turns: the trace goes on after the restart.
            stand.server.kill()
            stand.server.start()
            talk.say("After the restart")
            before, after = spans_of(collector, talk, 2)
            assert (after.trace, after.links) == (before.trace, {"parent_turn": before.id})
        assert len(talk.committed()) == 10
        lines = [line for line in stand.server.log_path.read_text().splitlines() if '"turnlog.otel"' in line]
        assert len([line for line in lines if "does not accept spans" in line]) == 1


def counted(stand: Stand, outcome: str) -> float:
    line = f'turnlog_otel_spans_total{{outcome="{outcome}"}} '
    [value] = [text for text in stand.http.get("/metrics").text.splitlines() if text.startswith(line)]
    return float(value.removeprefix(line))


def test_where_it_is_off_nothing_is_imported() -> None:
    """Without an endpoint, disabled, or over a protocol that there is not."""
    code = """
import os, sys
from types import SimpleNamespace
from app import main
from app.features import otel
there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
for given in ({}, there | {"OTEL_SDK_DISABLED": "true"}, there | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}):
    os.environ |= given
    assert otel.add_to(SimpleNamespace()) is None
    for name in given:
        del os.environ[name]
loaded = ("opentelemetry.sdk", "app.features.search.")  # FastAPI imports the API
assert not [name for name in sys.modules if name.startswith(loaded)]
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TURNLOG_"))}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "over grpc" in done.stderr


def test_other_sessions_are_linked(stand: Stand, collector: Collector) -> None:
    talk = stand.talk()
    talk.say("Hello")
    [forked] = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    copy = stand.known(forked["session_id"])
    copy.messages = list(talk.messages)
    copy.say("another way")
    [origin] = spans_of(collector, talk, 1)
    [span] = spans_of(collector, copy, 1)
    assert span.links == {"parent_turn": origin.id}
    assert span.trace == trace_of(copy.id) != origin.trace
    child = stand.talk(parent_session_id=talk.id)
    child.say("a part of it")
    stand.http.delete(f"/sessions/{talk.id}")
    until(lambda: len([span for span in collector.spans if span.links.keys() == {"parent_session"}]) == 1)
