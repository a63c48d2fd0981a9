"""Where tokens or messages do not go on: drift, divergence, and the segments that they begin."""

from __future__ import annotations

from typing import Any

import pytest

from integration.places import Places
from integration.stand import WEATHER, Stand, Talk, error_of, user
from integration.tito import output_of

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
