"""Live streams: deltas come while the engine generates, and what a client may take for final waits for the commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.lib.streaming import MessageStreamEvent
from helpers.streams import is_final

from integration.places import Places
from integration.proxy import RecordingProxy
from integration.stand import SPOKEN, Message, Stand, Talk, serving, tool_of, until, user
from ops.simulator.process import SimulatorProcess

MODE = "x-turnlog-stream-mode"
PROTOCOLS = tuple(SPOKEN)
KEY = {"idempotency-key": "key"}
SLOW = {"latency_s": 3.0, "reasoning": False, "tool_calls": False}
CALLS = [{"name": "look", "arguments": '{"at": 1e3,  "b":"ü"}'}, {"name": "look", "arguments": "{}"}]


@pytest.fixture(params=["vllm_stand", "stand"])
def live(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A server that has come to know its engine's dialect, and asks it to stream."""
    found: Stand = request.getfixturevalue(request.param)
    found.talk().say("Hello")
    return found


def by_package(talk: Talk, url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """What the official package makes of the stream, and how many deltas of text it saw."""
    base = url + talk.path
    if talk.protocol == "messages":
        with anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0) as client:
            body = talk.body([user("Go")])
            with client.messages.stream(**body, extra_body=fields, extra_headers=KEY) as stream:
                events: list[MessageStreamEvent[None]] = list(stream)
                seen = sum(event.type == "content_block_delta" for event in events)
                return seen, stream.get_final_message().to_dict()
    with openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0) as client:
        body = talk.body([user("Go")])
        if talk.protocol == "responses":
            with client.responses.stream(**body, extra_body=fields, extra_headers=KEY) as stream:
                kinds = [event.type for event in stream]
                found = stream.get_final_response().to_dict()
                return sum(kind.endswith("_text.delta") for kind in kinds), found
        with client.chat.completions.stream(**body, extra_body=fields, extra_headers=KEY) as stream:
            seen = sum(event.type == "chunk" for event in stream)
            return seen, stream.get_final_completion().to_dict()


def plain(value: Any) -> Any:
    """A reply without what only one of its spellings has: nulls, and what the packages add."""
    added = {"parsed", "parsed_arguments", "output_text", "completed_at", "object", "index"}
    added |= {"token_ids", "prompt_token_ids", "weight_versions", "matched_stop", "meta_info"}
    if isinstance(value, dict):
        kept = {name: plain(one) for name, one in value.items() if name not in added}
        return {name: one for name, one in kept.items() if one not in (None, [], {})}
    return [plain(one) for one in value] if isinstance(value, list) else value


SIMS: dict[str, dict[str, Any]] = {
    "reasoning": {"reasoning": True, "tool_calls": False},
    "calls": {"calls": CALLS, "reasoning": True, "text": "So: "},
    "unicode": {"text": "\n\nFüße 👩‍👩‍👧 \u2028 end\n\n", "reasoning": False},
}


@pytest.mark.parametrize("sim", SIMS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_official_packages_assemble_the_committed_reply(live: Stand, protocol: str, sim: str) -> None:
    talk = live.talk(protocol, stream_mode="live", history="tree")
    fields = {"sim": SIMS[sim], "tools": [tool_of(protocol)]}
    seen, streamed = by_package(talk, live.base_url, **fields)
    again = talk.chat([user("Go")], headers=KEY, **fields)
    assert again.headers["x-turnlog-replayed"] == "true"
    assert plain(streamed) == plain(again.json())
    assert seen >= (2 if sim == "reasoning" else 0)
    assert len(talk.committed()) == 1


def streaming(talk: Talk, stand: Stand, **fields: Any) -> Any:
    return stand.http.stream("POST", talk.chat_path, json=talk.body([user("Go")], stream=True, **fields))


def first_delta(response: httpx.Response) -> Iterator[str]:
    """Lines to the first delta of text, and then the others."""
    lines = response.iter_lines()
    for line in lines:
        if "delta" in line and line.startswith("data: "):
            break
    return lines


def test_deltas_come_before_the_commit_and_the_end_after_it(live: Stand) -> None:
    talks = [live.talk(protocol) for protocol in PROTOCOLS]
    with ExitStack() as stack:
        rests = []
        for talk in talks:
            response = stack.enter_context(streaming(talk, live, stream_mode="live", sim=SLOW))
            assert response.headers[MODE] == "live"
            rests.append(first_delta(response))
            assert talk.committed() == []
        for rest in rests:
            assert [line for line in rest if is_final(line)]
    for talk in talks:
        [record] = talk.state()["records"]
        assert record["request"]["stream"] is True
        assert "stream_mode" not in record["request"]
        assert record["response"]["object"] == "chat.completion"
        assert [message["role"] for message in talk.rows()[0]["messages"]] == ["user", "assistant"]


BROKEN = {
    "reset": (200, "upstream_unreachable"),
    "truncated_json": (200, "upstream_unreachable"),
    "missing_logprobs": (200, "upstream_invalid"),
    "missing_meta_info": (200, "upstream_invalid"),
    "nan_logprob": (502, "upstream_invalid"),
    "error_200": (502, "upstream_unreachable"),
    "finish_error": (200, "upstream_unreachable"),
}
"""The status before anything was said, and the reason in the log."""


@pytest.mark.parametrize(("protocol", "fault"), list(zip(cycle(PROTOCOLS), BROKEN, strict=False)))
def test_a_broken_engine_stream_is_never_final(live: Stand, protocol: str, fault: str) -> None:
    talk = live.talk(protocol, stream_mode="live")
    broken = talk.chat([user("Go")], stream=True, sim={"fault": fault, "reasoning": False, "tool_calls": False})
    assert not is_final(broken.text)
    *said, last = [json.loads(line[6:]) for line in broken.text.splitlines() if line.startswith("data: {")] or [{}]
    if broken.status_code == 200:
        assert said
        error = last["error"] if protocol != "responses" else last["response"]["error"]
        assert error["message"]
    end = talk.events()[-1]
    assert (broken.status_code, end["type"], end["reason"]) == (BROKEN[fault][0], "TurnRejected", BROKEN[fault][1])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_closing_the_session_ends_its_live_stream_with_an_error(live: Stand, protocol: str) -> None:
    talk = live.talk(protocol, stream_mode="live")
    with streaming(talk, live, sim={**SLOW, "latency_s": 15.0}) as response:
        rest = first_delta(response)
        assert live.http.delete(talk.path).status_code == 204
        text = "\n".join(rest)
    assert "was closed during the turn" in text
    assert not is_final(text)


def whole(payload: str) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Where a stream comes whole: path, body of the session, fields of the request. `payload` is one that no stream
    has."""
    chat: dict[str, Message | list[Message]] = {"messages": [user("Go")]}
    asked = {"stream_mode": "live"}
    path = SPOKEN["chat"].path
    return {
        "nobody asked": (path, {}, chat),
        "the request does not want it": (path, asked, {**chat, "stream_mode": "whole"}),
        "the turn may be continued": (path, {**asked, "on_abort": "continue"}, chat),
        "a payload is asked for": (path, asked, {**chat, "top_k": 8, payload: True}),
        "completions": ("/v1/completions", asked, {"prompt": "Go"}),
    }


@pytest.mark.parametrize("case", whole(""))
def test_where_it_cannot_be_live_a_stream_is_whole(live: Stand, case: str) -> None:
    path, session, fields = whole("return_sampling_mask")[case]
    talk = live.talk(**session)
    body = {"model": "simulator", "stream": True, **fields}
    response = live.http.post(talk.path + path, json=body)
    assert (response.status_code, response.headers[MODE]) == (200, "whole")
    assert "stream" not in live.engine_requests(talk.id, path)[-1]["body"]
    assert len(talk.committed()) == 1


def test_an_sglang_that_says_nothing_of_ids_in_streams_is_asked_for_a_whole_reply(places: Places) -> None:
    with SimulatorProcess() as engine, serving(places.new("older"), engine.base_url) as older:
        assert older.sim.post("/sim/behaviour", json={"server_info": "missing"}).status_code == 200
        talk = older.talk(stream_mode="live")
        talk.chat([user("Go")])
        response = talk.chat([user("Go")], stream=True)
        assert (response.status_code, response.headers[MODE]) == (200, "whole")
        asked = older.engine_requests(talk.id, SPOKEN["chat"].path)[-1]["body"]
        assert ("stream" in asked, asked["return_meta_info"]) == (False, True)


def test_a_mode_that_is_none_is_refused(live: Stand) -> None:
    talk = live.talk()
    assert talk.chat([user("Go")], stream_mode="soon").status_code == 400
    assert live.http.post("/sessions", json={"stream_mode": "soon"}).status_code == 400
    assert live.talk(stream_mode="live").state()["session"]["stream_mode"] == "live"


def test_a_live_turn_of_sglang_has_its_experts_and_the_version_that_the_engine_names(places: Places) -> None:
    environment = {"TURNLOG_REPLAY": "routed_experts"}
    with (
        SimulatorProcess("--weight-version", "7") as engine,
        serving(places.new("experts"), engine.base_url, environment=environment) as stand,
    ):
        whole_talk, talk = stand.talk(), stand.talk(stream_mode="live")
        whole_talk.chat([user("Go")], temperature=0)
        assert talk.chat([user("Go")], stream=True, temperature=0).headers[MODE] == "live"
        first, second = (of.state()["records"][0] for of in (whole_talk, talk))
        assert "return_meta_info" not in second["request"]
        assert second["request"]["return_output_ids_in_sglext"] is True
        [one_choice], [other_choice] = first["response"]["choices"], second["response"]["choices"]
        assert one_choice["prompt_token_ids"] == other_choice["prompt_token_ids"]
        assert plain(one_choice["message"]) == plain(other_choice["message"])
        [one], [other] = (of.rows(replay="true") for of in (whole_talk, talk))
        assert set(other["weight_versions"]) == {-1, 7}
        for name in ("tokens", "logprobs", "weight_versions", "loss_mask", "routed_experts"):
            assert one[name] == other[name], name
        # The next turn is whole: its parameters are not those that the live one sent.
        talk.chat([user("Go"), other_choice["message"], user("On")], temperature=0)
        assert talk.state()["records"][1]["request"]["return_meta_info"] is True


def test_a_client_that_leaves_does_not_end_its_turn_and_gets_it_whole_later(live: Stand) -> None:
    talks = [live.talk(protocol, stream_mode="live") for protocol in PROTOCOLS]
    for talk in talks:
        with streaming(talk, live, sim=SLOW) as response:
            first_delta(response)
    for talk in talks:
        until(talk.committed)
        again = talk.chat([user("Go")], stream=True, sim=SLOW)
        assert (again.headers["x-turnlog-replayed"], again.headers[MODE]) == ("true", "whole")
        assert is_final(again.text)
        assert len(talk.committed()) == 1


def test_a_client_that_does_not_read_holds_nothing_up(live: Stand) -> None:
    talk = live.talk(stream_mode="live")
    sim = {"completion_tokens": 30_000, "reasoning": False, "tool_calls": False}
    with streaming(talk, live, sim=sim) as response:
        until(talk.committed)
        [message] = [record["response"]["choices"][0]["message"] for record in talk.state()["records"]]
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_a_stream_that_a_proxy_compressed_is_read(vllm: SimulatorProcess, places: Places) -> None:
    environment = {"TURNLOG_UPSTREAM_DIALECT": "vllm"}
    with (
        RecordingProxy(vllm.base_url) as proxy,
        serving(places.new("compressed"), proxy.base_url, engine_url=vllm.base_url, environment=environment) as stand,
    ):
        proxy.encoding = "gzip"
        talk = stand.talk(stream_mode="live")
        seen, streamed = by_package(talk, stand.base_url, sim={"text": "Hello there", "reasoning": False})
        assert seen > 1
        assert streamed["choices"][0]["message"]["content"] == "Hello there"
        assert len(talk.committed()) == 1
