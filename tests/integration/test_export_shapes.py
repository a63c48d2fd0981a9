"""Every shape in every format, made by a real server of real turns: read back, compared, cut, explained and paged."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from integration.corpus import GENERATIONS, SHAPES, SINGLE, Corpus, filled, generations, identity, parts, sampled
from integration.places import Places
from integration.reading import CONTAINERS, DOCUMENTS, Row, differences, read
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


@pytest.mark.parametrize("query", [{}, {"max_seq_len": 120, "truncate": "token"}])
@pytest.mark.parametrize("shape", GENERATIONS)
def test_every_generation_stands_in_one_row_with_its_prompt(corpus: Corpus, shape: str, query: dict[str, Any]) -> None:
    rows = corpus.given(shape=shape, **query)
    told = [one for row in rows for one in row[GENERATIONS[shape]]]
    assert len({one["trace_id" if shape == "rllm" else "node_id"] for one in told}) == len(told) > 5
    for row in rows:
        whole = corpus.turnlog(row["session_id"], row["segment"], **query)
        assert generations(shape, row) == sampled(whole)
        for one in row[GENERATIONS[shape]]:
            said = one["messages"] if shape == "rllm" else one["request"]["messages"]
            [choice] = [one["response_message"]] if shape == "rllm" else one["response"]["choices"]
            reply = choice if shape == "rllm" else choice["message"]
            assert [*said, reply] == whole["messages"][: len(said) + 1]
            assert reply["role"] == "assistant"
            if shape == "rllm":
                header, data = one["routing_matrices"]
                made = np.frombuffer(base64.b64decode(data), json.loads(header)["dtype"])
                ids = len(one["prompt_token_ids"]) + len(one["completion_token_ids"]) - 1
                assert np.array_equal(made.reshape(-1, *json.loads(header)["shape"]), experts(whole)[:ids])


@pytest.mark.parametrize("shape", [*SINGLE, *GENERATIONS])
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


def experts(row: Row) -> np.ndarray[Any, Any]:
    found = np.frombuffer(base64.b64decode(row["routed_experts"]), row["dtype"]).reshape(row["shape"])
    assert row["row_start"] == 0
    return found


@pytest.mark.parametrize("truncate", ["turn", "token"])
@pytest.mark.parametrize("shape", SINGLE)
def test_max_seq_len_cuts_behind_a_turn_or_inside_one_in_every_shape(corpus: Corpus, shape: str, truncate: str) -> None:
    split = corpus.talks["split"].id
    first = corpus.turnlog(split, 0)
    limit = first["turns"][1]["end"] - 1
    end = first["turns"][0]["end"] if truncate == "turn" else limit
    asked = {"max_seq_len": limit, "truncate": truncate}
    rows = [one for one in corpus.given(shape=shape, **asked) if identity(shape, one)["session_id"] == split]
    cut = {identity(shape, row)["segment"]: row for row in rows}[0]
    tokens, mask, logprobs = parts(shape, cut)
    assert (tokens, mask) == (first["tokens"][:end], first["loss_mask"][:end])
    assert np.allclose(logprobs, first["logprobs"][:end])
    assert identity(shape, cut)["status"] == "truncated"
    whole = corpus.turnlog(split, 0, **asked)
    assert np.array_equal(experts(whole), experts(first)[: end - 1])
    assert whole["weight_versions"] == first["weight_versions"][:end]
    assert corpus.get(shape=shape, truncate=truncate) == corpus.get(shape=shape)


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "explain"), [({}, "true"), ({"status": "completed"}, "false"), ({"max_seq_len": 120}, "true")]
)
@pytest.mark.parametrize("shape", [*SHAPES, *DOCUMENTS])
def test_every_rows_cursor_gives_what_is_behind_it(
    corpus: Corpus, shape: str, query: dict[str, Any], explain: str
) -> None:
    chosen = {"format": shape} if shape in DOCUMENTS else {"shape": shape}
    first = corpus.stand.http.get("/export", params=query)  # a cursor belongs to the filters
    cursor = first.headers["x-turnlog-cursor"]
    asked = {**chosen, **query, "explain": explain, "advantage": "grpo", "cursor": cursor}
    whole = corpus.get(**asked).splitlines()
    assert len(whole) > (shape != "atropos")
    page, seen = {**asked, "limit": 1}, []
    while lines := corpus.get(**page).splitlines():
        seen += lines
        assert len(lines) == 1
        [row] = read("ndjson", lines[0])
        page["cursor"] = cursor_of(shape, row)
    assert seen == whole
    for place in range(0, len(whole), 3):
        [row] = read("ndjson", whole[place])
        assert corpus.get(**{**asked, "cursor": cursor_of(shape, row)}).splitlines() == whole[place + 1 :]


def cursor_of(shape: str, row: Row) -> str:
    if "excluded" in row:
        found: str = row["cursor"]
    else:
        found = row["extra"]["cursor"] if shape == "atif" else identity(shape, row)["cursor"]
    return found


def test_atropos_has_a_whole_group_at_the_place_of_its_last_session(corpus: Corpus) -> None:
    rows = corpus.given(shape="atropos", replay="false")
    assert [row["group_id"] for row in rows] == [None, None, "7"]
    members = ("tools", "split", "split", "cut", "last")
    by_session = {corpus.talks[name].id: name for name in members}
    whole = rows[-1]
    assert [by_session[one] for one in whole["session_ids"]] == sorted(members, key=lambda n: corpus.talks[n].id)
    for place, (session_id, segment) in enumerate(zip(whole["session_ids"], whole["segments"], strict=True)):
        row = corpus.turnlog(session_id, segment)
        mask = row["loss_mask"]
        assert whole["tokens"][place] == row["tokens"]
        assert whole["masks"][place] == [t if m else -100 for t, m in zip(row["tokens"], mask, strict=True)]
        assert whole["inference_logprobs"][place] == [
            one if m else 1.0 for one, m in zip(row["logprobs"], mask, strict=True)
        ]
        assert whole["advantages"][place] == [row["advantage"] if m else 0.0 for m in mask]
        assert (whole["scores"][place], whole["statuses"][place]) == (row["reward"], row["status"])
    assert corpus.left_out(shape="atropos") != []


@pytest.mark.long
@pytest.mark.parametrize("format", CONTAINERS)
def test_an_empty_export_is_a_readable_file(corpus: Corpus, format: str) -> None:
    for shape in SHAPES:
        for explain in ("true", "false"):
            query = {"format": format, "shape": shape, "session_id": "nobody", "explain": explain}
            response = corpus.stand.http.get("/export", params=query)
            assert response.status_code == 200
            assert read(format, response.content) == []
            assert "x-turnlog-next-cursor" in response.headers
