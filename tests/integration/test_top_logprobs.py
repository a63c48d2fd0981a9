"""The most likely tokens, the prompts' logprobs and the engines' counters: asked for, kept, exported."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from integration.interrupting import interrupted, uncut
from integration.places import Places
from integration.stand import SPOKEN, Stand, error_of, user
from integration.tito import checked
from integration.writing import Writing
from ops.simulator.process import SimulatorProcess

K = 5
Pairs = list[tuple[int, float]]


def sglang_top(reply: dict[str, Any]) -> list[Pairs]:
    rows = reply["choices"][0]["meta_info"]["output_top_logprobs"]
    return [[(token, logprob) for logprob, token, _ in row] for row in rows]


def vllm_top(reply: dict[str, Any]) -> list[Pairs]:
    """The sampled token is first in each."""
    [choice] = reply["choices"]
    shown = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    rows = [[(int(one["token"].removeprefix("token_id:")), one["logprob"]) for one in row] for row in shown]
    assert [row[0][0] for row in rows] == choice["token_ids"]
    return rows


def completion_top(reply: dict[str, Any]) -> list[Pairs]:
    rows = reply["choices"][0]["logprobs"]["top_logprobs"]
    return [[(int(name.removeprefix("token_id:")), logprob) for name, logprob in row.items()] for row in rows]


def padded(rows: list[Pairs], k: int) -> tuple[list[list[int]], list[list[float]]]:
    ordered = [sorted(row, key=lambda pair: -pair[1])[:k] for row in rows]
    ids = [[token for token, _ in row] + [-1] * (k - len(row)) for row in ordered]
    logprobs = [[float(np.float32(one)) for _, one in row] + [-9999.0] * (k - len(row)) for row in ordered]
    return ids, logprobs


def require_top(row: dict[str, Any], expected: dict[int, list[Pairs]], k: int) -> None:
    """`expected`: by turn, its output's; nothing stands anywhere else."""
    rows: list[Pairs] = [[] for _ in row["tokens"]]
    for span in row["turns"]:
        if span["turn"] in expected:
            rows[span["output_start"] : span["end"]] = expected[span["turn"]]
    ids, logprobs = padded(rows, k)
    assert row["top_ids"] == ids
    assert np.allclose(row["top_logprobs"], logprobs, atol=0, rtol=1e-7)


@pytest.fixture
def either(request: pytest.FixtureRequest, places: Places) -> Stand:
    found: Stand = request.getfixturevalue("stand" if request.param == "sglang" else "vllm_stand")
    return found


BOTH = pytest.mark.parametrize(
    ("either", "top"), [("sglang", sglang_top), ("vllm", vllm_top)], ids=["sglang", "vllm"], indirect=["either"]
)


@BOTH
def test_what_a_turn_asked_for_is_exported(either: Stand, top: Callable[[Any], list[Pairs]]) -> None:
    talk = either.talk()
    first = talk.say("Hello", top_logprobs=K, sim={"speculative": [4, 12, 7]})
    talk.say("And then?")
    third = talk.say("So?", top_logprobs=2)
    expected = {1: top(first.json()), 3: top(third.json())}
    assert {len(one) for one in expected[1]} == {K}
    for k in (1, K, 20):
        [row] = talk.rows(top_k=k)
        require_top(row, expected, k)
    assert set(row["prompt_logprobs_mask"]) == {0}
    assert set(row["prompt_logprobs"]) == {0.0}
    [plain] = talk.rows()
    assert plain == {name: value for name, value in row.items() if name in plain}
    assert row.keys() - plain.keys() == {"top_ids", "top_logprobs", "prompt_logprobs", "prompt_logprobs_mask"}
    for asked in ("return_tokens_as_token_ids", "top_logprobs"):
        assert not either.engine_requests(talk.id)[1]["body"].get(asked)
    spans, events = row["turns"], talk.committed()
    counted = {"verify_steps": 4, "draft_tokens": 12, "accepted_tokens": 7}
    assert [span["speculative"] for span in spans] == [counted, None, None]
    assert [event.get("speculative") for event in events] == [counted, None, None]
    assert [span["cached_tokens"] for span in spans] == [event["cached_tokens"] for event in events]
    assert spans[1]["cached_tokens"] > 0
    forked = either.http.post(f"{talk.path}/fork", json={"turn": 3}).json()["sessions"][0]["session_id"]
    [copied] = either.rows(session_id=forked, top_k=20)
    assert [copied[name] for name in ("top_ids", "top_logprobs")] == [row[name] for name in ("top_ids", "top_logprobs")]
    response = either.http.post(f"{talk.path}/samples", json={})
    meta = json.loads(load(response.content)["_samples_meta"].tobytes())
    assert meta["samples"][0]["spec_info"] == {
        "spec_accept_token_num": 7,
        "spec_draft_token_num": 12,
        "spec_verify_ct": 4,
        "completion_token_num": spans[0]["end"] - spans[0]["output_start"],
    }


@BOTH
@pytest.mark.parametrize("protocol", SPOKEN)
def test_pinned_in_every_protocol(either: Stand, top: Callable[[Any], list[Pairs]], protocol: str) -> None:
    """Messages have no wish of their own: the session's creator has."""
    talk = either.talk(protocol, params={"top_logprobs": 3})
    talk.say("Hello")
    [record] = talk.state()["records"]
    [row] = talk.rows(top_k=3)
    require_top(row, {1: top(record["response"])}, 3)
    if protocol == "chat":
        assert record["request"]["top_logprobs"] == 3


def test_completions(vllm_stand: Stand, stand: Stand) -> None:
    """SGLang's name alternatives by their texts: nothing is kept."""
    for there, keeps in ((vllm_stand, True), (stand, False)):
        writing = Writing(there, params={"top_logprobs": 3})
        body = {"model": "m", "prompt": "Once", "prompt_logprobs": 1}
        response = there.http.post(writing.url, json=body)
        assert response.status_code == 200, response.text
        [row] = there.rows(session_id=writing.id, top_k=3)
        if keeps:
            first = row["prompt_length"]
            ids, logprobs = padded(completion_top(response.json()), 3)
            assert row["top_ids"][first:] == ids
            assert np.allclose(row["top_logprobs"][first:], logprobs, atol=0, rtol=1e-7)
            assert row["prompt_logprobs_mask"][:first] == [0, *[1] * (first - 1)]
        else:
            assert {one for ids in row["top_ids"] for one in ids} == {-1}
            assert set(row["prompt_logprobs_mask"]) == {0}


def require_prompt(row: dict[str, Any], prompt: list[dict[str, Any] | None], turn: int) -> None:
    """The new tokens of the turn's prompt have what vLLM says of them."""
    span = row["turns"][turn - 1]
    own = range(span["start"], span["output_start"])
    values = [None if (one := prompt[at]) is None else one[str(row["tokens"][at])]["logprob"] for at in own]
    assert [row["prompt_logprobs_mask"][at] for at in own] == [int(one is not None) for one in values]
    assert np.allclose([row["prompt_logprobs"][at] for at in own], [one or 0.0 for one in values])
    rows: list[Pairs] = [[(int(key), one["logprob"]) for key, one in (prompt[at] or {}).items()] for at in own]
    ids, _ = padded(rows, 2)
    assert [row["top_ids"][at] for at in own] == ids


def test_logprobs_of_a_prompt(vllm_stand: Stand) -> None:
    """Those of the turn's own tokens: what an earlier turn has is kept there."""
    talk = vllm_stand.talk()
    first = talk.say("Hello", prompt_logprobs=2)
    talk.say("And then?")
    third = talk.say("So?", prompt_logprobs=2, stream_mode="live")
    [row] = talk.rows(top_k=2)
    require_prompt(row, first.json()["prompt_logprobs"], 1)
    require_prompt(row, third.json()["prompt_logprobs"], 3)
    silent = row["turns"][1]
    assert not any(row["prompt_logprobs_mask"][silent["start"] : silent["end"]])
    assert not any(row["prompt_logprobs_mask"][row["turns"][0]["output_start"] : silent["start"]])


def test_what_is_refused(stand: Stand) -> None:
    talk = stand.talk()
    for name in ("top_logprobs", "prompt_logprobs"):
        for value in (21, -1, True, "5", 1.5):
            assert error_of(talk.chat([user("Hello")], **{name: value})) == (400, "invalid_request"), (name, value)
            created = stand.http.post("/sessions", json={"params": {name: value}})
            assert error_of(created) == (400, "invalid_request"), (name, value)
    assert talk.generations() == 0
    response = stand.http.post(Writing(stand).url, json={"model": "m", "prompt": "Once", "logprobs": 21})
    assert error_of(response) == (400, "invalid_request")
    talk.say("Hello", top_logprobs=2, return_flat_raw_output_top_logprobs=True)
    assert stand.engine_requests(talk.id)[-1]["body"]["return_flat_raw_output_top_logprobs"] is False


WHOLE: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "sim": {"completion_tokens": 9, "reasoning": False}}


@pytest.mark.parametrize(("tito", "top"), [("sglang", sglang_top), ("vllm", vllm_top)], indirect=["tito"])
def test_joined_generations(tito: Stand, top: Callable[[Any], list[Pairs]]) -> None:
    """As of a generation that was not interrupted."""
    rows = []
    for ask, more in ((interrupted, {"at": [3, 2]}), (uncut, {})):
        talk = tito.talk(on_abort="continue")
        counted = {**WHOLE, "sim": {**WHOLE["sim"], "speculative": [2, 4, 3]}}
        response = ask(tito, talk, **more, **counted, top_logprobs=K)  # type: ignore[operator]
        assert response.status_code == 200, response.text
        [row] = talk.rows(top_k=K)
        require_top(row, {1: top(response.json())}, K)
        rows.append((talk, row))
    (talk, joined), (_, whole) = rows
    assert len(talk.committed()[0]["parts"]) == 3
    assert joined["top_ids"] == whole["top_ids"]
    assert joined["top_logprobs"] == whole["top_logprobs"]
    if top is sglang_top:
        assert talk.committed()[0]["speculative"] == {"verify_steps": 6, "draft_tokens": 12, "accepted_tokens": 9}


FORMATS = ("parquet", "safetensors", "msgpack")


def test_formats_and_shapes(stand: Stand) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = stand.talk(group_id="top-formats")
    talk.say("Hello", top_logprobs=K)
    asked = {"session_id": talk.id, "top_k": 3}
    [row] = talk.rows(top_k=3)
    content = {name: stand.http.get("/export", params={**asked, "format": name}).content for name in FORMATS}
    table = parquet.read_table(io.BytesIO(content["parquet"]))
    tensors = load(content["safetensors"])
    unpacked = msgspec.msgpack.decode(content["msgpack"])
    for name, dtype in (("top_ids", "int32"), ("top_logprobs", "float32"), ("prompt_logprobs_mask", "uint8")):
        values = np.array(row[name], dtype)
        assert np.array_equal(np.array(table[name][0].as_py(), dtype), values)
        assert np.array_equal(tensors[f"{name}.0"], values)
        assert tensors[f"{name}.0"].dtype == dtype
        one = unpacked[name]
        assert np.array_equal(np.frombuffer(one["data"], one["dtype"]).reshape(one["shape"]), values)
    plain = stand.http.get("/export", params={"session_id": talk.id, "format": "parquet"}).content
    assert "top_ids" not in parquet.read_table(io.BytesIO(plain)).column_names
    for wrong in ({"shape": "slime"}, {"format": "atif"}, {"top_k": 0}, {"top_k": 21}, {"top_k": "x"}):
        assert stand.http.get("/export", params={**asked, **wrong}).status_code in (400, 422)
    assert stand.http.delete(talk.path).status_code == 204
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1}).status_code == 200
    fed = stand.http.get("/export/groups", params={"consumer": "top", "top_k": 3, "size": 1000})
    groups = {one["group_id"]: one for one in map(json.loads, fed.content.splitlines())}
    [of_group] = groups["top-formats"]["rows"]
    assert of_group["top_ids"] == row["top_ids"]


def _environment(tokenizer: str, dialect: str, stage: str = "0") -> dict[str, str]:
    return {
        "TURNLOG_TOKENIZER": tokenizer,
        "TURNLOG_UPSTREAM_DIALECT": dialect,
        "TURNLOG_STAGE_TOKENS_S": stage,
        "TURNLOG_ON_ABORT": "continue",
    }


@pytest.fixture(scope="module")
def joining(tokenizer: str, places: Places) -> Iterator[dict[str, Stand]]:
    """Servers that go on with what a pause has aborted; one stages its turns."""
    with (
        SimulatorProcess("--seed", "11") as sglang,
        SimulatorProcess("--seed", "12", "--dialect", "vllm") as vllm,
        SimulatorProcess("--seed", "11", "--incremental-streaming-output") as native,
        checked(places.new("top-sglang"), sglang.base_url, environment=_environment(tokenizer, "sglang")) as one,
        checked(places.new("top-vllm"), vllm.base_url, environment=_environment(tokenizer, "vllm")) as two,
        checked(
            places.new("top-native"), native.base_url, environment=_environment(tokenizer, "sglang", "0.01")
        ) as three,
    ):
        yield {"sglang": one, "vllm": two, "native": three}


def test_the_prompt_of_joined_generations(joining: dict[str, Stand]) -> None:
    """SGLang says it on the route for which it is staged; a chat has none. A joined turn's is its first part's."""
    for name, is_known in (("native", True), ("vllm", True), ("sglang", False)):
        stand = joining[name]
        talk = stand.talk()
        response = interrupted(stand, talk, [4], **WHOLE, prompt_logprobs=0)
        assert response.status_code == 200, response.text
        assert len(talk.committed()[0]["parts"]) == 2
        [row] = talk.rows(top_k=1)
        first = row["prompt_length"]
        assert row["prompt_logprobs_mask"][:first] == [0, *[int(is_known)] * (first - 1)], name
        assert all(value < 0 for value in row["prompt_logprobs"][1:first]) == is_known
