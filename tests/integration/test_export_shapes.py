"""Every shape in every format, made by a real server of real turns: read back, compared, cut and explained."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from integration.corpus import SHAPES, SINGLE, Corpus, filled, identity, parts
from integration.places import Places
from integration.reading import CONTAINERS, Row, differences, read
from ops.simulator.process import SimulatorProcess

NEEDS_REWARD = {"skyrl", "areal"}
NEEDS_SAMPLED = set(SINGLE) - {"turnlog"}


@pytest.fixture(scope="module")
def corpus(sglang: SimulatorProcess, places: Places) -> Iterator[Corpus]:
    with filled(places.new("shapes"), sglang.base_url) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("format", ["parquet", "safetensors", "msgpack"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_container_holds_what_ndjson_does(corpus: Corpus, shape: str, format: str) -> None:
    lines = corpus.read(shape=shape)
    found = corpus.read(shape=shape, format=format)
    if format == "safetensors":
        lines.sort(key=lambda row: "excluded" in row)
    assert {"excluded" in row for row in lines} == {True, False}
    if format == "parquet":
        lines = [in_one_layer(row) for row in lines]
    assert differences(lines, found) == []


def in_one_layer(row: Row) -> Row:
    """Flat rows as Parquet has them, whose columns have one type."""
    positions = row.get("rollout_indexer_topk")
    if positions and not isinstance(positions[0][0], list):
        return {**row, "rollout_indexer_topk": [[ids] for ids in positions]}
    return row


@pytest.mark.parametrize("shape", SINGLE)
def test_every_shape_has_the_tokens_masks_and_logprobs_in_step(corpus: Corpus, shape: str) -> None:
    rows = corpus.given(shape=shape)
    assert rows
    for row in rows:
        known = identity(shape, row)
        whole = corpus.turnlog(known["session_id"], known["segment"])
        tokens, mask, logprobs = parts(shape, row)
        assert (tokens, mask) == (whole["tokens"], whole["loss_mask"])
        assert np.array_equal(np.array(logprobs, np.float32), np.array(whole["logprobs"], np.float32))
        for name in ("group_id", "attempt", "status", "final", "cursor"):
            assert known.get(name) == whole[name], name


@pytest.mark.parametrize("shape", SINGLE)
def test_each_shape_leaves_out_what_it_cannot_hold_and_says_so(corpus: Corpus, shape: str) -> None:
    names = {
        ("empty", "no committed turn"): True,
        ("gone", "erased"): True,
        ("undone", "rolled back"): True,
        ("named", "no reward"): shape in NEEDS_REWARD,
        ("silent", "no token was sampled"): shape in NEEDS_SAMPLED,
    }
    told = {(corpus.name_of(row["session_id"]), row["excluded"]) for row in corpus.left_out(shape=shape)}
    assert told == {key for key, expected in names.items() if expected}
    given = {corpus.name_of(identity(shape, row)["session_id"]) for row in corpus.given(shape=shape)}
    missing = {name for name, reason in told if reason != "rolled back"}
    assert given == corpus.talks.keys() - missing


@pytest.mark.parametrize("shape", SINGLE)
def test_the_reward_stands_where_the_trainer_reads_it(corpus: Corpus, shape: str) -> None:
    name = {"verl": "reward_score", "skyrl": "rewards", "areal": "rewards"}.get(shape, "reward")
    for row in corpus.given(shape=shape):
        known = identity(shape, row)
        reward = corpus.turnlog(known["session_id"], known["segment"])["reward"]
        assert row[name] == ([reward] if shape == "areal" else reward)


@pytest.mark.parametrize("format", CONTAINERS)
@pytest.mark.parametrize(("shape", "name"), [("verl", "rm_scores"), ("skyrl", "rewards")])
def test_rewards_of_turns_stand_where_the_trainer_reads_them(
    corpus: Corpus, shape: str, name: str, format: str
) -> None:
    """One of a turn's, as a part of its session's: at the turn's last token, the rest at the row's."""
    talk = corpus.stand.talk()
    for text in ("One", "Two"):
        talk.say(text)
    first = talk.committed()[0]["turn"]
    for body in ({"reward": 1.0}, {"reward": 0.25, "turn": first}):
        assert corpus.stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
    asked = {"session_id": talk.id, "shape": shape, "rewards": "turn"}
    response = corpus.stand.http.get("/export", params={**asked, "format": format})
    [row] = read(format, response.content)
    [plain] = talk.rows(shape=shape)
    [whole] = talk.rows()
    ends = [span["end"] - whole["prompt_length"] for span in whole["turns"]]
    rewards = np.asarray(row[name]).tolist()
    assert {at + 1: reward for at, reward in enumerate(rewards) if reward} == dict(zip(ends, (0.25, 0.75), strict=True))
    if shape == "verl":
        assert plain["reward_score"] == 1.0
        extra = row["extra_fields"]
        assert (json.loads(extra) if isinstance(extra, str) else extra)["turn_scores"] == [0.25, 0.0]
        assert "turn_scores" not in plain["extra_fields"]
    else:
        assert plain["rewards"] == 1.0


def advantages(corpus: Corpus) -> dict[str, float]:
    """By numpy, from the log's own events."""
    rewards = {}
    for name, talk in corpus.talks.items():
        events = talk.events()
        if events[0].get("config", {}).get("group_id") == "7":
            given = [event["reward"] for event in events if event["type"] == "RewardAssigned"]
            if given:
                rewards[name] = given[-1]
    assert len(rewards) == 4
    values = np.array(list(rewards.values()))
    return dict(zip(rewards, (values - values.mean()) / (values.std(ddof=1) + 1e-6), strict=True))


def test_the_advantage_is_normalised_once_a_rollout_and_the_same_in_all_its_rows(corpus: Corpus) -> None:
    expected = advantages(corpus)
    rows = [row for row in corpus.rows if "excluded" not in row]
    for row in rows:
        name = corpus.name_of(row["session_id"])
        if name in expected:
            assert row["advantage"] == pytest.approx(expected[name], rel=1e-12, abs=1e-12)
        else:
            assert row.get("advantage") is None
    split = {row["advantage"] for row in rows if row["session_id"] == corpus.talks["split"].id}
    assert len(split) == 1
    assert [row["segment"] for row in rows if row["session_id"] == corpus.talks["split"].id] == [0, 1]


@pytest.mark.parametrize(("shape", "field"), [("tinker", "advantages"), ("prime-rl", "advantages")])
def test_the_advantage_of_each_token_is_its_rollouts_where_it_was_sampled(
    corpus: Corpus, shape: str, field: str
) -> None:
    for row in corpus.given(shape=shape):
        whole = corpus.turnlog(row["session_id"], row["segment"])
        advantage = whole.get("advantage")
        mask = whole["loss_mask"][1:] if shape == "tinker" else whole["loss_mask"]
        expected = None if advantage is None else [advantage if one else 0.0 for one in mask]
        assert row[field] == expected


@pytest.mark.parametrize(("shape", "field"), [("skyrl", "advantage"), ("trl", "advantage"), ("areal", "advantage")])
def test_other_shapes_have_one_advantage_a_row(corpus: Corpus, shape: str, field: str) -> None:
    for row in corpus.given(shape=shape):
        assert row[field] == corpus.turnlog(row["session_id"], row["segment"]).get("advantage")


def experts(row: Row) -> np.ndarray[Any, Any]:
    found = np.frombuffer(base64.b64decode(row["routed_experts"]), row["dtype"]).reshape(row["shape"])
    assert row["row_start"] == 0
    return found


@pytest.mark.parametrize("format", CONTAINERS)
@pytest.mark.parametrize(
    ("shape", "field", "dtype"),
    [
        ("miles", "rollout_routed_experts", "int32"),
        ("slime", "rollout_routed_experts", "int32"),
        ("verl", "routed_experts", "int16"),
        ("skyrl", "rollout_expert_indices", "uint8"),
    ],
)
def test_experts_have_a_row_for_every_token_but_the_last(
    corpus: Corpus, shape: str, field: str, dtype: str, format: str
) -> None:
    rows = corpus.given(shape=shape, format=format)
    assert len(rows) >= 6
    for row in rows:
        known = identity(shape, {name: loaded(value) for name, value in row.items()})
        whole = corpus.turnlog(known["session_id"], known["segment"])
        found = np.array([np.stack(list(one)) for one in row[field]])
        if format in ("safetensors", "msgpack"):
            assert found.dtype == dtype
        assert found.shape == (len(whole["tokens"]) - 1, 4, 2)
        assert np.array_equal(found, experts(whole))


def loaded(value: Any) -> Any:
    """Parquet has JSON as text."""
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def test_miles_has_the_positions_flat_where_their_dimensions_are_not_known(corpus: Corpus) -> None:
    dimensions = {}
    for row in corpus.given(shape="miles"):
        known = row["metadata"]["turnlog"]
        assert "indexer_topk_missing" not in known
        positions = np.array(row["rollout_indexer_topk"])
        dimensions[corpus.name_of(known["session_id"])] = positions.ndim
        whole = corpus.turnlog(known["session_id"], known["segment"])["indexer_topk"]
        raw = np.frombuffer(base64.b64decode(whole["data"]), whole["dtype"]).reshape(whole["shape"])
        assert np.array_equal(positions, raw)
        assert len(positions) == len(row["tokens"]) - 1
    assert dimensions["split"] == dimensions["cut"] == dimensions["tools"] == 3
    assert dimensions["last"] == 2


@pytest.mark.parametrize("shape", ["slime", "verl", "skyrl", "prime-rl"])
def test_without_asking_for_payloads_there_are_none(corpus: Corpus, shape: str) -> None:
    name = {"slime": "rollout_routed_experts", "skyrl": "rollout_expert_indices"}.get(shape, "routed_experts")
    rows = read("ndjson", corpus.get(shape=shape))
    assert rows
    assert {row[name] for row in rows} == {None}


@pytest.mark.parametrize("shape", SINGLE)
def test_max_seq_len_cuts_at_a_turn_in_every_shape(corpus: Corpus, shape: str) -> None:
    split = corpus.talks["split"].id
    first = corpus.turnlog(split, 0)
    limit = first["turns"][1]["end"] - 1
    rows = [one for one in corpus.given(shape=shape, max_seq_len=limit) if identity(shape, one)["session_id"] == split]
    cut = {identity(shape, row)["segment"]: row for row in rows}
    tokens, mask, _ = parts(shape, cut[0])
    end = first["turns"][0]["end"]
    assert (tokens, mask) == (first["tokens"][:end], first["loss_mask"][:end])
    assert identity(shape, cut[0])["status"] == "truncated"
    whole = corpus.turnlog(split, 0, max_seq_len=limit)
    assert np.array_equal(experts(whole), experts(first)[: end - 1])


@pytest.mark.parametrize("shape", SINGLE)
def test_a_cut_inside_a_turn_in_every_shape(corpus: Corpus, shape: str) -> None:
    split = corpus.talks["split"].id
    first = corpus.turnlog(split, 0)
    limit = first["turns"][1]["end"] - 1
    asked = {"max_seq_len": limit, "truncate": "token"}
    rows = [one for one in corpus.given(shape=shape, **asked) if identity(shape, one)["session_id"] == split]
    cut = {identity(shape, row)["segment"]: row for row in rows}[0]
    tokens, mask, logprobs = parts(shape, cut)
    assert (tokens, mask) == (first["tokens"][:limit], first["loss_mask"][:limit])
    assert np.allclose(logprobs, first["logprobs"][:limit])
    assert identity(shape, cut)["status"] == "truncated"
    assert np.array_equal(experts(corpus.turnlog(split, 0, **asked)), experts(first)[: limit - 1])
    assert corpus.turnlog(split, 0, **asked)["weight_versions"] == first["weight_versions"][:limit]
    assert corpus.get(shape=shape, truncate="token") == corpus.get(shape=shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_too_long_is_left_out_with_the_reason(corpus: Corpus, shape: str) -> None:
    rows = corpus.read(shape=shape, max_seq_len=1)
    assert {row.get("excluded") for row in rows} == {
        "no turn within max_seq_len",
        "no committed turn",
        "erased",
        "rolled back",
    }
    segments = {(row["session_id"], row["segment"]) for row in rows if row["excluded"] == "no turn within max_seq_len"}
    live = {(row["session_id"], row["segment"]) for row in corpus.rows if "excluded" not in row}
    assert segments == live


@pytest.mark.long
@pytest.mark.parametrize("status", ["completed", "truncated", "aborted"])
@pytest.mark.parametrize("shape", SINGLE)
def test_the_status_filter_is_the_rows(corpus: Corpus, shape: str, status: str) -> None:
    rows = corpus.given(shape=shape)
    known = [identity(shape, row) for row in rows]
    wanted = [(one["session_id"], one["segment"]) for one in known if one["status"] == status]
    chosen = [identity(shape, row) for row in corpus.given(shape=shape, status=status)]
    assert [(one["session_id"], one["segment"]) for one in chosen] == wanted
    assert wanted
    told = {row["excluded"] for row in corpus.left_out(shape=shape, status=status)}
    assert {f"status is {one['status']}" for one in known if one["status"] != status} <= told


def test_temperatures_are_those_of_the_turns(corpus: Corpus) -> None:
    tools = corpus.talks["tools"].id
    [row] = [row for row in corpus.given(shape="prime-rl") if row["session_id"] == tools]
    first = corpus.turnlog(tools, 0)["turns"][0]["end"]
    assert row["temperatures"] == [0.5] * first + [1.0] * (len(row["token_ids"]) - first)
    assert (row["env_name"], row["trace_id"], row["branch_index"]) == ("sums", tools, 0)


def test_names_that_trainers_have_of_their_own(corpus: Corpus) -> None:
    """Slime's group, verl's uid, SkyRL's trajectory, AReaL's versions."""
    split, named = corpus.talks["split"], corpus.talks["named"]
    for row in corpus.given(shape="slime"):
        known = row["metadata"]["turnlog"]
        assert row["group_index"] == (7 if known.get("group_id") == "7" else None)
        assert row["metadata"]["task"] == corpus.name_of(known["session_id"])
    numbers = {
        row["rollout_id"] for row in corpus.given(shape="slime") if row["metadata"]["turnlog"]["session_id"] == split.id
    }
    assert len(numbers) == 1
    uids = {row["extra_fields"]["session_id"]: row["uid"] for row in corpus.given(shape="verl")}
    assert (uids[split.id], uids[named.id]) == ("7", named.id)
    skyrl = [row for row in corpus.given(shape="skyrl") if row["session_id"] == split.id]
    assert [row["is_last_step"] for row in skyrl] == [False, True]
    assert [row["trajectory_ids"] for row in skyrl] == [{"instance_id": "7", "repetition_id": 1}] * 2
    areal = [row for row in corpus.given(shape="areal") if row["session_id"] == split.id]
    for row in areal:
        assert row["versions"] == [[3 if one else -1 for one in row["loss_mask"][0]]]
