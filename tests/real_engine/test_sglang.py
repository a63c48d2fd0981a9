"""Turns at the published SGLang, element by element beside what its scripted scheduler sampled."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fault.verified import acknowledgement, verified
from helpers.streams import assembled
from integration.patient import answered
from integration.stand import WEATHER, Stand, Talk, error_of, until, user
from integration.test_token_routes import SGLANG, VLLM, Client, sampled
from integration.tito import checked

from ops.engine.process import SERVED_AS
from real_engine.compared import Lane, laid, replayed
from real_engine.test_staged import staged_turns
from tests.tools.engine_prompts import Chats, Comparison
from tests.tools.real_sglang.plays import Play, Sampled, experts_of
from tests.tools.real_sglang.process import SglangProcess
from tests.tools.tito_check import tokenizers

pytestmark = [pytest.mark.real_sglang, pytest.mark.parametrize("kind", ["sglang-parsers"], indirect=True)]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nLet me look.\n</think>\n\n"
ANSWER = "The answer is  42 — 日本 🚀."
LONG = "plain words that go on for some tokens here and then come to an end"
HELD = 6
SHAPE = (2, 4)
STAGING = {"TURNLOG_UPSTREAM_DIALECT": "sglang", "TURNLOG_STAGE_TOKENS_S": "0.0001", "TURNLOG_LEASE_S": "1"}


@pytest.fixture(scope="module", params=["capture", "tito"])
def lane(
    request: pytest.FixtureRequest, engine: SglangProcess, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lane]:
    """One server for all tests: their sessions are their own."""
    environment = {"TURNLOG_TOKENIZER": str(model)} if request.param == "tito" else {}
    with laid(tmp_path_factory.mktemp("lane"), engine, model, environment, is_scripted=True) as made:
        yield made


def require_sampled(engine: SglangProcess, talk: Talk, turns: int) -> list[dict[str, Any]]:
    """The session's rows, in which each turn is what the scheduler sampled of its prompt, part by part."""
    known = engine.plays.sampled()
    rows = talk.rows()
    assert sum(len(row["turns"]) for row in rows) == turns
    for row in rows:
        for span in row["turns"]:
            at = span["output_start"]
            while at < span["end"]:
                part = next(one for one in known if is_part(one, row["tokens"], at, span["end"]))
                end = at + len(part.ids)
                assert row["loss_mask"][at:end] == [1] * len(part.ids)
                assert row["logprobs"][at:end] == part.logprobs
                assert row["weight_versions"][at:end] == versions_in(part)
                at = end
    assert replayed(rows).largest == 0
    return rows


def is_part(one: Sampled, tokens: Sequence[int], at: int, end: int) -> bool:
    until_ = at + len(one.ids)
    return bool(one.ids) and until_ <= end and (one.prompt, one.ids) == (tokens[:at], tokens[at:until_])


def versions_in(part: Sampled) -> list[int]:
    starts = [0, *(end for _, end in part.versions)]
    return [int(name) for start, (name, end) in zip(starts, part.versions, strict=False) for _ in range(start, end)]


def said(talk: Talk, text: str, **fields: Any) -> dict[str, Any]:
    """The message of a turn, whose history grows."""
    reply: dict[str, Any] = talk.say(text, model=SERVED_AS, **fields).json()
    return reply


CHATS = [
    pytest.param(Play(THOUGHT + ANSWER, step=1), {}, id="thought"),
    pytest.param(Play(f"{THOUGHT}I will call.\n{CALL}", cached=3), {"tools": [WEATHER]}, id="call"),
    pytest.param(Play(f"{THOUGHT}{CALL}\n{CALL}"), {"tools": [WEATHER]}, id="calls alone"),
    pytest.param(Play(THOUGHT + CALL), {}, id="a call of no tool"),
    pytest.param(Play(f"{THOUGHT}{CALL}"), {"tools": [WEATHER], "max_tokens": 30}, id="a call that is cut"),
    pytest.param(Play(LONG, step=2), {}, id="reasoning that is never closed"),
    pytest.param(Play(LONG, step=2), {"chat_template_kwargs": {"enable_thinking": False}}, id="no thinking"),
    pytest.param(Play(THOUGHT + LONG), {"separate_reasoning": False}, id="reasoning stays"),
    pytest.param(Play(THOUGHT + LONG), {"max_tokens": 3}, id="cut"),
    pytest.param(Play(LONG, ends="length"), {}, id="context is full"),
    pytest.param(Play(""), {}, id="nothing but its end"),
]


@pytest.mark.parametrize(("play", "fields"), CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_chats(lane: Lane, engine: SglangProcess, play: Play, fields: Mapping[str, Any], stream: bool) -> None:
    """The message is as SGLang's parsers read it; the next turn goes on from it."""
    talk = lane.stand.talk()
    asked = [user(engine.plays.mark(play))]
    theirs = chat_of(engine, talk.body(asked, **fields))
    response = talk.chat(asked, **{**fields, "model": SERVED_AS, "stream": stream})
    assert response.status_code == 200, response.text
    ours = assembled(response.text) if stream else response.json()
    assert answer_in(ours) == answer_in(theirs)
    given = ours["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in given.get("tool_calls") or ()]
    talk.messages = [*asked, given, *results]
    said(talk, engine.plays.mark(Play(THOUGHT + ANSWER)), **fields)
    rows = require_sampled(engine, talk, 2)
    assert len(rows) == 1 or not lane.builds_prompts


def chat_of(engine: SglangProcess, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine answers to a chat that comes to it."""
    response = httpx.post(f"{engine.base_url}/v1/chat/completions", json={**body, "model": SERVED_AS}, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def answer_in(reply: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The message, without what no two replies share, and why it ended."""
    [choice] = reply["choices"]
    message = {name: value for name, value in choice["message"].items() if value}
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}, choice["finish_reason"]


@pytest.mark.parametrize("route", [VLLM, SGLANG])
def test_clients_of_ids(lane: Lane, engine: SglangProcess, model: Path, route: str) -> None:
    client = Client(lane.stand, route)
    encode = partial(tokenizers.load(model).encode, add_special_tokens=False)
    limits = {"max_tokens" if route == VLLM else "max_new_tokens": 40, "temperature": 0.5}
    for play in (Play(ANSWER, step=2), Play(LONG, experts=SHAPE), Play(LONG + LONG + LONG)):
        reply = client.turn(*encode(engine.plays.mark(play)), sampling_params=limits)
        ids, logprobs = sampled(reply)
        own = next(one for one in engine.plays.sampled() if one.prompt + one.ids == client.ids)
        assert (ids, logprobs) == (own.ids, own.logprobs)
    [row] = require_sampled(engine, client.talk, 3)
    assert row["tokens"] == client.ids


def test_completions_of_text(lane: Lane, engine: SglangProcess) -> None:
    talk, text = lane.stand.talk(), ""
    for play in (Play(ANSWER, step=1), Play(LONG)):
        text += engine.plays.mark(play)
        reply = lane.stand.http.post(f"{talk.path}/v1/completions", json={"model": SERVED_AS, "prompt": text}).json()
        text += reply["choices"][0]["text"]
    require_sampled(engine, talk, 2)


Ask = Callable[[Lane, Talk, str], httpx.Response]


def by_chat(lane: Lane, talk: Talk, mark: str) -> httpx.Response:
    return talk.chat([user(mark)], model=SERVED_AS)


def by_completion(lane: Lane, talk: Talk, mark: str) -> httpx.Response:
    body = {"model": SERVED_AS, "prompt": mark, "max_tokens": 99}
    return lane.stand.http.post(f"{talk.path}/v1/completions", json=body)


def by_ids(lane: Lane, talk: Talk, mark: str) -> httpx.Response:
    body = {"input_ids": tokenizers.load(lane.model).encode(mark, add_special_tokens=False), "return_logprob": True}
    return lane.stand.http.post(talk.path + SGLANG, json=body)


ASKS = pytest.mark.parametrize("ask", [by_chat, by_completion, by_ids])


def finish_of(response: httpx.Response) -> str:
    reply = response.json()
    if "meta_info" in reply:
        return str(reply["meta_info"]["finish_reason"]["type"])
    return str(reply["choices"][0]["finish_reason"])


def aborts(stand: Stand, engine: SglangProcess, mark: str) -> None:
    """The engine ends its generations by itself."""
    assert httpx.post(f"{engine.base_url}/abort_request", json={"abort_all": True}).status_code == 200


def updates(stand: Stand, engine: SglangProcess, mark: str, mode: str = "abort") -> str:
    """New weights behind a pause, after which what was held goes on: their version."""
    version = str(int(httpx.get(f"{engine.base_url}/model_info").json()["weight_version"]) + 1)
    assert stand.http.post("/fleet/pause", json={"mode": mode}).status_code == 200
    updated = {"new_version": version, "abort_all_requests": False}
    assert httpx.post(f"{engine.base_url}/update_weight_version", json=updated).status_code == 200
    # The scheduler, which answers in order, has taken the pause by now; the pause's own reply does not wait for it.
    engine.plays.release(mark)
    assert stand.http.post("/fleet/resume").status_code == 200
    return version


@pytest.mark.parametrize("on_abort", ["return", "continue", "fail"])
@pytest.mark.parametrize("play", [Play(LONG, waits=True), Play(LONG, step=2, hold_at=HELD)], ids=["queued", "running"])
@pytest.mark.parametrize("end", [aborts, updates])
@ASKS
def test_aborts(
    lane: Lane,
    engine: SglangProcess,
    ask: Ask,
    end: Callable[[Stand, SglangProcess, str], object],
    play: Play,
    on_abort: str,
) -> None:
    """Only what a pause aborts is continued, and then by the weights of after it."""
    talk, mark = lane.stand.talk(on_abort=on_abort), engine.plays.mark(play)
    turn = lane.stand.meanwhile(ask, lane, talk, mark)
    until(lambda: engine.plays.is_held(mark))
    end(lane.stand, engine, mark)
    response = turn.result()
    if on_abort == "fail":
        assert error_of(response) == (503, "generation_aborted")
        assert require_sampled(engine, talk, 0) == []
        return
    assert response.status_code == 200, response.text
    is_continued = end is updates and on_abort == "continue"
    [committed] = talk.committed()
    assert finish_of(response) == ("stop" if is_continued else "abort")
    assert is_continued or committed["output_tokens"] == (0 if play.waits else HELD)
    [row] = require_sampled(engine, talk, 1)
    assert row["status"] == ("completed" if is_continued else "aborted")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@ASKS
def test_an_update_in_the_middle_of_a_turn(lane: Lane, engine: SglangProcess, ask: Ask, mode: str) -> None:
    """The engine goes on by itself, and says which weights sampled what."""
    talk, mark = lane.stand.talk(), engine.plays.mark(Play(LONG, step=2, hold_at=HELD))
    turn = lane.stand.meanwhile(ask, lane, talk, mark)
    until(lambda: engine.plays.is_held(mark))
    version = updates(lane.stand, engine, mark, mode)
    assert turn.result().status_code == 200
    [committed] = talk.committed()
    ends = {span["version"]: span["end"] for span in committed["weight_versions"]}
    assert ends == {str(int(version) - 1): HELD, version: committed["output_tokens"]}
    require_sampled(engine, talk, 1)


@ASKS
def test_routed_experts(engine: SglangProcess, model: Path, tmp_path: Path, ask: Ask) -> None:
    """Each row is the engine's for the token at that position."""
    layers, top_k = SHAPE
    environment = {
        "TURNLOG_REPLAY": "routed_experts",
        "TURNLOG_MOE_LAYERS": str(layers),
        "TURNLOG_MOE_TOPK": str(top_k),
    }
    with laid(tmp_path, engine, model, environment, is_scripted=True) as lane:
        talk = lane.stand.talk()
        assert ask(lane, talk, engine.plays.mark(Play(THOUGHT + ANSWER, experts=SHAPE))).status_code == 200
        [row] = talk.rows(replay="true")
        require_sampled(engine, talk, 1)
    rows = np.frombuffer(base64.b64decode(row["routed_experts"]), row["dtype"]).reshape(row["shape"])
    assert rows.shape == (len(row["tokens"]) - 1, layers, top_k)
    assert rows.reshape(len(rows), -1).tolist() == [experts_of(at, layers, top_k) for at in range(len(rows))]


@pytest.fixture(scope="module")
def staging(engine: SglangProcess, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    environment = {**STAGING, "TURNLOG_TOKENIZER": str(model)}
    with checked(tmp_path_factory.mktemp("staging"), engine.base_url, environment=environment) as stand:
        yield stand


@pytest.mark.parametrize(("play", "fields"), CHATS[:-1])
def test_a_staged_reply_is_the_chats(
    engine: SglangProcess, staging: Stand, play: Play, fields: Mapping[str, Any]
) -> None:
    """Through `/generate`, whose stream has ids, and the engine's own parsers."""
    mark = engine.plays.mark(msgspec.structs.replace(play, hold_at=1))
    talk, before = staging.talk(), staged_turns(staging)
    turn = staging.meanwhile(said, talk, mark, **fields)
    until(partial(has_staged_more, staging, before), 10.0)
    engine.plays.release(mark)
    assert answer_in(turn.result()) == answer_in(chat_of(engine, talk.body([user(mark)], **fields)))
    require_sampled(engine, talk, 1)


def has_staged_more(stand: Stand, turns: float, outcome: str = "staged") -> bool:
    return staged_turns(stand, outcome) > turns


def test_staged_tokens_outlive_kills(engine: SglangProcess, staging: Stand, model: Path) -> None:
    text = THOUGHT + f"{LONG}. " * 4
    mark, talk = engine.plays.mark(Play(text, step=3, hold_at=15)), staging.talk()
    body = {**talk.body([user(mark)]), "model": SERVED_AS}
    before, turn = staged_turns(staging), staging.meanwhile(answered, staging, talk, body, 120.0)
    for counted, outcome in ((before, "staged"), (0.0, "restored")):  # a new process counts anew
        until(partial(has_staged_more, staging, counted, outcome))
        staging.server.kill()
        staging.server.start()
    engine.plays.release(mark)
    response = turn.result()
    [row] = talk.rows()
    [committed] = talk.committed()
    assert len(committed["parts"]) >= 2
    encoded = tokenizers.load(model).encode(text + "<|im_end|>", add_special_tokens=False)
    assert [token for token, own in zip(row["tokens"], row["loss_mask"], strict=True) if own] == encoded
    assert replayed([row]).largest == 0
    assert answer_in(response.json()) == answer_in(chat_of(engine, body))
    verified(staging, [acknowledgement(talk.id, response)])


@pytest.mark.parametrize(
    ("fields", "play"),
    [
        pytest.param({"temperature": -1}, Play(), id="no temperature"),
        pytest.param({"max_tokens": 40_000}, Play(), id="more than the context"),
        pytest.param({}, Play(LONG, ends="abort", status=400, message="The scheduler refuses."), id="scheduler"),
        pytest.param({"messages": [user("word " * 40_000)]}, Play(), id="long prompt"),
    ],
)
def test_what_the_engine_refuses(lane: Lane, engine: SglangProcess, fields: Mapping[str, Any], play: Play) -> None:
    """The client reads why, with the engine's status, and the session goes on as if it had not asked."""
    talk = lane.stand.talk()
    body = {**talk.body([user(engine.plays.mark(play))], model=SERVED_AS), **fields}
    theirs = httpx.post(f"{engine.base_url}/v1/chat/completions", json=body, timeout=60)
    ours = lane.stand.http.post(talk.chat_path, json=body)
    assert ours.status_code == theirs.status_code == 400
    assert talk.committed() == []
    said(talk, engine.plays.mark(Play(THOUGHT + ANSWER)))
    require_sampled(engine, talk, 1)


def test_an_abort_of_the_scheduler(lane: Lane, engine: SglangProcess) -> None:
    """Without a status it is a reply, whose tokens are there."""
    talk = lane.stand.talk()
    reply = said(talk, engine.plays.mark(Play(LONG, ends="abort")))
    assert reply["choices"][0]["finish_reason"] == "abort"
    require_sampled(engine, talk, 1)


def test_ids_of_prompts(engine: SglangProcess, model: Path) -> None:
    """Random chats: the ids of the engine's prompt are those of the one that Turnlog makes."""
    with httpx.Client(base_url=engine.base_url, timeout=60) as http:
        compared = Comparison(http, str(model), "sglang")
        for number in range(150):
            compared.chat(Chats(f"1/{number}", 0.08).chat())
    assert compared.wrong == []
    assert compared.counts["the same ids"] > 100, compared.counts
