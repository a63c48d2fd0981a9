"""Where tokens or messages do not go on: drift, divergence, and the segments that they begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.routing import BOTH
from integration.stand import WEATHER, Stand, Talk, error_of, user
from integration.tito import checked, output_of
from ops.simulator.process import SimulatorProcess

PLAIN = {"tool_calls": False, "reasoning": False}


def reported(reply: dict[str, Any]) -> list[int]:
    """The prompt that an engine reports, in either dialect."""
    choice = reply["choices"][0]
    ids: list[int] = choice["prompt_token_ids"] if "prompt_token_ids" in choice else reply["prompt_token_ids"]
    return ids


def whole(reply: dict[str, Any]) -> list[int]:
    return reported(reply) + output_of(reply)


def first_difference(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.fixture(params=["sglang", "vllm"])
def either(request: pytest.FixtureRequest, places: Places) -> Stand:
    found: Stand = request.getfixturevalue("stand" if request.param == "sglang" else "vllm_stand")
    return found


def segments(talk: Talk) -> list[tuple[int, str | None, list[int]]]:
    return [(row["segment"], row["segment_cause"], [span["turn"] for span in row["turns"]]) for row in talk.rows()]


def test_drift_begins_a_segment_with_its_parent_and_cause(either: Stand) -> None:
    talk = either.talk()
    talk.say("One", sim=PLAIN)
    before = talk.say("Two", sim=PLAIN).json()
    after = talk.say("With tools", tools=[WEATHER], sim=PLAIN).json()
    last = talk.say("And on", tools=[WEATHER], sim=PLAIN).json()
    assert segments(talk) == [(0, None, [1, 2]), (1, "drift", [3, 4])]
    event = talk.committed()[2]
    assert (event["parent"], event["base_messages"], event["base_tokens"]) == (2, 4, 0)
    assert [row["tokens"] for row in talk.rows()] == [whole(before), whole(last)]
    assert talk.rows()[1]["tokens"][: len(whole(after))] == whole(after)
    assert talk.state()["metadata"]["accumulated_token_ids"] == whole(last)
    assert talk.rows()[1]["messages"] == talk.messages


def test_drift_is_refused_at_its_position_where_a_session_wants_that(either: Stand) -> None:
    talk = either.talk(on_drift="reject")
    before = talk.say("One secret", sim=PLAIN).json()
    records = talk.state()["records"]
    sent = [*talk.messages, user("With tools")]
    response = talk.chat(sent, tools=[WEATHER], sim=PLAIN)
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert "secret" not in response.text
    assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert talk.state()["records"] == records
    twin = either.talk()
    other = twin.chat(sent, tools=[WEATHER], sim=PLAIN).json()
    position = first_difference(whole(before), reported(other))
    assert position > 0
    message = response.json()["error"]["message"]
    assert f"differ at position {position}" in message
    assert f"{len(reported(other))} tokens" in message
    assert f"the {len(whole(before))} stored" in message
    talk.say("Without", sim=PLAIN)
    assert segments(talk) == [(0, None, [1, 3])]


def test_a_refused_drift_rolls_nothing_back(either: Stand) -> None:
    talk = either.talk(on_drift="reject")
    talk.say("One", sim=PLAIN)
    talk.say("Two", sim=PLAIN)
    records = talk.state()["records"]
    response = talk.chat([*talk.messages[:2], user("Instead")], tools=[WEATHER], sim=PLAIN)
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert talk.state()["records"] == records
    assert "RolledBack" not in talk.types()
    talk.say("Three", sim=PLAIN)


def test_a_turn_that_drifted_can_be_rolled_back_into_the_segment_before(either: Stand) -> None:
    talk = either.talk()
    talk.say("One", sim=PLAIN)
    talk.say("With tools", tools=[WEATHER], sim=PLAIN)
    assert [row[1] for row in segments(talk)] == [None, "drift"]
    talk.messages = talk.messages[:2]
    talk.say("Without", sim=PLAIN)
    assert segments(talk) == [(0, None, [1, 3])]


def test_one_token_that_an_engine_reports_otherwise_is_never_patched(either: Stand) -> None:
    talk = either.talk()
    talk.say("One", sim=PLAIN)
    odd = talk.say("Two", sim={**PLAIN, "fault": "other_prompt"}).json()
    assert segments(talk) == [(0, None, [1]), (1, "drift", [2])]
    assert talk.rows()[1]["tokens"] == whole(odd)
    talk.say("Three", sim=PLAIN)
    assert segments(talk)[2] == (2, "drift", [3])


@pytest.fixture(params=["capture", "tito"])
def segmented(request: pytest.FixtureRequest, places: Places) -> Talk:
    """A session of three turns that may begin segments, with and without a tokenizer."""
    found: Stand = request.getfixturevalue("stand" if request.param == "capture" else "tito")
    talk = found.talk(on_divergence="segment")
    for text in ("One", "Two", "Three"):
        talk.say(text, sim=PLAIN)
    return talk


def test_compaction_begins_a_segment_that_goes_on(segmented: Talk) -> None:
    talk = segmented
    summary = [user("Summary: one, two"), {"role": "assistant", "content": "Understood"}, user("Go on")]
    before = talk.messages
    talk.messages = []
    talk.add(*summary, sim=PLAIN)
    talk.say("And on", sim=PLAIN)
    assert segments(talk) == [(0, None, [1, 2, 3]), (1, "divergence", [4, 5])]
    assert [(event["parent"], event["base_messages"]) for event in talk.committed()[3:]] == [(3, 0), (4, 4)]
    rows = talk.rows()
    assert [row["messages"] for row in rows] == [before, talk.messages]
    assert rows[1]["turns"][0]["start"] == 0
    assert sum(rows[1]["loss_mask"]) == sum(event["output_tokens"] for event in talk.committed()[3:])
    assert len(talk.state()["records"]) == 5
    assert "RolledBack" not in talk.types()


def test_a_sub_agent_is_a_segment_and_so_is_coming_back_from_it(segmented: Talk) -> None:
    talk = segmented
    main = talk.messages
    talk.messages = []
    talk.add({"role": "system", "content": "You search"}, user("Find it"), sim=PLAIN)
    talk.say("Look again", sim=PLAIN)
    sub = talk.messages
    talk.messages = main
    talk.say("Found it", sim=PLAIN)
    assert segments(talk) == [(0, None, [1, 2, 3]), (1, "divergence", [4, 5]), (2, "divergence", [6])]
    assert [event["parent"] for event in talk.committed()] == [0, 1, 2, 3, 4, 5]
    assert [row["messages"] for row in talk.rows()] == [main, sub, talk.messages]


def test_a_rollback_inside_a_new_segment_stays_in_it(segmented: Talk) -> None:
    talk = segmented
    talk.messages = []
    talk.add({"role": "system", "content": "You search"}, user("Find it"), sim=PLAIN)
    begun = talk.messages
    talk.say("Look again", sim=PLAIN)
    talk.messages = begun
    talk.say("Look elsewhere", sim=PLAIN)
    assert talk.events()[-2]["discarded"] == [5]
    assert segments(talk) == [(0, None, [1, 2, 3]), (1, "divergence", [4, 6])]
    talk.messages = []
    talk.add(*begun[:2], sim=PLAIN)
    assert segments(talk)[2] == (2, "divergence", [7]), "two turns back is further than the window"


def test_a_segment_whose_first_turn_fails_is_none(segmented: Talk) -> None:
    talk = segmented
    before = talk.state()["records"]
    forged = [user("Summary"), {"role": "assistant", "content": "Understood"}, user("Go on")]
    assert talk.chat(forged, sim={"fault": "not_json"}).status_code == 502
    assert talk.state()["records"] == before
    talk.say("Four", sim=PLAIN)
    assert segments(talk) == [(0, None, [1, 2, 3, 5])]


@pytest.fixture(scope="module", params=["capture", "tito"])
def replaying(request: pytest.FixtureRequest, sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    environment = dict(BOTH)
    if request.param == "tito":
        environment["TURNLOG_TOKENIZER"] = request.getfixturevalue("tokenizer")
    with checked(places.new("replaying"), sglang.base_url, environment=environment) as made:
        yield made


def kept(stand: Stand, talk: Talk, turns: int) -> list[int]:
    """The turns whose routed experts can be read."""
    found = []
    for turn in range(1, turns + 1):
        response = stand.http.get(f"{talk.path}/turns/{turn}/routed_experts")
        assert response.status_code in (200, 404, 410), response.text
        if response.status_code == 200:
            found.append(turn)
    return found


def test_each_segment_keeps_the_payloads_of_its_own_window(replaying: Stand) -> None:
    talk = replaying.talk(on_divergence="segment")
    for text in ("One", "Two", "Three"):
        talk.say(text, sim=PLAIN)
    assert kept(replaying, talk, 3) == [2, 3]
    talk.messages = []
    for text in ("Summary", "On", "And on"):
        talk.say(text, sim=PLAIN)
    assert kept(replaying, talk, 6) == [2, 3, 5, 6]
    rows = talk.rows(replay="true")
    assert [(row["row_start"], row["rows"]) for row in rows] == [(0, len(row["tokens"]) - 1) for row in rows]


def test_completions_have_routed_experts_and_no_indexer(replaying: Stand) -> None:
    talk = replaying.talk()
    text = "Once"
    for _ in range(3):
        body = {"model": "simulator", "prompt": text, "max_tokens": 6}
        response = replaying.http.post(f"{talk.path}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text += response.json()["choices"][0]["text"] + " and"
    assert kept(replaying, talk, 3) == [2, 3]
    assert replaying.http.get(f"{talk.path}/turns/3/indexer_topk").status_code == 404
    sent = replaying.engine_requests(talk.id, "/v1/completions")[-1]["body"]
    assert sent["return_routed_experts"] is True
    assert "return_indexer_topk" not in sent
    asked = replaying.talk()
    body = {"model": "simulator", "prompt": "Once", "max_tokens": 6, "return_routed_experts": True}
    response = replaying.http.post(f"{asked.path}/v1/completions", json=body)
    assert isinstance(response.json()["sglext"]["routed_experts"], str)
    [record] = asked.state()["records"]
    assert record["response"] == response.json()
