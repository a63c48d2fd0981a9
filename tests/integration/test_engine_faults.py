"""An engine that answers badly commits nothing, blocks nothing, and is told apart from one that refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault.table import Tally
from helpers.answering import Answer, Answering
from helpers.replies import sglang as sglang_reply

from integration.places import Places
from integration.stand import Stand, error_of, held, serving, user
from integration.tito import checked
from ops.simulator.process import SimulatorProcess

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


MIB = 1 << 20
STATUSES = {"status_500": 500, "status_503": 503, "status_429": 429, "status_400": 400}
MALFORMED = {
    "redirect": "answered with a redirect (307)",
    "empty_200": "malformed reply: the body is not valid JSON",
    "null_logprob": "malformed reply: choices[0].",
    "usage_prompt_tokens": "malformed reply: usage.prompt_tokens is",
}
"""A fault of each place that refuses a reply, with the message. Every rule of a reply: unit/test_malformed.py."""


@pytest.fixture(scope="module", params=["auto/sglang", "sglang/sglang", "auto/vllm", "vllm/vllm"])
def dialect(
    request: pytest.FixtureRequest,
    sglang: SimulatorProcess,
    vllm: SimulatorProcess,
    places: Places,
) -> Iterator[tuple[str, Stand]]:
    """The dialect the server was told, and the engine's own; the store must be sound in the end."""
    told, kind = request.param.split("/")
    engine = sglang if kind == "sglang" else vllm
    environment = {"TURNLOG_UPSTREAM_DIALECT": told}
    with checked(places.new("dialect"), engine.base_url, environment=environment) as made:
        yield kind, made


def test_a_session_of_either_dialect_is_recorded_and_exported(dialect: tuple[str, Stand]) -> None:
    kind, stand = dialect
    talk = stand.talk()
    for text in ("One", "Two"):
        reply = talk.say(text).json()
    choice = reply["choices"][0]
    if kind == "sglang":
        prompt, entries = choice["prompt_token_ids"], choice["meta_info"]["output_token_logprobs"]
        output, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    else:
        prompt, output = reply["prompt_token_ids"], choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    [row] = talk.rows()
    assert row["tokens"] == prompt + output
    assert row["logprobs"][-len(output) :] == logprobs
    assert row["provenance"]["dialects"] == [kind]
    assert talk.state()["metadata"]["accumulated_token_ids"] == prompt + output


@pytest.mark.fault(6, "an engine's reply is malformed in a named way")
@pytest.mark.parametrize(("fault", "message"), MALFORMED.items())
def test_a_malformed_reply_is_502_and_the_next_turn_works(
    dialect: tuple[str, Stand], fault: str, message: str, tally: Tally
) -> None:
    _, stand = dialect
    talk = stand.talk()
    talk.say("Hello")
    before = talk.state()["records"]
    response = talk.chat([*talk.messages, user("Again")], sim={"fault": fault})
    assert error_of(response) == (502, "upstream_invalid")
    assert message in response.json()["error"]["message"]
    assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert talk.state()["records"] == before
    talk.say("Again")
    tally.tried += 1
    tally.acknowledged += 2
    tally.lost += 2 - len(talk.committed())
    [row] = talk.rows()
    assert len(row["turns"]) == 2


@pytest.mark.parametrize(("fault", "status"), STATUSES.items())
def test_an_engines_own_error_passes_and_commits_nothing(stand: Stand, fault: str, status: int) -> None:
    talk = stand.talk()
    response = talk.chat([user("Hello")], sim={"fault": {"fault": fault, "message": "as the engine said"}})
    assert response.status_code == status
    assert response.json()["message"] == "as the engine said"
    assert talk.types()[-1] == "TurnRejected"
    talk.say("Hello")


def test_an_engine_that_never_answers_is_504(tight: Stand) -> None:
    talks = {tight.talk(): sim for sim in ({"fault": "never"}, {"latency_s": 30})}
    turns = [tight.meanwhile(talk.chat, [user("x")], sim=sim) for talk, sim in talks.items()]
    assert [error_of(turn.result()) for turn in turns] == [(504, "upstream_timeout")] * 2
    for talk in talks:
        assert talk.committed() == []
        talk.say("x")


def test_bodies_that_are_too_large_are_refused_both_ways(tight: Stand) -> None:
    talk = tight.talk()
    before = talk.generations()
    assert error_of(talk.chat([user("x" * 20_000)])) == (413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        yield b'{"messages": ["'
        for _ in range(30):
            yield b"x" * 1000

    assert error_of(tight.http.post(talk.chat_path, content=chunks())) == (413, "request_too_large")
    assert talk.generations() == before
    assert error_of(talk.chat([user("x")], sim={"body_bytes": 70_000})) == (502, "upstream_invalid")
    dripped = {"fault": {"fault": "drip", "delay_s": 0.0}, "body_bytes": 70_000}
    assert error_of(talk.chat([user("x")], sim=dripped)) == (502, "upstream_invalid")
    talk.say("x", sim={"body_bytes": 50_000})


def test_past_the_bytes_in_flight_a_request_is_told_to_come_again(sglang: SimulatorProcess, places: Places) -> None:
    """Replies count among them."""
    words = "word " * 30_000
    with serving(places.new("own"), sglang.base_url, environment={"TURNLOG_INFLIGHT_BYTES": "400000"}) as crowded:
        first, second, talk = crowded.talk(), crowded.talk(), crowded.talk()
        with held(crowded.sim):
            call = crowded.meanwhile(first.chat, [user(words)])
            crowded.until_generating(first)
            response = second.chat([user(words + words)])
        assert error_of(response) == (503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert call.result().status_code == 200
        assert second.chat([user(words)]).status_code == 200
        assert error_of(talk.chat([user("x")], sim={"body_bytes": 500_000})) == (503, "overloaded")
        assert talk.types() == ["SessionCreated", "TurnOpened", "TurnRejected"]
        for _ in range(3):
            talk.say("x", sim={"body_bytes": 300_000})


def test_without_a_living_engine_a_turn_is_refused(places: Places) -> None:
    with serving(places.new("dead"), "http://127.0.0.1:9") as stand:
        talk = stand.talk()
        assert error_of(talk.chat([user("x")])) == (502, "upstream_unreachable")
        assert stand.http.get("/ready").status_code == 503
        assert stand.http.get("/health").status_code == 200
    with serving(places.new("none")) as stand:
        talk = stand.talk()
        assert error_of(talk.chat([user("x")])) == (503, "no_upstream")
        assert talk.types() == ["SessionCreated"]
        assert stand.http.get("/ready").status_code == 503


def many_calls(count: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "run", "arguments": '{"command":"ls"}'}}
    return {"content": None, "tool_calls": [{"id": f"call_{number}", **call} for number in range(count)]}


MESSAGES: dict[int, list[tuple[dict[str, Any], int]]] = {
    64 * MIB: [(many_calls(2_000), 200), (many_calls(20_000), 502)],
    MIB: [({"content": "x" * (MIB // 2)}, 200), ({"content": "x" * MIB}, 502), ({"content": "[," * (MIB // 4)}, 200)],
}
"""By the largest request that is taken: messages of replies, and what becomes of them. The last looks like values."""


@pytest.mark.parametrize("largest", MESSAGES)
def test_what_could_not_be_sent_back_is_not_committed(tmp_path: Path, largest: int) -> None:
    reply = sglang_reply()
    with (
        Answering(lambda asked: Answer(json.dumps(reply).encode())) as engine,
        serving(tmp_path, engine.base_url, environment={"TURNLOG_MAX_REQUEST_BYTES": str(largest)}) as stand,
    ):
        for message, status in MESSAGES[largest]:
            reply["choices"][0]["message"] |= message
            talk = stand.talk()
            response = talk.chat([user("Hello")])
            assert response.status_code == status, response.text[:200]
            if status == 502:
                assert error_of(response) == (502, "upstream_invalid")
                assert talk.types()[-1] == "TurnRejected"
            else:
                talk.messages = [user("Hello"), response.json()["choices"][0]["message"]]
                talk.say("More")


@pytest.mark.parametrize("fault", ["usage_prompt_tokens", "meta_prompt_tokens"])
def test_the_prompts_tokens_are_not_counted_where_it_carries_an_image(dialect: tuple[str, Stand], fault: str) -> None:
    _, stand = dialect
    talk = stand.talk()
    talk.add({"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE]}, sim={"fault": fault})
    talk.say("And again", sim={"fault": fault})
    assert len(talk.committed()) == 2
    words = stand.talk()
    text = {"role": "user", "content": [{"type": "text", "text": 'Look at the "image_url"'}]}
    assert error_of(words.chat([text], sim={"fault": fault})) == (502, "upstream_invalid")
