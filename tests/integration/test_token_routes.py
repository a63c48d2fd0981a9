"""Clients that send token ids and take token ids: vLLM's `/inference/v1/generate`, SGLang's `/generate`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.routing import BOTH, EXPERTS, recorded
from integration.stand import Stand, Talk, error_of
from ops.simulator.process import SimulatorProcess

VLLM, SGLANG = "/inference/v1/generate", "/generate"


class Client:
    """One session of a client that speaks ids. `ids` are those of its newest prompt and reply."""

    def __init__(self, stand: Stand, route: str, **create: Any) -> None:
        self.stand, self.route = stand, route
        self.talk: Talk = stand.talk(**create)
        self.ids: list[int] = []

    def body(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        if self.route == VLLM:
            return {"token_ids": ids, "sampling_params": {"max_tokens": 8}, **fields}
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True, **fields}

    def send(self, ids: list[int], method: str = "POST", **fields: Any) -> httpx.Response:
        return self.stand.http.request(method, self.talk.path + self.route, json=self.body(ids, **fields))

    def turn(self, *new: int, **fields: Any) -> dict[str, Any]:
        """A turn that must succeed, after all that was sampled before."""
        prompt = [*self.ids, *new]
        response = self.send(prompt, **fields)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        self.ids = prompt + sampled(reply)[0]
        return reply


def sampled(reply: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The sampled ids and their logprobs, which each wire tells twice."""
    if "choices" in reply:
        [choice] = reply["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        return choice["token_ids"], [entry["logprob"] for entry in content]
    pairs = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == reply["output_ids"]
    return reply["output_ids"], [logprob for logprob, _, _ in pairs]


@pytest.fixture(params=[VLLM, SGLANG])
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_turns_of_ids_are_one_row(every: Stand, route: str) -> None:
    client = Client(every, route)
    replies = [client.turn(*new) for new in ([5, 6, 7], [8], [9, 10])]
    [row] = client.talk.rows()
    assert row["tokens"] == client.ids
    told = [sampled(reply) for reply in replies]
    assert [token for token, mask in zip(row["tokens"], row["loss_mask"], strict=True) if mask] == [
        token for ids, _ in told for token in ids
    ]
    assert [lp for lp, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask] == [
        logprob for _, logprobs in told for logprob in logprobs
    ]
    engine = client.talk.events()
    assert [event["type"] for event in engine].count("TurnCommitted") == 3


def test_what_a_reply_says_beside_its_tokens(every: Stand) -> None:
    reply = Client(every, VLLM).turn(5, 6, 7, request_id="mine", return_token_ids=True, model="simulator")
    [choice] = reply["choices"]
    assert (reply["request_id"], reply["output_mode"], reply["prompt_token_ids"]) == ("mine", "tokens", [5, 6, 7])
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) == 8
    assert Client(every, VLLM).turn(5)["prompt_token_ids"] is None
    spelled = Client(every, VLLM).send([5], output_mode="text").json()["choices"][0]
    assert "".join(entry["token"] for entry in spelled["logprobs"]["content"]) == spelled["text"]
    reply = Client(every, SGLANG).turn(5, 6, 7, rid="mine")
    assert isinstance(reply["text"], str)
    meta = reply["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    plain = Client(every, SGLANG).send([5], return_logprob=False).json()
    assert ("output_token_logprobs" in plain["meta_info"], len(plain["output_ids"])) == (False, 8)


def test_a_limit_that_is_absent(every: Stand) -> None:
    """vLLM's route generates to the model's end, SGLang's at most 128 tokens: a completion's own default is 16, and
    null is none that engines' completions take."""
    context = every.sim.get("/v1/models").json()["data"][0]["max_model_len"]
    for route, sent in ((VLLM, context - 2), (SGLANG, 128)):
        client = Client(every, route)
        reply = client.turn(5, 6, sampling_params={"temperature": 0.5}, sim={"completion_tokens": 20})
        assert len(sampled(reply)[0]) == 20
        [asked] = every.engine_requests(client.talk.id, "/v1/completions")
        assert (asked["body"]["max_tokens"], asked["body"]["temperature"]) == (sent, 0.5)


def test_a_tree_branches_by_its_prefix_of_ids(stand: Stand, route: str) -> None:
    client = Client(stand, route, history="tree")
    client.turn(5, 6)
    first = client.ids
    client.turn(7)
    client.ids = first
    client.turn(8)
    client.ids = [*first[:-1]]
    client.turn(99)  # it cuts sampled tokens
    tree = client.talk.tree()
    assert [(node["parent"], node["branch"]) for node in tree["turns"]] == [(0, 0), (1, 0), (1, 1), (0, 2)]


def test_a_key_in_the_body_is_a_retrys(stand: Stand, route: str) -> None:
    key = "request_id" if route == VLLM else "rid"
    client = Client(stand, route)
    first = client.send([5, 6], **{key: "one"})
    again = client.send([5, 6], **{key: "one"})
    assert (again.headers["x-turnlog-replayed"], again.content) == ("true", first.content)
    other = client.send([5, 7], **{key: "one"})
    assert error_of(other) == (422, "idempotency_mismatch")
    assert len(client.talk.committed()) == 1
    assert error_of(client.send([5, 6], **{key: 7})) == (400, "invalid_request")


def test_put_and_the_demo_servers_variant(every: Stand) -> None:
    client = Client(every, SGLANG)
    assert client.send([5, 6], method="PUT").status_code == 200
    legacy = Client(every, SGLANG)
    body = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 4, "n": 1, "logprobs": 0}
    response = every.http.post(legacy.talk.path + SGLANG, json=body)
    reply = response.json()
    assert (len(reply["text"]), reply["finish_reasons"]) == (1, ["length"])
    [row] = legacy.talk.rows()
    told = [next(iter(pair.items())) for [pair] in reply["logprobs"][0]]
    assert row["tokens"] == [5, 6, *(int(token) for token, _ in told)]
    assert row["logprobs"][2:] == [logprob for _, logprob in told]
    assert every.http.put(client.talk.path + VLLM, json={}).status_code == 405


REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (VLLM, "unsupported", {"sampling_params": {"n": 2}}),
    *(
        (VLLM, "unsupported", one)
        for one in ({"features": {"images": [1]}}, {"kv_transfer_params": {"do_remote": True}})
    ),
    (VLLM, "unsupported", {"sampling_params": {"bad_words": ["x"]}}),
    *((VLLM, "invalid_request", one) for one in ({"token_ids": []}, {"token_ids": [[5]]}, {"output_mode": "message"})),
    (VLLM, "invalid_request", {"sampling_params": [1]}),
    (SGLANG, "unsupported", {"sampling_params": {"n": 2}}),
    *((SGLANG, "unsupported", one) for one in ({"image_data": ["x"]}, {"session_params": {"id": "x"}})),
    (SGLANG, "unsupported", {"text": "Hi", "input_ids": None}),
    (SGLANG, "invalid_request", {"input_ids": [[5, 6], [7]]}),
    (SGLANG, "invalid_request", {"prompt": {"prompt": "Hi"}}),
)


def test_what_is_refused(stand: Stand) -> None:
    for route, code, fields in REFUSED:
        client = Client(stand, route)
        response, [name, *_] = client.send([5, 6], **fields), fields
        inner = next(iter(fields[name])) if name == "sampling_params" and isinstance(fields[name], dict) else name
        assert error_of(response) == (400, code), fields
        assert inner in response.json()["error"]["message"]
        assert client.talk.committed() == []


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_experts_are_the_engines_own(request: pytest.FixtureRequest, name: str, places: Places) -> None:
    """vLLM's clients read them in any reply that has them, SGLang's ask."""
    engine: SimulatorProcess = request.getfixturevalue(name)
    with recorded(places.new("experts"), engine.base_url, {**BOTH, "TURNLOG_CLIENT_REPLY": "asked"}) as made:
        told = Client(made.stand, VLLM).turn(5, 6)["choices"][0][EXPERTS]
        assert json.dumps(told).encode() in made.sent
        client = Client(made.stand, SGLANG)
        asked = client.send([5, 6], rid="one", return_routed_experts=True)
        assert json.dumps(asked.json()["meta_info"][EXPERTS]).encode() in made.sent
        assert client.send([5, 6], rid="one", return_routed_experts=True).content == asked.content
        meta = Client(made.stand, SGLANG).turn(5, 6)["meta_info"]
        assert EXPERTS not in meta


def test_what_an_engine_reads_of_a_changes_query_reaches_it(vllm: SimulatorProcess, places: Places) -> None:
    with recorded(places.new("query"), vllm.base_url, {}) as made:
        response = made.stand.http.post("/reset_prefix_cache?reset_external=true&more=1")
        assert response.status_code == 200, response.text
        assert "/reset_prefix_cache?reset_external=true" in made.proxy.paths
