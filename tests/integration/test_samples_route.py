"""`POST /sessions/{id}/samples`: read with safetensors' own package and compared with the export."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from transformers import AutoTokenizer

from integration.places import Places
from integration.routing import BOTH
from integration.stand import WEATHER, Stand, Talk, error_of, serving
from ops.simulator.process import SimulatorProcess

DTYPES = {
    "tokens": "int64",
    "loss_mask": "uint8",
    "rollout_log_probs": "float64",
    "rollout_routed_experts": "int32",
    "rollout_indexer_topk": "int32",
}
SAMPLE = {
    *("response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata", "nulls"),
    *("reward", "spec_info"),
}
NESTED = {"indexer_topk": {"nested": True}}

Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def routed(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """Capture mode, with payloads."""
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with serving(places.new("routed"), sglang.base_url, environment=environment) as stand:
        yield stand


def post(stand: Stand, talk: Talk, **body: Any) -> tuple[Tensors, dict[str, Any]]:
    """The tensors, and the JSON beside them; each is where it belongs, and no sample lacks one without saying so."""
    response = stand.http.post(f"{talk.path}/samples", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    tensors = safetensors.numpy.load(response.content)
    meta = tensors.pop("_samples_meta")
    assert (meta.dtype, meta.ndim) == (np.uint8, 1)
    found: dict[str, Any] = json.loads(meta.tobytes())
    assert found.keys() == {"samples", "session_metadata", "empty_reason"}
    expected = {
        f"{name}.{number}"
        for number, sample in enumerate(found["samples"])
        for name in DTYPES.keys() - set(sample["nulls"])
    }
    assert tensors.keys() == expected
    assert {name: tensor.dtype.name for name, tensor in tensors.items()} == {
        name: DTYPES[name.split(".")[0]] for name in tensors
    }
    for sample in found["samples"]:
        assert sample.keys() == SAMPLE
        assert set(sample["nulls"]) <= {"rollout_routed_experts", "rollout_indexer_topk"}
    return tensors, found


def check(tensors: Tensors, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Each sample is the export's row."""
    assert len(meta["samples"]) == len(rows)
    for number, (sample, row) in enumerate(zip(meta["samples"], rows, strict=True)):
        start = row["prompt_length"]
        assert tensors[f"tokens.{number}"].tolist() == row["tokens"]
        assert tensors[f"loss_mask.{number}"].tolist() == row["loss_mask"][start:]
        expected = np.array(row["logprobs"][start:], np.float64)
        assert tensors[f"rollout_log_probs.{number}"].tobytes() == expected.tobytes()
        assert (sample["response_length"], sample["status"]) == (row["response_length"], row["status"])
        assert len(row["tokens"]) == start + sample["response_length"]
        ours = sample["metadata"]["turnlog"]
        for name in ("session_id", "segment", "group_id", "attempt", "status"):
            assert ours.get(name) == row[name], name
        assert sample["prefix_cache_info"]["total_prompt_tokens"] == sum(s["output_start"] for s in row["turns"])


def payload(row: dict[str, Any], kind: str) -> np.ndarray[Any, Any]:
    one = row if kind == "routed_experts" else row[kind]
    data = base64.b64decode(one["routed_experts" if kind == "routed_experts" else "data"])
    return np.frombuffer(data, one["dtype"]).reshape(one["shape"])


def with_tools(stand: Stand) -> Talk:
    talk = stand.talk(group_id="g", attempt=3)
    talk.say("Weather?", tools=[WEATHER], sim={"tool_calls": True, "weight_version": "4", **NESTED})
    calls = talk.messages[-1]["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "22 °C"} for call in calls]
    talk.add(*results, tools=[WEATHER], sim={"tool_calls": False, "weight_version": "5", **NESTED})
    talk.say("Thanks", tools=[WEATHER], sim={"tool_calls": False, "weight_versions": ["5", "6"], **NESTED})
    return talk


def test_a_session_with_tools_is_one_sample_with_all_its_rows(routed: Stand) -> None:
    talk = with_tools(routed)
    tensors, meta = post(routed, talk, max_seq_len=None)
    [row] = talk.rows(replay="true")
    check(tensors, meta, [row])
    [sample] = meta["samples"]
    assert (meta["empty_reason"], sample["nulls"]) == (None, [])
    assert sample["weight_versions"] == ["4", "5", "5", "6"]
    assert np.array_equal(tensors["rollout_routed_experts.0"], payload(row, "routed_experts"))
    assert tensors["rollout_routed_experts.0"].shape == (len(row["tokens"]) - 1, 4, 2)
    assert np.array_equal(tensors["rollout_indexer_topk.0"], payload(row, "indexer_topk"))
    cached = sum(one.get("cached_tokens") or 0 for one in talk.committed())
    assert sample["prefix_cache_info"]["cached_tokens"] == cached


def test_a_driver_may_bring_its_metadata_and_the_reward(routed: Stand) -> None:
    talk = with_tools(routed)
    _, meta = post(routed, talk, metadata={"exit": "solved"}, reward=0.25)
    assert meta["session_metadata"]["agent"] == {"exit": "solved"}
    assert [sample["metadata"]["exit"] for sample in meta["samples"]] == ["solved"]
    assert [sample["reward"] for sample in meta["samples"]] == [0.25] == [row["reward"] for row in talk.rows()]
    for wrong in ({"reward": "1"}, {"reward": True}, {"metadata": []}, {"metadata": {"a": "b" * 70_000}}):
        assert error_of(routed.http.post(f"{talk.path}/samples", json=wrong)) == (400, "invalid_request")
    assert routed.http.delete(talk.path).status_code == 204
    refused = routed.http.post(f"{talk.path}/samples", json={"reward": 1.0})
    assert error_of(refused) == (404, "session_closed")
    assert talk.events()[-1]["type"] == "SessionClosed", "nothing was assigned"


def test_an_overlong_turn_is_cut_and_not_lost(stand: Stand) -> None:
    """As miles' drivers expect: without overlong answers training would be biased against them."""
    talk = stand.talk()
    talk.say("A long answer, please", sim={"finish_reason": "length"})
    [row] = talk.rows()
    length = row["turns"][0]["output_start"] + 2
    assert talk.rows(max_seq_len=length) == []
    [reason] = talk.rows(max_seq_len=length, explain="true")
    assert reason["excluded"] == "max_seq_len: no turn fits"
    tensors, meta = post(stand, talk, max_seq_len=length)
    [sample] = meta["samples"]
    assert (sample["response_length"], sample["status"], meta["empty_reason"]) == (2, "truncated", None)
    assert tensors["tokens.0"].tolist() == row["tokens"][:length]
    _, meta = post(stand, talk, max_seq_len=length - 2)
    assert (meta["samples"], meta["empty_reason"]) == ([], "all_truncated")
    [reason] = talk.rows(max_seq_len=length - 2, truncate="token", explain="true")
    assert reason["excluded"] == "max_seq_len: no sampled token fits"


def test_a_middle_turns_status_is_the_rows_but_not_the_samples(stand: Stand) -> None:
    """miles' drivers expect the last turn's; every other shape tells what the row holds."""
    talk = stand.talk()
    for reason in ("stop", "length", "stop"):
        talk.say(reason, sim={"finish_reason": reason})
    [row] = talk.rows()
    assert [span["finish_reason"] for span in row["turns"]] == ["stop", "length", "stop"]
    assert row["status"] == "truncated"
    told = {shape: talk.rows(shape=shape)[0] for shape in ("slime", "trl", "miles")}
    assert (told["slime"]["status"], told["trl"]["status"], told["miles"]["status"]) == (
        "truncated",
        "truncated",
        "completed",
    )
    assert told["miles"]["metadata"]["turnlog"]["status"] == "completed"
    for shape, status in (("turnlog", "truncated"), ("miles", "completed")):
        assert len(talk.rows(shape=shape, status=status)) == 1
        other = {"truncated": "completed", "completed": "truncated"}[status]
        assert [row["excluded"] for row in talk.rows(shape=shape, status=other, explain="true")] == [
            f"status is {status}"
        ]
    _, meta = post(stand, talk)
    [sample] = meta["samples"]
    assert (sample["status"], sample["metadata"]["turnlog"]["status"]) == ("completed", "completed")


def test_a_tree_has_nodes_and_leaves_by_the_ids_that_agents_saw(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    first = talk.say("One").json()["id"]
    begun = talk.messages
    replies = [first, talk.say("Two").json()["id"]]
    talk.messages = begun
    replies += [talk.say("Instead", max_tokens=1, sim={"completion_tokens": 1}).json()["id"]]
    _, meta = post(stand, talk)
    assert meta["session_metadata"].items() <= talk.state()["metadata"].items()
    tree, rows = meta["session_metadata"]["tree"], talk.rows()
    assert [(node["id"], node["parent"], node["seq"]) for node in tree["nodes"]] == [(1, None, 0), (2, 1, 1), (3, 1, 2)]
    assert [node["response_id"] for node in tree["nodes"]] == replies
    assert [node["truncated"] for node in tree["nodes"]] == [
        row["turns"][-1]["finish_reason"] == "length" for row in (rows[0], *rows)
    ]
    for leaf, row, sample in zip(tree["leaves"], rows, meta["samples"], strict=True):
        assert sample["metadata"]["leaf"] == leaf
        assert leaf["path_node_ids"] == [turn["turn"] for turn in row["turns"]]
        node = next(node for node in tree["nodes"] if node["id"] == leaf["node_id"])
        last = row["turns"][-1]
        assert (node["completion_span"], node["num_tokens"]) == (
            [last["output_start"], last["end"]],
            len(row["tokens"]),
        )


def test_the_response_is_decoded_where_there_is_a_tokenizer(tito: Stand, tokenizer: str) -> None:
    talk = with_tools(tito)
    tensors, meta = post(tito, talk)
    [row] = talk.rows()
    check(tensors, meta, [row])
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    expected = loaded.decode(row["tokens"][row["prompt_length"] :])
    assert meta["samples"][0]["response"] == expected
    assert "22 °C" in expected
    _, cut = post(tito, talk, max_seq_len=row["turns"][0]["output_start"] + 3)
    start = row["prompt_length"]
    assert cut["samples"][0]["response"] == loaded.decode(row["tokens"][start : start + 3])
    assert meta["session_metadata"]["tito_session_mismatch"] == []


def test_an_empty_session_has_no_records(stand: Stand) -> None:
    tensors, meta = post(stand, stand.talk())
    assert (tensors, meta["samples"], meta["empty_reason"]) == ({}, [], "no_records")
    assert meta["session_metadata"]["accumulated_token_ids"] == []


def test_a_bad_body_is_400_and_names_the_field(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    lengths = (f'{{"max_seq_len": {value}}}' for value in (0, -5, '"10"', "true", 1.5))
    wrong = [*((body, "max_seq_len") for body in lengths), ('{"max_len": 5}', "max_len")]
    for body, told in (*wrong, ("[]", "body"), ("null", "body"), ("{", "JSON"), ("\x00", "JSON")):
        response = stand.http.post(f"{talk.path}/samples", content=body)
        assert error_of(response) == (400, "invalid_request")
        assert told in response.json()["error"]["message"]
