"""What a client is given of a reply: the engine's bytes, less what it did not ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from helpers.streams import assembled, chunks

from app.turn.client_reply import ASKED_FOR, ASKS
from integration.places import Places
from integration.routing import EXPERTS, KINDS, POSITIONS, Recorded, recorded, text_of, without
from integration.stand import user
from ops.simulator.process import SimulatorProcess

Mode = Literal["asked", "verbatim"]
RETURN = {EXPERTS: "return_routed_experts", POSITIONS: "return_indexer_topk"}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module", params=["asked", "verbatim"])
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


@pytest.fixture(scope="module", params=["", pytest.param("pool", marks=pytest.mark.long)])
def line(request: pytest.FixtureRequest, mode: Mode, sglang: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    environment = {"TURNLOG_REPLAY": ",".join(KINDS), "TURNLOG_CLIENT_REPLY": mode}
    if request.param:
        environment |= {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"}
    with recorded(places.new("reply"), sglang.base_url, environment) as made:
        yield made


def given(mode: Mode, sent: bytes, asked: tuple[str, ...]) -> bytes:
    """What a client that asked for these kinds, and for all else but payloads, must be given of the engine's bytes."""
    return sent if mode == "verbatim" else without(sent, *(kind for kind in KINDS if kind not in asked))


def output_ids(sent: dict[str, Any]) -> list[int]:
    """As SGLang says them, or vLLM."""
    [choice] = sent["choices"]
    if "meta_info" not in choice:
        return list(choice["token_ids"])
    return [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]


ALL = dict.fromkeys(("logprobs", "return_token_ids", "return_meta_info", "return_weight_versions"), True)


@pytest.mark.parametrize(("asked", "nested"), [((), True), ((EXPERTS,), False), ((POSITIONS,), True), (KINDS, False)])
def test_only_the_values_that_were_not_asked_for_are_missing(
    line: Recorded, mode: Mode, asked: tuple[str, ...], nested: bool
) -> None:
    wish = {"experts": {"nested": nested}, "indexer_topk": {"nested": nested}}
    talk = line.talk()
    body: dict[str, Any] = {**ALL, **{RETURN[kind]: True for kind in asked}, "sim": wish}
    reply = talk.say("Hello", **body)
    sent = line.sent
    assert all(text_of(sent, kind) not in (None, b"null") for kind in KINDS)
    own = f',"token_ids":{json.dumps(output_ids(json.loads(sent)), separators=(",", ":"))}'.encode()
    assert (own in reply.content) is (mode == "asked")
    assert reply.content.replace(own, b"") == given(mode, sent, asked)
    again = talk.chat([user("Hello")], headers=RETRY, **body)
    assert again.headers["x-turnlog-replayed"] == "true"
    assert again.content == reply.content
    assert _own(again) == _own(reply)
    assert len(line.proxy.replies) == len(talk.committed()) + _earlier(line, sent)


def _earlier(line: Recorded, sent: bytes) -> int:
    """How many replies came before this one: a retry must not add any."""
    return line.proxy.replies.index(sent)


def _own(reply: httpx.Response) -> dict[str, str]:
    """The reply's headers, less what is of one exchange."""
    return {name: value for name, value in reply.headers.items() if name not in ("date", "x-turnlog-replayed")}


def test_a_retry_of_an_older_turn_has_null_for_what_was_tombstoned(line: Recorded, mode: Mode) -> None:
    talk = line.talk(rollback_window=0)
    key, body = {"idempotency-key": "first"}, {**ALL, **{RETURN[kind]: True for kind in KINDS}}
    talk.say("One", headers=key, **body)
    sent = line.sent
    talk.say("Two")
    again = talk.chat([user("One")], headers=key, **body)
    assert again.status_code == 200
    assert again.content == without(sent, *KINDS)


def test_a_stream_shows_no_payload_and_the_turn_has_it(line: Recorded, mode: Mode) -> None:
    talk = line.talk()
    response = talk.chat([user("Hello")], stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    message = json.loads(line.sent)["choices"][0]["message"]
    assert assembled(response.text)["choices"][0]["message"]["content"] == message["content"]
    assert not [kind for kind in KINDS if kind in response.text]
    assert [one["kind"] for one in talk.committed()[0]["payloads"]] == [*KINDS]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def usual(request: pytest.FixtureRequest, places: Places) -> Iterator[Recorded]:
    """A server with the default setting."""
    engine: SimulatorProcess = request.getfixturevalue(request.param)
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_CLIENT_REPLY": ""}
    with recorded(places.new("asked"), engine.base_url, environment) as made:
        yield made


HIDDEN = (*ASKED_FOR, "routed_experts")
IDS = {"return_token_ids": True}


@pytest.mark.parametrize(
    ("body", "params", "stream"),
    [
        ({}, {}, False),
        ({"logprobs": True}, {}, True),
        (IDS, {}, False),
        (IDS, {}, True),
        ({}, {"top_logprobs": 2}, True),
        ({}, {}, True),
    ],
)
def test_only_what_was_asked_for_is_given(
    usual: Recorded, body: dict[str, Any], params: dict[str, Any], stream: bool
) -> None:
    talk = usual.talk(params=params)
    reply = talk.chat([user("Hello")], stream=stream, **body)
    sent = json.loads(usual.sent)
    gets_logprobs, gets_ids = bool(params) or body not in ({}, IDS), body == IDS
    if stream:
        whole = assembled(reply.text)
        logprobs = whole["choices"][0]["logprobs"]
        wanted = sent["choices"][0]["logprobs"]["content"]
        assert (logprobs and len(logprobs["content"])) == (len(wanted) if gets_logprobs else None)
        assert whole["choices"][0]["message"]["content"] == sent["choices"][0]["message"]["content"]
        assert ("token_ids" in reply.text) is gets_ids
        if gets_ids:
            *first, last = chunks(reply.text)
            assert last["choices"][0]["token_ids"] == output_ids(sent)
            prompts = [home.get("prompt_token_ids") for one in (last, sent) for home in (one, one["choices"][0])]
            assert prompts[:2] == prompts[2:]
            assert "token_ids" not in json.dumps(first)
    else:
        for home in (sent, sent["choices"][0]):
            kept = {"logprobs"} if gets_logprobs else {*ASKS["return_token_ids"]} if gets_ids else set()
            home.update(dict.fromkeys(home.keys() & {*HIDDEN} - kept))
        if gets_ids:
            sent["choices"][0]["token_ids"] = output_ids(json.loads(usual.sent))
        assert reply.json() == sent
    again = talk.chat([user("Hello")], headers=RETRY, stream=stream, **body)
    assert (again.headers["x-turnlog-replayed"], again.content) == ("true", reply.content)
    # The record and the row have it all.
    assert talk.state()["records"][0]["response"] == json.loads(usual.sent)
    [row] = talk.rows()
    assert len([one for one in row["logprobs"] if one < 0]) == sum(row["sampled_mask"]) > 0


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_its_ids_where_they_are_asked_for(usual: Recorded, stream: bool, asks: bool) -> None:
    talk = usual.talk()
    body = {"model": "simulator", "prompt": "Say:", "stream": stream, **(IDS if asks else {})}
    reply = usual.stand.http.post(f"{talk.path}/v1/completions", json=body)
    last = chunks(reply.text)[-1] if stream else reply.json()
    found = last["choices"][0].get("token_ids")
    assert found == (output_ids(json.loads(usual.sent)) if asks else None)
    assert found != []
