"""Clients that send a prompt's ids themselves, with and without a tokenizer here."""

from __future__ import annotations

import json

import pytest

from integration.places import Places
from integration.stand import Stand, Talk, error_of, user
from integration.tito import output_of, require_consistent, sent_ids

LIMIT = {"max_tokens": 6}


@pytest.fixture(params=["capture", "tito"])
def either(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A server without and one with a tokenizer."""
    found: Stand = request.getfixturevalue("stand" if request.param == "capture" else "tito")
    return found


def send(talk: Talk, ids: list[int], text: str) -> list[int]:
    """A turn with these ids; returns the ids that the next may continue."""
    response = talk.say(text, input_ids=ids, **LIMIT)
    return ids + output_of(response.json())


def test_many_turns_with_ids_of_their_own_store_their_parameters_once(either: Stand) -> None:
    talk = either.talk()
    ids = list(range(1, 40))
    for turn in range(20):
        ids = send(talk, [*ids, 7, turn], f"Turn {turn}")
    committed = talk.committed()
    blobs = [blob for event in committed for blob in event.get("new_blobs", ())]
    assert [blob["kind"] for blob in blobs] == ["params"]
    assert {event["params"] for event in committed} == {0}
    assert [event["suffix_tokens"] for event in committed] == [41] + [2] * 19
    [row] = talk.rows()
    assert row["tokens"] == ids
    require_consistent(either, talk)


@pytest.mark.parametrize("at", [0, -1])
def test_ids_that_drift_are_refused_where_drift_is_with_the_position(either: Stand, at: int) -> None:
    talk = either.talk(on_drift="reject")
    ids = send(talk, [1, 2, 3], "One")
    before = talk.state()["records"]
    place = at % len(ids)
    other = [*ids[:place], ids[place] + 1, *ids[place + 1 :], 5]
    response = talk.chat([*talk.messages, user("Two")], input_ids=other, **LIMIT)
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert f"position {place}" in response.json()["error"]["message"]
    assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert talk.state()["records"] == before
    send(talk, [*ids, 5], "Two")
    require_consistent(either, talk)


def test_ids_and_prompts_that_are_built_follow_each_other(tito: Stand) -> None:
    talk = tito.talk()
    talk.say("Built")
    stored = talk.state()["metadata"]["accumulated_token_ids"]
    send(talk, [*stored, 9, 9], "Given")
    talk.say("Built again")
    one, two, three = sent_ids(tito, talk)
    assert two == [*stored, 9, 9]
    assert three[: len(two)] == two
    assert len(one) < len(stored)
    assert len(talk.rows()) == 1
    require_consistent(tito, talk)


NO_IDS = ("[]", "[-1]", "[true]", "[1.5]", "[1.0]", '["1"]', "[2147483648]", "[1e999]", "[null]", '"x"', "{}", "7")


def test_ids_that_are_none_are_400_and_open_nothing(either: Stand) -> None:
    talk = either.talk()
    for ids in NO_IDS:
        body = f'{{"model":"simulator","messages":{json.dumps([user("x")])},"input_ids":{ids}}}'
        response = either.http.post(talk.chat_path, content=body)
        assert error_of(response) == (400, "invalid_request"), ids
        assert "input_ids" in response.json()["error"]["message"]
    assert talk.types() == ["SessionCreated"]
