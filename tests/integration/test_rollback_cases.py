"""Where a request may join: the cases of docs/concepts.md, each under every matcher it holds for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from integration.places import Places
from integration.stand import WEATHER, Message, Stand, Talk, error_of, user

PLAIN = {"tool_calls": False, "reasoning": False}
ROLLED_BACK = "x-turnlog-rolled-back"
MATCHERS = ("tolerant", "strict", "role_content_only")

Change = Callable[[Message], Message]


@pytest.fixture(params=["capture", "tito"])
def either(request: pytest.FixtureRequest, places: Places) -> Stand:
    found: Stand = request.getfixturevalue("stand" if request.param == "capture" else "tito")
    return found


@pytest.fixture(params=[("stand", "tolerant"), ("tito", "strict"), ("stand", "role_content_only")], ids="-".join)
def talk(request: pytest.FixtureRequest, places: Places) -> Talk:
    """A session of three turns under each matcher, with a tokenizer under one."""
    stand, matcher = request.param
    made: Talk = request.getfixturevalue(stand).talk(matcher=matcher)
    for text in ("One", "Two", "Three"):
        made.say(text, sim=PLAIN)
    return made


def path(talk: Talk) -> list[int]:
    return [record["turn"] for record in talk.state()["records"]]


@pytest.mark.parametrize(
    ("keep", "new"),
    [(5, []), (4, []), (4, ["Instead", "and more"])],
)
def test_a_history_that_stops_one_turn_short_discards_that_turn(talk: Talk, keep: int, new: list[str]) -> None:
    response = talk.chat([*talk.messages[:keep], *map(user, new)], sim=PLAIN)
    assert response.status_code == 200, response.text
    assert response.headers[ROLLED_BACK] == "1"
    assert path(talk) == [1, 2, 4]
    assert talk.events()[-2]["discarded"] == [3]
    assert talk.committed()[-1]["parent"] == 2


@pytest.mark.parametrize(
    ("keep", "new", "code"),
    [
        (0, ["Instead"], "history_mismatch"),
        (1, ["Instead"], "history_mismatch"),
        (1, [], "rollback_too_deep"),
        (3, ["Instead"], "rollback_too_deep"),
    ],
)
def test_a_history_that_stops_further_back_is_refused(talk: Talk, keep: int, new: list[str], code: str) -> None:
    """Too deep is what a wider window would allow: an input once more, or what follows a sampled message."""
    before = talk.state()["records"]
    response = talk.chat([*talk.messages[:keep], *map(user, new)], sim=PLAIN)
    assert error_of(response) == (400, code)
    assert response.headers["x-should-retry"] == "false"
    assert talk.state()["records"] == before


@pytest.mark.parametrize("place", ["first", "later"])
def test_an_invalid_tool_call_that_a_harness_drops(either: Stand, place: str) -> None:
    """mini-swe-agent: the assistant message is left out, and the user reports an error in its place.

    In the session's first turn nothing sampled is left in common, and the request diverges.
    """
    talk = either.talk()
    calls = {"tool_calls": True, "reasoning": False}
    if place == "later":
        talk.say("Hello", sim=PLAIN)
    before = talk.messages
    talk.say("Look", tools=[WEATHER], sim=calls)
    sent = [*before, user("Look"), user("That was no valid call")]
    response = talk.chat(sent, tools=[WEATHER], sim=PLAIN)
    if place == "later":
        assert (response.status_code, path(talk)) == (200, [1, 3])
        return
    assert error_of(response) == (400, "history_mismatch")
    assert path(talk) == [1]
    keeping = either.talk(on_divergence="segment")
    keeping.say("Look", tools=[WEATHER], sim=calls)
    assert keeping.chat(sent, tools=[WEATHER], sim=PLAIN).status_code == 200
    assert path(keeping) == [1, 2]


def reserialised(message: Message) -> Message:
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return {**message, "tool_calls": calls}


def otherwise(message: Message) -> Message:
    calls = json.loads(json.dumps(message["tool_calls"]))
    calls[0]["function"]["arguments"] = '{"city": "Elsewhere"}'
    return {**message, "tool_calls": calls}


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def without_content(message: Message) -> Message:
    return {**message, "content": None}


CHANGES: list[tuple[Change, dict[str, bool]]] = [
    (dict, {"tolerant": True, "strict": True, "role_content_only": True}),
    (reserialised, {"tolerant": True, "strict": False, "role_content_only": True}),
    (otherwise, {"tolerant": False, "strict": False, "role_content_only": True}),
    (without_reasoning, {"tolerant": True, "strict": False, "role_content_only": True}),
    (without_content, {"tolerant": True, "strict": False, "role_content_only": True}),
]


@pytest.mark.parametrize("matcher", MATCHERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0].__name__)
def test_what_a_matcher_sees_through_is_the_stored_history_and_else_a_mismatch(
    stand: Stand, matcher: str, change: tuple[Change, dict[str, bool]]
) -> None:
    talk = stand.talk(matcher=matcher)
    wish = {"tool_calls": True, "reasoning": False, "completion_tokens": 1}
    reply = talk.chat([user("Look")], tools=[WEATHER], sim=wish).json()["choices"][0]["message"]
    assert not reply["content"]
    made, equal = change
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain"} for call in reply["tool_calls"]]
    response = talk.chat([user("Look"), made(reply), *results], tools=[WEATHER], sim=PLAIN)
    if not equal[matcher]:
        assert error_of(response) == (400, "history_mismatch")
        return
    assert response.status_code == 200, response.text
    [*_, sent] = stand.engine_requests(talk.id)
    assert sent["body"]["messages"][1] == reply, "the stored spelling wins"
    [row] = talk.rows()
    assert len(row["turns"]) == 2
