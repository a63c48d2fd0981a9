"""What must not get out: a word that is in every secret, prompt and reply is looked for where it has no business."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from integration.guarded import ADMIN, ENVIRONMENT, Client, Guarded, bearer, guarded_serving
from integration.places import Places
from integration.stand import user
from ops.simulator.faults import FAULTS
from ops.simulator.process import SimulatorProcess

CANARY = "canary"
"""In every secret of `guarded.ENVIRONMENT` as well."""

VENDOR_KEY = "canary-key-of-a-vendor"

FAULTS_OF_VENDORS = ("status_500", "status_429", "not_json", "error_200", "redirect", "reset", "message_null")

SLOW = frozenset({"never", "drip"})


@pytest.fixture(scope="module")
def vendor() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--dialect", "openai", "--api-key", VENDOR_KEY) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def guarded(sglang: SimulatorProcess, vendor: SimulatorProcess, places: Places) -> Iterator[Guarded]:
    """Replies are judged in worker processes, and engines have little time."""
    url = vendor.base_url
    upstreams = {"right": {"url": url, "key_env": "VENDOR_KEY"}, "wrong": {"url": url, "key": "canary-wrong-key"}}
    environment = {
        "TURNLOG_TEXT_UPSTREAMS": json.dumps(upstreams),
        "VENDOR_KEY": VENDOR_KEY,
        "TURNLOG_INLINE_MAX_BYTES": "0",
        "TURNLOG_UPSTREAM_TIMEOUT_S": "5",
        "TURNLOG_MAX_REQUEST_BYTES": "20000",
        "TURNLOG_LOG_LEVEL": "debug",
        "TURNLOG_WORKERS": "1",
    }
    with guarded_serving(places.new("leaks"), sglang.base_url, environment=environment) as made:
        yield made


def said(session: Client, text: str = "a canary asks", **fields: Any) -> httpx.Response:
    body = {"model": "simulator", "messages": [user(text)], "sim": {"text": "a canary answers"}, **fields}
    return session.ask("POST", session.chat_path, json=body)


def bad_requests(session: Client) -> Iterator[httpx.Response]:
    """Each holds the word where something is wrong."""
    good = [user("a canary asks")]
    answer = {"role": "assistant", "content": "a canary that was never there"}
    bodies: list[dict[str, Any]] = [
        {"messages": "canary"},
        {"messages": []},
        {"messages": ["canary"]},
        {"messages": [{"role": "user", "content": {"canary": 1}}]},
        {"messages": good, "n": "canary"},
        {"messages": good, "stream": "canary"},
        {"messages": good, "input_ids": ["canary"]},
        {"messages": good, "tools": "canary"},
        {"messages": [*good, answer, user("canary")]},
        {"messages": [*good, answer, *good, answer, *good]},
        {"messages": good, "nvext": {"session_control": {"session_id": "canary's/own"}}},
        {"messages": good, "nvext": {"session_control": {"canary": 1}}},
        {"messages": good, "deep": nested("canary")},
        {"messages": [user("canary" * 5000)]},
    ]
    for body in bodies:
        yield session.ask("POST", session.chat_path, json=body)
    for raw in (
        b'{"messages": [canary',
        b'{"canary": \xff\xfe}',
        b'"canary"',
        b"canary",
        b'{"messages": ["canary" 1]}',
    ):
        yield session.ask("POST", session.chat_path, content=raw)
        yield session.ask("PUT", f"{session.path}/reward", content=raw)
        yield session.ask("POST", f"{session.path}/samples", content=raw)


def nested(value: object) -> object:
    for _ in range(150):
        value = [value]
    return value


def refusals(guarded: Guarded, session: Client) -> Iterator[httpx.Response]:
    """Every fault of an engine, everything that is wrong with a request, and every kind of token that is none."""
    yield from bad_requests(session)
    for fault in sorted(FAULTS.keys() - SLOW):
        one = guarded.client()
        for stream in (False, True):
            yield said(one, sim={"text": "a canary answers", "fault": fault}, stream=stream)
    for upstream in ("wrong", "right"):
        one = guarded.client(capture="text", upstream=upstream, model="canary")
        for fault in FAULTS_OF_VENDORS:
            for stream in (False, True):
                yield said(one, sim={"text": f"the canary's {VENDOR_KEY}", "fault": fault}, stream=stream)
    yield guarded.admin.post("/sessions", json={"capture": "text", "upstream": "a canary"})
    for headers in ({}, bearer("canary-of-a-guess"), bearer(session.token + "x"), {"cookie": "turnlog_ui=canary"}):
        yield guarded.stranger.get("/sessions", headers=headers)
    for token in ("canary-of-a-guess", ADMIN + "x", ["canary"]):
        yield guarded.stranger.post("/ui/sign-in", json={"token": token})
    yield guarded.stranger.post("/ui/sign-in", content=b'{"token": canary')
    yield session.ask("GET", "/export")
    yield guarded.admin.post("/sessions", json={"session_id": session.id, "metadata": {"what": "canary"}})
    yield guarded.admin.post("/sessions", json={"rollback_window": "canary"})


def looked_at(guarded: Guarded, session: Client) -> Iterator[httpx.Response]:
    """What an operator and the session's own holder see besides content."""
    for path in (
        "/health",
        "/ready",
        "/metrics",
        "/engines",
        "/sessions",
        "/fleet",
        "/openapi.json",
        "/ui/api/overview",
    ):
        yield guarded.admin.get(path)
    yield session.ask("GET", f"{session.path}/events")


@pytest.mark.long
@pytest.mark.threat("content or secret in logs, errors, events, metrics")
def test_what_is_secret_is_nowhere(guarded: Guarded) -> None:
    session = guarded.client(metadata={"what": "a canary's metadata"})
    assert said(session).status_code == 200
    assert guarded.stranger.post("/ui/sign-in", json={"token": ADMIN}).status_code == 200
    refused = [reply for reply in refusals(guarded, session) if reply.status_code != 200]
    assert len(refused) > 80
    texts = guarded.client(capture="text", upstream="right", model="large")
    answer = said(texts, sim={"text": f"mine is {VENDOR_KEY}"})
    assert (answer.status_code, "mine is (hidden)" in answer.text) == (200, True)
    for seen in (answer.text, guarded.events(texts.id), guarded.admin.get("/export?format=messages").text):
        assert VENDOR_KEY not in seen
    shown = list(looked_at(guarded, session))
    assert {reply.status_code for reply in shown} == {200}
    for reply in [*refused, *shown]:
        about = f"{reply.request.method} {reply.request.url.path}: {reply.status_code}"
        assert CANARY not in reply.text, about
        assert CANARY not in str(reply.headers), about
        assert session.token.rpartition(".")[2] not in reply.text, about
    metrics = guarded.admin.get("/metrics").text
    assert "turnlog_" in metrics
    assert session.id not in metrics
    guarded.stand.server.stop()
    log = guarded.stand.server.log_path.read_text()
    assert "sign-in refused" in log
    assert session.id in log
    for word in (CANARY, "tls.", *ENVIRONMENT.values()):
        assert word not in log, word
