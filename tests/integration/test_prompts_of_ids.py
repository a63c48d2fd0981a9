"""vLLM's `/inference/v1/generate` as an upstream of every turn whose prompt is ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.routing import EXPERTS, MASK, Recorded, recorded, sets_of
from integration.stand import Stand, engine_requests, user
from integration.test_token_routes import SGLANG, VLLM, Client
from ops.simulator.process import SimulatorProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "return_routed_experts": True, "return_sampling_mask": True}


def engine_of(*arguments: str) -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "14", "--dialect", "vllm", "--enable-scale-out", *arguments) as made:
        yield made


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatorProcess]:
    yield from engine_of("--sampling-defaults", "model")


@pytest.fixture(scope="module")
def made(engine: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Recorded]:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_REPLAY": f"{EXPERTS},{MASK}"}
    with recorded(places.new("ids"), engine.base_url, environment) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(made: Recorded) -> None:
    assert made.stand.sim.post("/sim/reset").status_code == 200


def asked_of(stand: Stand, path: str = VLLM) -> list[dict[str, Any]]:
    """What turns asked the engine on this route."""
    bodies = [one["body"] for one in engine_requests(stand.sim, path, None)]
    return [body for body in bodies if body.get("parse_context") != {} and "This message asks" not in json.dumps(body)]


@pytest.mark.parametrize("protocol", ["chat", "completions", VLLM, SGLANG])
def test_a_row_is_what_the_engine_sampled_element_by_element(made: Recorded, protocol: str) -> None:
    stand = made.stand
    client = Client(stand, protocol)
    versions = {"weight_versions": ["7", "8"], "completion_tokens": 12, "experts": {"unasked": True}}
    if protocol == "chat":
        client.talk.say("Hello", sim={**versions, "reasoning": True}, **ASKED)
    elif protocol == "completions":
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "sim": versions, **ASKED}
        assert stand.http.post(client.talk.path + COMPLETIONS, json=body).status_code == 200
    else:
        client.send([5, 6, 7], sim=versions, return_sampling_mask=True, return_routed_experts=True)
    [body] = asked_of(stand)
    [choice] = json.loads(made.sent)["choices"]
    [row] = client.talk.rows(replay="true")
    sampled = [place for place, mask in enumerate(row["loss_mask"]) if mask]
    assert row["tokens"][: sampled[0]] == body["token_ids"]
    assert [row["tokens"][place] for place in sampled] == choice["token_ids"]
    assert [row["logprobs"][place] for place in sampled] == [one["logprob"] for one in choice["logprobs"]["content"]]
    assert [row["weight_versions"][place] for place in sampled] == [
        int(span["version"]) for span in choice["weight_versions"] for _ in range(span["start"], span["end"])
    ]
    assert {span["version"] for span in choice["weight_versions"]} == {"7", "8"}
    assert sets_of(row)[sampled[0] - 1 :] == choice["sampling_mask"]
    assert row[EXPERTS] is not None
    assert asked_of(stand, CHAT) == asked_of(stand, COMPLETIONS) == []


def test_the_engine_parses_the_message(made: Recorded) -> None:
    """Calls, reasoning, and the next turn behind the stored ids."""
    talk = made.stand.talk()
    call = {"name": "weather", "arguments": '{"city": "Bergen"}'}
    reply = talk.say("Weather?", tools=[WEATHER], sim={"calls": [call], "reasoning": True}).json()
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == call
    assert choice["message"]["reasoning_content"]
    talk.add(
        {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "Rain"}, tools=[WEATHER]
    )
    first, second = asked_of(made.stand)
    assert second["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert [body["parse_context"]["history_tool_call_cnt"] for body in (first, second)] == [0, 1]
    assert first["parse_context"]["tools"] == [WEATHER]
    assert first["sampling_params"]["skip_special_tokens"] is False
    [row] = talk.rows()
    assert row["tokens"][: len(second["token_ids"])] == second["token_ids"]


def test_what_a_request_does_not_name_is_what_its_route_takes(made: Recorded) -> None:
    """A chat and a completion take the model's own; a token route's client gets that route's."""
    chat, completion, tokens = made.stand.talk(), made.stand.talk(), Client(made.stand, VLLM)
    chat.say("Hello", top_p=0.5, stop_token_ids=[5])
    made.stand.http.post(completion.path + COMPLETIONS, json={"prompt": [5, 6], "temperature": 0})
    tokens.send([5, 6], sampling_params={})
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    of_chat, of_completion, of_tokens = (body["sampling_params"] for body in asked_of(made.stand))
    assert of_chat == {**own, "top_p": 0.5, "stop_token_ids": [5, 7], "logprobs": 0}
    assert of_completion == {**own, "temperature": 0, "stop_token_ids": [7], "max_tokens": 16, "logprobs": 0}
    assert of_tokens == {"logprobs": 0}


def test_what_only_a_chat_translates_stays_a_chat(made: Recorded) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    wishes: tuple[dict[str, Any], ...] = (
        *({"tools": [WEATHER], "tool_choice": "required"}, {"tools": [strict]}, {"logit_bias": {"5": 1}}),
        *({"response_format": {"type": "json_object"}}, {"logprobs": True, "top_logprobs": 2}),
    )
    for number, fields in enumerate(wishes, 1):
        made.stand.talk().say("Hello", **fields)
        *_, body = asked = asked_of(made.stand, CHAT)
        assert (len(asked), bool(body["kv_transfer_params"]["prompt_token_ids"])) == (number, True)
    assert asked_of(made.stand) == []


def test_an_engine_that_lost_the_route_unseen_is_asked_as_before(tokenizer: str, places: Places) -> None:
    for engine in engine_of():
        with recorded(places.new("ids"), engine.base_url, {"TURNLOG_TOKENIZER": tokenizer}) as found:
            talk = found.stand.talk()
            talk.say("One")
            assert found.stand.sim.post("/sim/behaviour", json={"scale_out": False}).status_code == 200
            talk.say("Two")
            talk.say("Three")
            assert len(asked_of(found.stand, CHAT)) == 2
            [row] = talk.rows()
            assert row["turns"][-1]["turn"] == 3


def test_a_request_that_is_forbidden_is_asked_twice(made: Recorded) -> None:
    """A firewall before the engine may refuse one request, where the engine has the route."""
    talk = made.stand.talk()
    assert talk.chat([user("Hello")], sim={"fault": "status_403"}).status_code == 403
    assert len(asked_of(made.stand)) == 2
    assert talk.committed() == []
