"""Replay payloads through a whole server: asked for, kept for the rollback window, given again, tombstoned."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from integration.places import Places
from integration.routing import (
    BOTH,
    EXPERTS,
    KINDS,
    Recorded,
    Rows,
    Session,
    fetch,
    fetched,
    live_payloads,
    problems,
    recorded,
    rows_in,
    tokens_in,
)
from integration.stand import WEATHER, error_of, serving
from ops.simulator.process import SimulatorProcess

POOL = {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"}
NESTED = {"experts": {"nested": True}, "indexer_topk": {"nested": True}}


@pytest.fixture(
    scope="module",
    params=["sglang", "sglang pool", "vllm", pytest.param("vllm pool", marks=pytest.mark.long)],
)
def line(
    request: pytest.FixtureRequest,
    sglang: SimulatorProcess,
    vllm: SimulatorProcess,
    places: Places,
) -> Iterator[Recorded]:
    """A server that asks for both kinds: judged where it is, or all in the pool."""
    kind, _, how = request.param.partition(" ")
    engine = sglang if kind == "sglang" else vllm
    with recorded(places.new("replay"), engine.base_url, {**BOTH, **(POOL if how else {})}) as made:
        yield made


@pytest.fixture(scope="module")
def plain(sglang: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    """A server that asks for nothing."""
    with recorded(places.new("plain"), sglang.base_url, {}) as made:
        yield made


@pytest.fixture(scope="module")
def patches(sglang: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    """A server that asks for new rows only."""
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_REPLAY_INCREMENTAL": "true"}
    with recorded(places.new("patches"), sglang.base_url, environment) as made:
        yield made


def say(line: Recorded, talk: Session, text: str, **fields: Any) -> bytes:
    """A turn; the engine's reply to it."""
    talk.say(text, **fields)
    return line.sent


@pytest.mark.parametrize("nested", [False, True])
def test_payloads_are_kept_for_the_window_and_null_behind_it(line: Recorded, nested: bool) -> None:
    talk = line.talk(rollback_window=1)
    sent = [say(line, talk, text, sim=NESTED if nested else {}) for text in ("One", "Two", "Three", "Four")]
    kinds = [kind for kind in KINDS if f'"{kind}"'.encode() in sent[0]]
    assert EXPERTS in kinds
    records = talk.state()["records"]
    for kind in kinds:
        assert live_payloads(talk, kind) == [False, False, True, True]
        for turn in (3, 4):
            found = fetched(talk, turn, kind)
            assert (found.start, found.shape[0]) == (0, tokens_in(sent[turn - 1]) - 1)
            assert np.array_equal(found.rows, rows_in(sent[turn - 1], kind))
    assert [record["response"] for record in records[2:]] == [json.loads(body) for body in sent[2:]]
    expected = json.loads(sent[0])
    choice = expected["choices"][0]
    for kind in kinds:
        choice.get("meta_info", choice)[kind] = None
    assert records[0]["response"] == expected


def test_a_tombstone_names_what_it_was(line: Recorded) -> None:
    talk = line.talk(rollback_window=0)
    body = say(line, talk, "One")
    shape = fetched(talk, 1).shape[1:]
    say(line, talk, "Two")
    response = fetch(talk, 1)
    assert error_of(response) == (410, "payload_tombstoned")
    events = talk.events()
    [tombstone] = [event for event in events if event["type"] == "BlobsTombstoned"]
    message = response.json()["error"]["message"]
    for part in (EXPERTS, str(tokens_in(body) - 1), str(shape), f"event {tombstone['seq']}"):
        assert part in message
    assert (tombstone["turns"], events[-1], events[-2]["type"]) == ([1], tombstone, "TurnCommitted")


def test_a_payload_that_never_was_is_not_found(line: Recorded) -> None:
    talk = line.talk()
    say(line, talk, "One")
    assert error_of(fetch(talk, 2))[0] == 404
    assert error_of(fetch(talk, 0))[0] in (400, 404)
    assert error_of(line.stand.http.get(f"{talk.path}/turns/1/other"))[0] in (400, 404)
    assert error_of(fetch(Session(line.stand, "nobody"), 1)) == (404, "session_not_found")
    line.stand.http.delete(talk.path)
    assert error_of(fetch(talk, 1)) == (404, "session_closed")


@pytest.mark.parametrize("nested", [False, True])
def test_what_comes_unasked_is_kept(plain: Recorded, nested: bool) -> None:
    wish = {"experts": {"unasked": True, "nested": nested, "experts": 300}, "indexer_topk": {"nested": nested}}
    talk = plain.talk()
    body = say(plain, talk, "One", sim=wish)
    for kind in KINDS:
        found = fetched(talk, 1, kind)
        assert np.array_equal(found.rows, rows_in(body, kind))
        assert (len(found.shape) == 3) == nested
    assert fetched(talk, 1).dtype == "uint16"
    say(plain, talk, "Two")
    assert np.array_equal(fetched(talk, 1).rows, rows_in(body))
    assert error_of(fetch(talk, 2))[0] == 404


def patch_in(body: bytes) -> Rows:
    """The rows in SGLang's reply, however many they are, of four layers and two experts."""
    return np.frombuffer(base64.b64decode(json.loads(body)["choices"][0]["meta_info"][EXPERTS]), "<i4").reshape(-1, 8)


def first_row(line: Recorded, talk: Session) -> int | None:
    """The first row of experts that the engine was last asked for."""
    asked = line.stand.sim.get("/sim/requests", params={"last": 1}).json()[0]["body"]
    assert asked["messages"][-1] == talk.messages[-2]
    found: int | None = asked.get("routed_experts_start_len")
    return found


def test_new_rows_only_are_asked_for_and_all_are_kept(patches: Recorded) -> None:
    talk = patches.talk(retain="all")
    known, rows = 0, np.zeros((0, 8))
    for turn, text in enumerate(("One", "Two", "Three"), 1):
        talk.say(text, return_routed_experts=True)
        body = patches.sent
        assert first_row(patches, talk) == known
        sent = patch_in(body)
        assert len(sent) == tokens_in(body) - 1 - known
        rows = np.concatenate([rows, sent])
        found = fetched(talk, turn)
        assert (found.start, np.array_equal(found.rows, rows)) == (0, True)
        known = tokens_in(body) - 1
        assert talk.state()["records"][-1]["response"] == json.loads(body)
    assert problems(patches.stand) == []


def test_rows_behind_a_drift_begin_at_the_first_one_sent(patches: Recorded) -> None:
    """Tools stand at the beginning of the prompt, so it does not continue the tokens before."""
    talk = patches.talk()
    say(patches, talk, "One")
    stop = fetched(talk, 1).shape[0]
    body = say(patches, talk, "Two", tools=[WEATHER], return_routed_experts=True, sim={"tool_calls": False})
    assert (talk.committed()[-1]["base_tokens"], talk.committed()[-1]["segment_cause"]) == (0, "drift")
    found = fetched(talk, 2)
    assert np.array_equal(found.rows, patch_in(body))
    assert first_row(patches, talk) == found.start == stop
    assert found.shape[0] == tokens_in(body) - 1 - stop
    say(patches, talk, "Three", tools=[WEATHER], sim={"tool_calls": False})
    following = fetched(talk, 3)
    assert (following.start, following.shape[0]) == (stop, tokens_in(patches.sent) - 1 - stop)
    assert np.array_equal(following.rows[: found.shape[0]], found.rows)
    assert problems(patches.stand) == []


def test_a_prompt_shorter_than_what_is_known_is_asked_for_again(patches: Recorded) -> None:
    """Engines refuse a first row behind the prompt; that refusal is not the client's."""
    talk = patches.talk()
    say(patches, talk, "One", tools=[WEATHER] * 5, sim={"tool_calls": False, "completion_tokens": 2})
    body = say(patches, talk, "Two")
    found = fetched(talk, 2)
    assert tokens_in(body) < fetched(talk, 1).shape[0]
    assert talk.committed()[-1]["base_tokens"] == 0
    assert (found.start, first_row(patches, talk)) == (0, None)
    assert np.array_equal(found.rows, rows_in(body))
    assert len(talk.committed()) == 2
    assert problems(patches.stand) == []


def test_completions_have_routed_experts_and_no_indexer(sglang: SimulatorProcess, places: Places) -> None:
    with serving(places.new("completions"), sglang.base_url, environment=BOTH) as replaying:
        talk = replaying.talk()
        text = "Once"
        for _ in range(3):
            body = {"model": "simulator", "prompt": text, "max_tokens": 6}
            response = replaying.http.post(f"{talk.path}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text += response.json()["choices"][0]["text"] + " and"
        found = [replaying.http.get(f"{talk.path}/turns/{turn}/routed_experts").status_code for turn in (1, 2, 3)]
        assert found == [410, 200, 200]
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
