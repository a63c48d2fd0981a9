"""Turns of SGLang that are staged: `/generate` with ids in, and a reply that is its chat's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.looking import value

from integration.interrupting import ASKED, as_said, interrupted
from integration.places import Places
from integration.stand import WEATHER, Stand, engine_requests, serving
from integration.tito import checked, output_of
from ops.simulator.process import SimulatorProcess

CALLS = [{"name": "get_weather", "arguments": '{"city": "Zürich"}'}]
CHAT, NATIVE = "/v1/chat/completions", "/generate"


@pytest.fixture(scope="module")
def streaming() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "11", "--incremental-streaming-output") as engine:
        yield engine


@pytest.fixture(scope="module")
def staging(streaming: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Stand]:
    environment = {
        "TURNLOG_TOKENIZER": tokenizer,
        "TURNLOG_UPSTREAM_DIALECT": "sglang",
        "TURNLOG_STAGE_TOKENS_S": "0.01",
    }
    with checked(places.new("staging"), streaming.base_url, environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def unstaged(streaming: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Stand]:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_UPSTREAM_DIALECT": "sglang"}
    with serving(places.new("unstaged"), streaming.base_url, environment=environment) as made:
        yield made


def asked(stand: Stand) -> list[str]:
    """The routes of the generations that the engine was asked for."""
    return [one["path"] for one in engine_requests(stand.sim, None, None) if one["path"] in (CHAT, NATIVE)]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"sim": {"reasoning": False}}, id="prose"),
        pytest.param({"sim": {"reasoning": True, "completion_tokens": 60}}, id="reasoning"),
        pytest.param({"tools": [WEATHER], "sim": {"calls": CALLS, "text": "So", "reasoning": True}}, id="calls"),
        pytest.param({"max_tokens": 5, "sim": {"reasoning": False}}, id="length"),
        pytest.param({"stop": [" more th"], "sim": {"text": "we have more than that", "chunk_tokens": 1}}, id="stop"),
    ],
)
def test_a_staged_reply_is_the_chats(staging: Stand, unstaged: Stand, body: dict[str, Any]) -> None:
    found = []
    for stand, path in ((unstaged, CHAT), (staging, NATIVE)):
        assert stand.sim.post("/sim/reset").status_code == 200
        talk = stand.talk()
        response = talk.say("Hello there, what do you think?", temperature=0, **body)
        assert asked(stand)[-1] == path
        found.append(as_said(response))
        for token in found[-1]["choices"][0]["logprobs"]["content"]:
            del token["bytes"]  # SGLang's are those of the token's text, the simulator's chat has the token's own.
        talk.say("And then?", temperature=0, **({"tools": body["tools"]} if "tools" in body else {}))
        assert len(talk.rows()) == 1
    chat, native = found
    [one], [other] = chat["choices"], native["choices"]
    assert other["finish_reason"] == one["finish_reason"]
    assert output_of(native) == output_of(chat)
    assert native == chat


@pytest.mark.parametrize(
    "body", [{"logit_bias": {"5": 1}}, {"seed": 7}, {"return_routed_experts": True}, {"top_logprobs": 2}]
)
def test_what_only_the_chat_takes_goes_through_it(staging: Stand, body: dict[str, Any]) -> None:
    talk = staging.talk()
    talk.say("Hello", **body)
    assert asked(staging)[-1] == CHAT


def test_an_engines_own_error_passes_and_leaves_nothing_staged(staging: Stand) -> None:
    """Of a whole reply, and of the rest of one."""
    talk, fault = staging.talk(), {"fault": "status_400"}
    refused = talk.chat([ASKED], sim=fault)
    assert (refused.status_code, asked(staging)[-1], talk.types()[-1]) == (400, NATIVE, "TurnRejected")
    refused = interrupted(staging, talk, [5], meanwhile=lambda _: staging.sim.post("/sim/faults", json=fault))
    assert (refused.status_code, asked(staging)[-2:], talk.types()[-1]) == (400, [NATIVE] * 2, "TurnRejected")
    assert value(staging.url, "SELECT count(*) FROM staged_tokens") == 0


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("at", [[5], [20, 0, 10]])
def test_an_interrupted_one_goes_on_by_the_same_route(staging: Stand, at: list[int], queued: bool) -> None:
    body: dict[str, Any] = {"tools": [WEATHER], "temperature": 0, "sim": {"completion_tokens": 60, "reasoning": True}}
    talk = staging.talk()
    joined = interrupted(staging, talk, at, **{**body, "sim": {**body["sim"], "queued": queued}})
    assert asked(staging)[-len(at) - 1 :] == [NATIVE] * (len(at) + 1)
    assert [part[1:] for part in talk.committed()[0]["parts"]][-1][-1] == len(output_of(joined.json()))
    assert staging.sim.post("/sim/reset").status_code == 200
    whole = staging.talk().chat([ASKED], **body)
    assert as_said(joined) == as_said(whole)


@pytest.mark.parametrize(
    ("arguments", "named", "path"),
    [
        pytest.param((), {"temperature": 1, "top_p": 1, "top_k": 5}, CHAT, id="its stream repeats what it has sent"),
        pytest.param(("--incremental-streaming-output", "--sampling-defaults", "model"), {}, CHAT, id="own defaults"),
        pytest.param(
            ("--incremental-streaming-output", "--sampling-defaults", "model"),
            {"temperature": 1, "top_p": 1, "top_k": 5, "min_p": 0, "repetition_penalty": 1},
            NATIVE,
            id="all are named",
        ),
    ],
)
def test_an_engine_whose_chat_would_differ_is_not_staged(
    arguments: tuple[str, ...], named: dict[str, Any], path: str, tokenizer: str, places: Places
) -> None:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_UPSTREAM_DIALECT": "sglang", "TURNLOG_STAGE_TOKENS_S": "1"}
    with (
        SimulatorProcess(*arguments) as engine,
        serving(places.new("unfit"), engine.base_url, environment=environment) as stand,
    ):
        stand.talk().say("Hello", **named)
        assert asked(stand)[-1] == path
