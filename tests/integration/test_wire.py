"""What passes through unchanged, and what must not pass: bytes, headers, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from helpers.streams import assembled, calls_of

from app.upstream.headers import ROUTING
from integration.places import Places
from integration.proxy import RecordingProxy
from integration.stand import WEATHER, Stand, serving, user
from ops.simulator.process import SimulatorProcess

CLIENT_HEADERS = {
    "authorization": "Bearer of-the-client",
    "cookie": "client=1",
    "x-api-key": "of-the-client",
    "x-smg-routing-key": "chosen-by-the-client",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-request-id": "of-the-client",
}


@pytest.fixture(scope="module")
def proxy(sglang: SimulatorProcess) -> Iterator[RecordingProxy]:
    with RecordingProxy(sglang.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def proxied(proxy: RecordingProxy, sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("proxied"), proxy.base_url, engine_url=sglang.base_url) as made:
        yield made


@pytest.fixture(params=[None, "gzip", "deflate", "zstd"])
def encoding(request: pytest.FixtureRequest, proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the proxy compresses replies, though it was asked not to."""
    monkeypatch.setattr(proxy, "encoding", request.param)


@pytest.mark.parametrize("size", [None, 300_000, 3_000_000])
@pytest.mark.usefixtures("encoding")
def test_the_reply_is_the_engines_bytes(proxied: Stand, proxy: RecordingProxy, size: int | None) -> None:
    talk = proxied.talk()
    for number in range(2):
        key = {"idempotency-key": f"k{number}"}
        sent = [*talk.messages, user("Grüße 🌍 \u2028")]
        wish = {"body_bytes": size, "text": 'Ünïcode \\ " 🌍'}
        response = talk.say("Grüße 🌍 \u2028", headers=key, sim=wish)
        assert response.content == proxy.replies[-1]
        assert talk.chat(sent, headers=key, sim=wish).content == response.content
    assert talk.state()["records"][-1]["response"] == json.loads(proxy.replies[-1])


def test_what_the_client_sends_of_itself_is_not_forwarded(proxied: Stand, proxy: RecordingProxy) -> None:
    talk = proxied.talk()
    talk.say("Hello", headers=CLIENT_HEADERS)
    seen = proxy.requests[-1]
    names = [name for name, _ in seen]
    assert not {"authorization", "cookie", "x-api-key"} & set(names)
    values = dict(seen)
    assert {values[name] for name in ROUTING} == {talk.id}
    assert names.count("x-smg-routing-key") == names.count("content-type") == names.count("host") == 1
    assert values["traceparent"] == CLIENT_HEADERS["traceparent"]


def test_the_engines_own_headers_pass_less_hop_by_hop(proxied: Stand) -> None:
    response = proxied.talk().say("Hello")
    names = [name.lower() for name, _ in response.headers.multi_items()]
    for name in ("server", "date", "content-length", "content-type"):
        assert names.count(name) == 1, name
    assert response.headers["server"] != "engine/1"
    assert "1970" not in response.headers["date"]
    assert (response.headers["x-engine-id"], response.headers["x-request-id"]) == ("seven", "of-the-engine")
    assert not {"x-hop", "keep-alive", "proxy-authenticate", "set-cookie", "transfer-encoding"} & set(names)


@pytest.mark.usefixtures("encoding")
def test_an_engines_refusal_passes_with_body_and_retry_after(proxied: Stand, proxy: RecordingProxy) -> None:
    talk = proxied.talk()
    fault = {"fault": "status_429", "retry_after": "17", "message": "slow down"}
    response = talk.chat([user("Hello")], sim={"fault": fault})
    assert response.status_code == 429
    assert response.content == proxy.replies[-1]
    assert response.headers["retry-after"] == "17"
    assert response.headers["x-engine-id"] == "seven"


def events_of(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [part for part in response.text.split("\n\n") if part]


def test_a_stream_is_the_committed_reply(stand: Stand) -> None:
    talk = stand.talk()
    wish = {"tool_calls": True, "reasoning": True}
    sent = [user("What is the weather?")]
    response = talk.chat(sent, tools=[WEATHER], stream=True, stream_options={"include_usage": True}, sim=wish)
    assert response.status_code == 200
    reply = assembled(response.text)
    [record] = talk.state()["records"]
    kept = record["response"]
    message = kept["choices"][0]["message"]
    assert (reply["id"], reply["model"]) == (kept["id"], kept["model"])
    assert reply["usage"]["completion_tokens"] == kept["usage"]["completion_tokens"]
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(choice["message"]) == calls_of(message)
    assert choice["message"]["reasoning_content"] == message["reasoning_content"]
    assert "meta_info" not in response.text
    assert "prompt_token_ids" not in response.text
    assert not stand.engine_requests(talk.id)[-1]["body"].get("stream")
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "Rain"} for c in message["tool_calls"]]
    assert talk.chat([*sent, message, *results], tools=[WEATHER]).status_code == 200
    assert "RolledBack" not in talk.types()


def test_a_slow_stream_is_kept_alive_by_comments(tight: Stand) -> None:
    talk = tight.talk()
    response = talk.chat([user("x")], stream=True, sim={"latency_s": 0.7})
    events = events_of(response)
    comments = [event for event in events if event.startswith(":")]
    assert len(comments) >= 2
    assert events[: len(comments)] == comments
    assert assembled(response.text)["choices"][0]["finish_reason"] == "stop"
    assert len(talk.committed()) == 1


@pytest.mark.parametrize("fault", ["not_json", "status_500"])
def test_an_error_after_a_comment_is_an_event(tight: Stand, fault: str) -> None:
    talk = tight.talk()
    response = talk.chat([user("x")], stream=True, sim={"latency_s": 0.5, "fault": fault})
    assert response.status_code == 200
    [error] = [event for event in events_of(response) if event.startswith("data: {")]
    body = json.loads(error.removeprefix("data: "))
    assert set(body) == {"error"}
    expected = "upstream_invalid" if fault == "not_json" else "simulated failure"
    assert expected in (body["error"]["code"], body["error"]["message"])
    assert talk.committed() == []
    talk.say("x")


def test_the_engine_is_asked_for_what_is_needed_whatever_the_client_wishes(stand: Stand) -> None:
    talk = stand.talk()
    wishes = {"logprobs": False, "top_logprobs": None, "return_meta_info": False, "return_token_ids": False}
    talk.say("Hello", **wishes, stream=False, n=1, temperature=0.25, seed=5, my_field={"deep": [1, None]})
    sent = stand.engine_requests(talk.id)[-1]["body"]
    assert sent["logprobs"] is sent["return_meta_info"] is sent["return_prompt_token_ids"] is True
    assert not sent.get("stream")
    assert (sent["temperature"], sent["seed"], sent["my_field"]) == (0.25, 5, {"deep": [1, None]})
    assert sent["messages"] == [user("Hello")]
