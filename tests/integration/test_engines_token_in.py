"""Engines that take a prompt's ids in one field, in another, or in none, and how the server finds out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.stand import CHAT, WEATHER, Stand, Talk, engine_requests, error_of, serving, standing, user
from integration.tito import checked, ids_in, output_of
from ops.server import reserve_port
from ops.simulator.process import SimulatorProcess

DEAF = "--no-token-in"
THINKING = {"tools": [WEATHER], "sim": {"reasoning": True, "tool_calls": False}}


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def deaf(request: pytest.FixtureRequest, places: Places, tokenizer: str) -> Iterator[Stand]:
    """A server with a tokenizer, before an engine that takes no ids."""
    environment = {"TURNLOG_TOKENIZER": tokenizer}
    with standing(places.new("deaf"), "--dialect", request.param, DEAF, environment=environment) as made:
        yield made


def token_ids(stand: Stand) -> dict[str, str | None]:
    """What is known of each engine."""
    return {engine["url"]: engine["token_ids"] for engine in stand.http.get("/engines").json()["engines"]}


def probes(stand: Stand) -> list[dict[str, Any]]:
    """The engine's requests that belong to no session."""
    return [one for one in engine_requests(stand.sim, CHAT, None) if "x-smg-routing-key" not in one["headers"]]


def test_at_an_engine_that_takes_no_ids_turns_are_captured(deaf: Stand) -> None:
    for _ in range(2):
        talk = deaf.talk()
        talk.say("What is the weather?", **THINKING)
        talk.say("And tomorrow?", **THINKING)
        sent = [one["body"] for one in deaf.engine_requests(talk.id)]
        assert not any("input_ids" in one or "kv_transfer_params" in one for one in sent)
        assert [event.get("sent_ids", False) for event in talk.committed()] == [False, False]
    assert len(probes(deaf)) == 1
    assert set(token_ids(deaf).values()) == {"none"}
    assert deaf.server.log_path.read_text().count("does not accept token ids") == 1


def test_a_clients_own_ids_are_refused_there(deaf: Stand) -> None:
    talk = deaf.talk()
    response = talk.chat([user("Hello")], input_ids=[1, 2, 3], max_tokens=4)
    assert error_of(response) == (400, "unsupported")
    assert talk.generations() == 0
    assert talk.types()[-1] == "TurnRejected"
    talk.say("Hello")


def test_a_session_moves_between_engines_that_read_different_fields(
    sglang: SimulatorProcess, vllm: SimulatorProcess, places: Places, tokenizer: str
) -> None:
    """Each request is written for the engine that gets it, also where no other accepts a connection."""
    nobody = "http://127.0.0.1:9"
    environment = {"TURNLOG_TOKENIZER": tokenizer}
    with checked(places.new("mixed"), sglang.base_url, vllm.base_url, nobody, environment=environment) as stand:
        talk = stand.talk()
        for number, url in enumerate((sglang.base_url, vllm.base_url, sglang.base_url)):
            for one in (sglang.base_url, vllm.base_url):
                state = "serving" if one == url else "draining"
                assert stand.http.post("/engines", json={"url": one, "state": state}).status_code == 200
            talk.say(f"Turn {number}", kv_transfer_params={"do_remote_prefill": False}, **THINKING)
        requests = [record["request"] for record in talk.state()["records"]]
        assert ["input_ids" in one for one in requests] == [True, False, True]
        assert requests[1]["kv_transfer_params"].keys() == {"do_remote_prefill", "prompt_token_ids"}
        assert len(talk.rows()) == 1
        assert token_ids(stand) == {
            sglang.base_url: "input_ids",
            vllm.base_url: "kv_transfer_params",
            nobody: None,
        }


def test_an_engine_is_asked_again_after_a_restart(places: Places, tokenizer: str) -> None:
    port = reserve_port(places)
    url = f"http://127.0.0.1:{port}"
    with serving(places.new("restarted"), url, environment={"TURNLOG_TOKENIZER": tokenizer}) as stand:
        talk = stand.talk()
        for arguments, found in (([], "kv_transfer_params"), ([DEAF], "none"), ([], "kv_transfer_params")):
            assert error_of(talk.chat([*talk.messages, user("Is anybody there?")]))[0] == 502
            with SimulatorProcess("--dialect", "vllm", *arguments, port=port):
                talk.say("Hello", **THINKING)
                assert token_ids(stand) == {url: found}
        assert [event.get("sent_ids", False) for event in talk.committed()] == [True, False, True]


@pytest.mark.parametrize("tito", ["vllm"], indirect=True)
def test_ids_in_vllms_own_field_are_refused_where_the_server_builds_them(tito: Stand) -> None:
    talk: Talk = tito.talk()
    response = talk.chat([user("Hello")], kv_transfer_params={"prompt_token_ids": [1, 2]})
    assert error_of(response) == (400, "unsupported")
    given = talk.say("Hello", input_ids=[5, 6, 7], max_tokens=4)
    [request] = tito.engine_requests(talk.id)
    assert ids_in(request["body"]) == [5, 6, 7]
    assert talk.state()["metadata"]["accumulated_token_ids"] == [5, 6, 7, *output_of(given.json())]
