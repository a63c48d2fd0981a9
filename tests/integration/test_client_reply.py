"""What a client is given of a reply: the engine's bytes, less what it did not ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from helpers.streams import assembled

from integration.places import Places
from integration.routing import EXPERTS, KINDS, POSITIONS, Recorded, recorded, text_of, without
from integration.stand import user
from ops.simulator.process import SimulatorProcess

Mode = Literal["auto", "verbatim", "lean"]
RETURN = {EXPERTS: "return_routed_experts", POSITIONS: "return_indexer_topk"}
RETRY = {"x-stainless-retry-count": "1"}
WISHES: list[tuple[str, ...]] = [(), (EXPERTS,), (POSITIONS,), KINDS]


@pytest.fixture(scope="module", params=["auto", "verbatim", "lean"])
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


@pytest.fixture(scope="module")
def npy(mode: Mode, vllm: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_CLIENT_REPLY": mode}
    with recorded(places.new("npy"), vllm.base_url, environment) as made:
        yield made


def given(mode: Mode, sent: bytes, asked: tuple[str, ...]) -> bytes:
    """What a client that asked for these kinds must be given of the engine's bytes."""
    if mode == "verbatim":
        return sent
    hidden = KINDS if mode == "lean" else [kind for kind in KINDS if kind not in asked]
    return without(sent, *hidden)


@pytest.mark.parametrize("asked", WISHES)
@pytest.mark.parametrize("nested", [False, True])
def test_only_the_values_that_were_not_asked_for_are_missing(
    line: Recorded, mode: Mode, asked: tuple[str, ...], nested: bool
) -> None:
    wish = {"experts": {"nested": nested}, "indexer_topk": {"nested": nested}}
    talk = line.talk()
    body: dict[str, Any] = {**{RETURN[kind]: True for kind in asked}, "sim": wish}
    reply = talk.say("Hello", **body)
    sent = line.sent
    assert all(text_of(sent, kind) not in (None, b"null") for kind in KINDS)
    assert reply.content == given(mode, sent, asked)
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


@pytest.mark.parametrize("wish", [True, False])
def test_a_npy_value_is_cut_out_alike(npy: Recorded, mode: Mode, wish: bool) -> None:
    talk = npy.talk()
    reply = talk.say("Hello", return_routed_experts=wish)
    assert reply.content == given(mode, npy.sent, (EXPERTS,) if wish else ())
    again = talk.chat([user("Hello")], headers=RETRY, return_routed_experts=wish)
    assert again.content == reply.content


def test_a_retry_of_an_older_turn_has_null_for_what_was_tombstoned(line: Recorded, mode: Mode) -> None:
    talk = line.talk(rollback_window=0)
    key, body = {"idempotency-key": "first"}, {RETURN[kind]: True for kind in KINDS}
    talk.say("One", headers=key, **body)
    sent = line.sent
    talk.say("Two")
    again = talk.chat([user("One")], headers=key, **body)
    assert again.status_code == 200
    assert again.content == without(sent, *KINDS)


def test_another_clients_wish_is_heard_on_its_own_retry(line: Recorded, mode: Mode) -> None:
    """What is shown is settled by the request that is answered, and a wish is part of the body."""
    talk = line.talk()
    talk.say("One", headers={"idempotency-key": "k"}, return_routed_experts=True)
    other = talk.chat([user("One")], headers={"idempotency-key": "k"})
    assert other.status_code == 422


def test_a_stream_shows_no_payload_and_the_turn_has_it(line: Recorded, mode: Mode) -> None:
    talk = line.talk()
    response = talk.chat([user("Hello")], stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    message = json.loads(line.sent)["choices"][0]["message"]
    assert assembled(response.text)["choices"][0]["message"]["content"] == message["content"]
    assert not [kind for kind in KINDS if kind in response.text]
    assert [one["kind"] for one in talk.committed()[0]["payloads"]] == [*KINDS]


@pytest.mark.parametrize("asked", [(), KINDS])
def test_large_values_are_cut_out_alike(line: Recorded, mode: Mode, asked: tuple[str, ...]) -> None:
    """Megabytes, over many pieces."""
    wish = {"experts": {"layers": 40, "top_k": 8, "experts": 256}, "completion_tokens": 1200}
    talk = line.talk()
    body: dict[str, Any] = {**{RETURN[kind]: True for kind in asked}, "sim": wish}
    reply = talk.say("Hello", **body)
    assert len(line.sent) > 2_000_000
    assert reply.content == given(mode, line.sent, asked)
    assert talk.chat([user("Hello")], headers=RETRY, **body).content == reply.content


@pytest.fixture(scope="module")
def bare(mode: Mode, sglang: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    """A server that asks for no payload."""
    with recorded(places.new("bare"), sglang.base_url, {"TURNLOG_CLIENT_REPLY": mode}) as made:
        yield made


def test_a_reply_without_payloads_is_the_engines_bytes(bare: Recorded) -> None:
    assert bare.talk().say("Hello").content == bare.sent


def test_what_comes_unasked_is_not_shown(bare: Recorded, mode: Mode) -> None:
    reply = bare.talk().say("Hello", sim={"experts": {"unasked": True}, "indexer_topk": {}})
    assert all(text_of(bare.sent, kind) for kind in KINDS)
    assert reply.content == given(mode, bare.sent, ())


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def only_asked(request: pytest.FixtureRequest, places: Places) -> Iterator[Recorded]:
    engine: SimulatorProcess = request.getfixturevalue(request.param)
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_CLIENT_REPLY": "asked"}
    with recorded(places.new("asked"), engine.base_url, environment) as made:
        yield made


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"logprobs": False, "return_routed_experts": True}])
def test_only_what_was_asked_for_is_given(only_asked: Recorded, asked: dict[str, bool]) -> None:
    talk = only_asked.talk()
    reply = talk.say("Hello", **asked)
    expected = json.loads(given("auto", only_asked.sent, (EXPERTS,) if asked.get(RETURN[EXPERTS]) else ()))
    if not asked.get("logprobs"):
        for home in (expected["choices"][0], expected["choices"][0].get("meta_info", {})):
            home.update({name: None for name in home if name.endswith("logprobs")})
    assert reply.json() == expected
    assert (text_of(reply.content, EXPERTS) not in (None, b"null")) == (RETURN[EXPERTS] in asked)
    assert talk.chat([user("Hello")], headers=RETRY, **asked).content == reply.content
    [row] = talk.rows()
    assert all(
        logprob < 0 for logprob, is_sampled in zip(row["logprobs"], row["sampled_mask"], strict=True) if is_sampled
    )
