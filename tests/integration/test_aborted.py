"""A generation that an engine ends before its time: continued behind the gate, returned as it is, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.interrupting import (
    ASKED,
    as_said,
    budgets,
    generating,
    interrupted,
    uncut,
)
from integration.places import Places
from integration.stand import WEATHER, Stand, error_of, standing, until
from integration.tito import ids_in, output_of

COMPLETIONS = "/v1/completions"
NINE = {"max_tokens": 16, "sim": {"completion_tokens": 9, "reasoning": False}}


@pytest.fixture(scope="module")
def replaying(places: Places) -> Iterator[Stand]:
    """A server without a tokenizer that continues, and asks for all payloads."""
    environment = {"TURNLOG_REPLAY": "routed_experts,indexer_topk", "TURNLOG_ON_ABORT": "continue"}
    with standing(places.new("replaying"), "--seed", "11", environment=environment) as made:
        yield made


def order(stand: Stand, fault: str, **fields: Any) -> None:
    assert stand.sim.post("/sim/faults", json={"fault": fault, **fields}).status_code == 200


@pytest.fixture(params=["capture", "tito"])
def continuing(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A server that continues by its setting, and one by its default."""
    found: Stand = request.getfixturevalue("replaying" if request.param == "capture" else "tito")
    assert found.sim.post("/sim/reset").status_code == 200
    return found


def test_the_rest_is_asked_for_with_the_rest_of_the_budget(continuing: Stand) -> None:
    talk = continuing.talk()
    response = interrupted(continuing, talk, [5], **NINE)
    first, second = continuing.engine_requests(talk.id)
    assert [one["body"]["max_tokens"] for one in (first, second)] == [16, 11]
    whole = output_of(response.json())
    assert len(whole) == 9
    prompt = response.json()["choices"][0]["prompt_token_ids"]
    assert second["body"]["input_ids"] == prompt + whole[:5]
    assert first["body"]["rid"] == second["body"]["rid"]
    [turn] = talk.committed()
    assert [part[1:] for part in turn["parts"]] == [[0, 5], [5, 9]]
    assert as_said(response) == as_said(uncut(continuing, continuing.talk(), **NINE))


@pytest.mark.parametrize(
    ("sent", "rest"),
    [
        ({"max_completion_tokens": 12, "max_tokens": 16}, {"max_completion_tokens": 7}),
        ({"max_completion_tokens": None, "max_tokens": 16, "min_tokens": 9}, {"max_tokens": 11, "min_tokens": 4}),
        ({"min_tokens": 3}, {"min_tokens": 0}),
    ],
)
def test_both_engines_take_one_of_the_limits(tito: Stand, sent: dict[str, Any], rest: dict[str, Any]) -> None:
    talk = tito.talk()
    interrupted(tito, talk, [5], **sent, sim=NINE["sim"])
    _, second = tito.engine_requests(talk.id)
    limits = ("max_tokens", "max_completion_tokens", "min_tokens")
    assert {name: second["body"][name] for name in limits if name in second["body"]} == rest


SIXTY = {"completion_tokens": 60}
THINKING = {"sim": {**SIXTY, "reasoning": True}}
CALLING = {"tools": [WEATHER], "sim": {**SIXTY, "tool_calls": True, "reasoning": True}}
WIDE = {"sim": {"text": "wé 東京 🚀👩\u200d🔬 ok"}}


@pytest.mark.parametrize(
    ("at", "body"),
    [
        pytest.param([1], THINKING, id="behind <think>"),
        pytest.param([7], THINKING, id="in reasoning"),
        pytest.param([7, 0, 20], THINKING, id="in reasoning, at once, in the answer"),
        pytest.param([47], CALLING, id="in a tool call"),
        pytest.param([15, 25, 10], CALLING, id="in reasoning, in the answer, in a tool call"),
        pytest.param([5, 1, 1, 1], WIDE, id="between the bytes of a character"),
        pytest.param([0], WIDE, id="before it began"),
    ],
)
def test_what_was_cut_is_as_if_it_had_not_been(replaying: Stand, at: list[int], body: dict[str, Any]) -> None:
    """All of the reply: text, calls, tokens, logprobs as they were spelled, rows of both payloads, counts."""
    assert replaying.sim.post("/sim/reset").status_code == 200
    body = {**body, "return_routed_experts": True, "return_indexer_topk": True}
    talk = replaying.talk()
    joined = interrupted(replaying, talk, at, **body)
    assert talk.generations() == len(at) + 1
    assert joined.json()["choices"][0]["meta_info"]["routed_experts"]
    asked = [one["body"].get("routed_experts_start_len") for one in replaying.engine_requests(talk.id)]
    tokens = len(joined.json()["choices"][0]["prompt_token_ids"])
    held = [max(tokens + sum(at[:number]) - 1, 0) for number in range(1, len(at) + 1)]
    assert asked == [None, *held]
    assert as_said(joined) == as_said(uncut(replaying, replaying.talk(), **body))
    talk.messages = [ASKED, joined.json()["choices"][0]["message"]]
    talk.say("And then?", tools=body.get("tools"))
    [row] = talk.rows(replay=True)
    assert row["rows"] == len(row["tokens"]) - 1
    assert sum(row["loss_mask"]) == sum(turn["output_tokens"] for turn in talk.committed())


@pytest.mark.parametrize("at", [[0], [7], [7, 0, 20]])
def test_what_is_aborted_in_sglangs_waiting_queue_goes_on(replaying: Stand, at: list[int]) -> None:
    """The engine took it back there before. Its reply counts no prompt and has no payloads, so all rows are asked for
    again."""
    assert replaying.sim.post("/sim/reset").status_code == 200
    talk, asks = replaying.talk(), {"return_routed_experts": True, "return_indexer_topk": True}
    joined = interrupted(replaying, talk, at, **asks, sim={**THINKING["sim"], "queued": True})
    assert {one["body"].get("routed_experts_start_len") for one in replaying.engine_requests(talk.id)} == {None}
    assert as_said(joined) == as_said(uncut(replaying, replaying.talk(), **asks, **THINKING))


@pytest.mark.parametrize("engine", ["stand", "vllm_stand"])
@pytest.mark.parametrize("body", [{}, {"max_tokens": 40, "stop": " more th"}], ids=["default budget", "stop"])
def test_a_completion_goes_on_by_its_ids(
    request: pytest.FixtureRequest, places: Places, engine: str, body: dict[str, Any]
) -> None:
    stand: Stand = request.getfixturevalue(engine)
    sim = {"text": "we have more than that here and there, or so"}
    body = {"prompt": ASKED["content"], "logprobs": 0, "return_routed_experts": True, **body, "sim": sim}
    talk = stand.talk(on_abort="continue")
    joined = interrupted(stand, talk, [3], path=talk.path + COMPLETIONS, **body)
    _, second = stand.engine_requests(talk.id, COMPLETIONS)
    assert second["body"]["max_tokens"] == body.get("max_tokens", 16) - 3
    assert second["body"]["prompt"][-3:] == output_of(joined.json())[:3]
    other = stand.talk()
    assert as_said(joined) == as_said(uncut(stand, other, path=other.path + COMPLETIONS, **body))


def test_a_session_may_have_its_aborts_returned(tito: Stand) -> None:
    talk = tito.talk(on_abort="return")
    response = interrupted(tito, talk, [5], **NINE)
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    assert talk.generations() == 1
    assert [(turn["finish_reason"], turn["output_tokens"]) for turn in talk.committed()] == [("abort", 5)]


def test_a_session_may_have_its_aborts_refused(tito: Stand) -> None:
    talk = tito.talk(on_abort="fail")
    response = interrupted(tito, talk, [5], **NINE)
    assert error_of(response) == (503, "generation_aborted")
    assert response.headers["retry-after"] == "1"
    assert talk.types()[-1] == "TurnRejected"
    talk.say("Hello", **NINE)
    assert len(talk.committed()) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
)
def test_what_a_grammar_holds_cannot_be_continued(replaying: Stand, body: dict[str, Any]) -> None:
    talk = replaying.talk()
    response = interrupted(replaying, talk, [5], **body, sim={"completion_tokens": 30})
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    assert talk.generations() == 1


@pytest.mark.parametrize("tito", ["vllm"], indirect=True)
@pytest.mark.parametrize("body", [NINE, THINKING, CALLING, WIDE])
def test_a_chat_of_vllm_is_continued(vllm_stand: Stand, tito: Stand, body: dict[str, Any]) -> None:
    for stand in (vllm_stand, tito):
        assert stand.sim.post("/sim/reset").status_code == 200
        talk = stand.talk(on_abort="continue")
        response = interrupted(stand, talk, [5, 3], **body)
        assert response.status_code == 200, response.text
        prompt = response.json()["prompt_token_ids"]
        output = output_of(response.json())
        requests = [one["body"] for one in stand.engine_requests(talk.id)]
        assert [ids_in(one) for one in requests[1:]] == [prompt + output[:5], prompt + output[:8]]
        assert [part[1:] for part in talk.committed()[0]["parts"]] == [[0, 5], [5, 8], [8, len(output)]]
        assert as_said(response) == as_said(uncut(stand, stand.talk(), **body))


def test_an_engine_that_goes_on_ending_generations_is_not_asked_for_ever(tito: Stand) -> None:
    talk = tito.talk()
    response = interrupted(tito, talk, [5], meanwhile=lambda _: order(tito, "abort", count=30, tokens=0), **NINE)
    assert budgets(tito, talk) == [16, *[11] * 6]
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    [turn] = talk.committed()
    assert (turn["finish_reason"], turn["output_tokens"]) == ("abort", 5)


def test_tokens_have_the_weight_version_that_they_were_sampled_under(tito: Stand) -> None:
    def swap(number: int) -> None:
        body = {"new_version": "v2", "abort_all_requests": False}
        assert tito.sim.post("/update_weight_version", json=body).status_code == 200

    talk = tito.talk()
    talk.say("Hello")
    response = interrupted(tito, talk, [5], meanwhile=swap, **NINE)
    spans = [{"version": "default", "start": 0, "end": 5}, {"version": "v2", "start": 5, "end": 9}]
    before, turn = talk.committed()
    assert (turn["weight_versions"], turn["dispatched"]) == (spans, "default")
    meta = response.json()["choices"][0]["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == ("v2", spans)
    [row] = talk.rows()
    names = row["weight_version_names"]
    sampled = before["output_tokens"] + 9
    assert [names[at] for at in row["weight_versions"] if at >= 0] == ["default"] * (sampled - 4) + ["v2"] * 4
    assert (row["status"], sum(row["loss_mask"])) == ("completed", sampled)


def test_what_an_engine_does_not_see_beside_ids_cannot_be_continued(replaying: Stand) -> None:
    """SGLang leaves images out where it gets ids (0.5.23, serving_chat: `input_ids`)."""
    talk = replaying.talk()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    response = interrupted(replaying, talk, [5], messages=[seen], **NINE)
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    assert talk.generations() == 1
    said = {"role": "user", "content": [{"type": "text", "text": "And this?"}]}
    response = interrupted(replaying, replaying.talk(), [5], messages=[said], **NINE)
    assert len(output_of(response.json())) == 9


@pytest.mark.parametrize(
    ("fault", "status", "code"), [("status_503", 503, None), ("nan_logprob", 502, "upstream_invalid")]
)
def test_a_later_part_that_fails_commits_nothing(tito: Stand, fault: str, status: int, code: str | None) -> None:
    talk = tito.talk()
    response = interrupted(tito, talk, [5], meanwhile=lambda _: order(tito, fault), **NINE)
    assert response.status_code == status
    if code is not None:
        assert error_of(response) == (status, code)
    assert talk.types()[-1] == "TurnRejected"
    talk.say("Hello", **NINE)
    assert len(talk.committed()) == 1


def test_a_driver_that_ends_the_rest_gets_what_there_is(tito: Stand) -> None:
    talk = tito.talk()
    response = interrupted(tito, talk, [5], meanwhile=lambda _: order(tito, "abort", tokens=2), **NINE)
    assert budgets(tito, talk) == [16, 11]
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    [turn] = talk.committed()
    assert [part[1:] for part in turn["parts"]] == [[0, 5], [5, 7]]


@pytest.mark.parametrize("path", [None, COMPLETIONS])
def test_a_turn_that_has_not_begun_when_the_engine_aborts_is_an_abort_without_tokens(
    stand: Stand, path: str | None
) -> None:
    talk = stand.talk(on_abort="return")
    try:
        assert stand.sim.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        body = {"prompt": "Hello", "logprobs": 0} if path else {"messages": [ASKED]}
        turn = stand.meanwhile(
            stand.http.post, talk.path + path if path else talk.chat_path, json={"model": "m", **body}
        )
        until(generating(stand))
        assert stand.sim.post("/abort_request", json={"abort_all": True}).status_code == 200
        reply = turn.result().json()
    finally:
        assert stand.sim.post("/continue_generation", json={}).status_code == 200
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["prompt_tokens"]) == ("abort", 0)
    [committed] = talk.committed()
    assert (committed["output_tokens"], committed["finish_reason"]) == (0, "abort")
    assert committed["suffix_tokens"] > 0
