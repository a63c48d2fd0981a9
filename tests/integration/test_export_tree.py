"""The shape `tree`: what it is unpacked into is what `/export` gives, of random trees and of every kind of session."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from integration.reading import CONTAINERS, differences, read
from integration.routing import BOTH
from integration.stand import WEATHER, Stand, Talk, error_of, serving, user
from integration.test_images import PNG, asks, image
from ops.simulator.process import SimulatorProcess
from tests.tools.digest.requests import Player, play
from turnlog import attention_mask, attention_slices, pack_trees, unpack_tree

TREES = 24
PLAIN = {"tool_calls": False, "reasoning": False}
Row = dict[str, Any]


def grow(stand: Stand, seed: int) -> None:
    """A session of random turns: it goes on, forks, repeats, rolls back, drifts, diverges, is compacted and forked."""
    chance = random.Random(seed)
    kind: Row = chance.choice(({"history": "tree"}, {"history": "tree"}, {"on_divergence": "segment"}))
    talk = stand.talk(group_id=f"g{seed % 7}", rollback_window=chance.randrange(4), metadata={"seed": seed}, **kind)
    histories: list[list[Row]] = [[]]
    for step in range(chance.randrange(2, 12)):
        if "history" not in kind:
            talk.messages = list(histories[-1][: len(histories[-1]) - chance.choice((0, 0, 0, 2))])
        else:
            talk.messages = list(chance.choice(histories[-3:]) if chance.random() < 0.8 else chance.choice(histories))
        if chance.random() < 0.1:
            talk.messages = [user("In short: things"), *talk.messages[-1:]]
        picture = [image("chat", PNG + bytes([seed]))] if chance.random() < 0.1 else []
        sim = {
            **PLAIN,
            "weight_version": chance.choice(("1", "1", "2", "a")),
            "completion_tokens": chance.randrange(1, 9),
            "finish_reason": chance.choice(("stop", "stop", "stop", "length", "abort")),
        }
        tools = {"tools": [WEATHER]} if chance.random() < 0.15 else {}
        agent = {"x-turnlog-agent-id": chance.choice("ab")} if chance.random() < 0.3 else None
        said = [*talk.messages, asks("chat", chance.choice(("So?", f"{step}")), *picture)]
        reply = talk.chat(said, headers=agent, sim=sim, temperature=chance.choice((0.5, 1.0)), **tools)
        if reply.status_code == 200:
            histories.append([*said, *talk.spoken.added(reply.json())])
    if chance.random() < 0.2:
        order = {"turn": 1, "parent_loss": chance.random() < 0.5}
        fork = stand.http.post(f"{talk.path}/fork", json=order).json()["sessions"][0]["session_id"]
        Talk(stand, fork).chat([*histories[1], user("Another way")], sim=PLAIN)
    if chance.random() < 0.8:
        stand.http.put(f"{talk.path}/reward", json={"reward": chance.random()})
        stand.http.delete(talk.path)


@pytest.fixture(scope="module")
def trees(sglang: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with serving(tmp_path_factory.mktemp("trees"), sglang.base_url, environment=environment) as stand:
        for seed in range(TREES):
            grow(stand, seed)
        play(Player(stand.http), large=False)
        yield stand


@pytest.fixture(scope="module")
def sampled(trees: Stand) -> Counter[str]:
    """The sampled tokens of each log, without those that a fork copied as context; of erased sessions nobody knows."""
    counts, context = Counter[str](), Counter[str]()
    events = trees.http.get("/events", params={"type": "SessionCreated,TurnCommitted,SessionErased"})
    for event in map(json.loads, events.iter_lines()):
        name = event["session_id"]
        if (fork := event.get("fork")) is not None:
            context[name] = 0 if fork.get("loss") else fork["turns"]
        elif event["type"] == "TurnCommitted" and event["turn"] > context[name]:
            counts[name] += event["output_tokens"]
        elif event["type"] == "SessionErased":
            del counts[name]
    return +counts


def exported(stand: Stand, **query: Any) -> list[Row]:
    response = stand.http.get("/export", params=query)
    assert response.status_code == 200, response.text
    return read("ndjson", response.content)


def without_cursor(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "cursor"} for row in rows]


@pytest.mark.parametrize(
    "query",
    [
        {"replay": "true", "advantage": "grpo"},
        {"branches": "all", "loss": "every", "images": "inline"},
        {"branches": "main", "replay": "true"},
        {"branches": "longest", "images": "none"},
        {"max_seq_len": "45", "truncate": "token", "replay": "true"},
        {"max_seq_len": "120", "status": "truncated"},
    ],
    ids=lambda query: "-".join(query),
)
def test_unpacked_rows_are_those_of_the_export(trees: Stand, query: dict[str, str]) -> None:
    asked = {**query, "explain": "true"}
    expected, packed = exported(trees, **asked), exported(trees, shape="tree", **asked)
    sessions = [row for row in packed if "excluded" not in row]
    rows = [row for tree in sessions for row in unpack_tree(tree)]
    assert without_cursor([row for row in expected if "excluded" not in row]) == without_cursor(rows)  # type: ignore[arg-type]
    left_out = [row for row in packed if "excluded" in row]
    assert without_cursor([row for row in expected if "excluded" in row]) == without_cursor(left_out)
    assert len(sessions) > TREES / 4
    assert len({tree["session_id"] for tree in sessions}) == len(sessions)
    for tree in sessions:
        told_once(tree)


def told_once(tree: Row) -> None:
    """Each token that some row has is there once, and each is in some row."""
    [*rows] = unpack_tree(tree)
    places = pack_trees([tree]).rows
    assert {place for row in places for place in row} == set(range(len(tree["tokens"])))
    assert [[tree["tokens"][place] for place in row] for row in places] == [row["tokens"] for row in rows]
    known: dict[tuple[int, int], int] = {}
    for row, at in zip(rows, places, strict=True):
        for span in row["turns"]:
            for position in range(span["start"], span["end"]):
                assert known.setdefault((span["turn"], position), at[position]) == at[position]


@pytest.mark.parametrize("format", [format for format in CONTAINERS if format != "ndjson"])
def test_every_format_holds_it(trees: Stand, format: str) -> None:
    query = {"shape": "tree", "replay": "true", "advantage": "grpo", "images": "inline"}
    lines = exported(trees, **query)
    found = read(format, trees.http.get("/export", params={**query, "format": format}).content)
    assert differences(lines, found) == []
    parsed = [
        {name: json.loads(value) if is_json(name, value) else value for name, value in row.items()} for row in found
    ]
    for line, row in zip(lines, parsed, strict=True):
        for one, other in zip(unpack_tree(line), unpack_tree(row), strict=True):
            assert differences([dict(one)], [dict(other)]) == []


QUERIES: tuple[Row, ...] = (
    *({}, {"branches": "main"}, {"branches": "longest"}, {"branches": "all"}),
    {"branches": "all", "max_seq_len": "60", "truncate": "token", "status": "truncated"},
    *({"max_seq_len": "45", "truncate": "token"}, {"max_seq_len": "60"}, {"max_seq_len": "12"}),
    *({"status": "completed"}, {"session_status": "closed"}, {"min_reward": "0.5"}, {"evaluation": "true"}),
    {"max_staleness": "0", "weight_version": "2"},
    {"max_staleness": "0", "weight_version": "2", "stale": "mask", "max_seq_len": "60"},
    *({"shape": shape} for shape in ("tree", "skyrl", "slime", "openenv")),
    {"shape": "slime", "max_seq_len": "45", "truncate": "token"},
    *({"shape": shape, "advantage": "grpo"} for shape in ("prime-rl", "atropos")),
    {"shape": "atropos", "status": "completed"},
    {"replay": "true", "routing": "sampled"},
)


REASONS = {
    *("rolled back", "superseded", "max_seq_len", "stale", "staleness unknown", "tombstoned"),
    *("no reward", "reward below min_reward", "session_status is open", "status is truncated", "status is aborted"),
    *("not in branches=main", "not in branches=longest", "a session of the group is left out"),
}


def test_every_reason_is_met(trees: Stand) -> None:
    lost = Counter[str]()
    for query in QUERIES:
        for row in exported(trees, **query, explain="only"):
            lost[row["excluded"].partition(": ")[0]] += row["lost_tokens"] or 0
    assert {reason for reason, tokens in lost.items() if tokens} >= REASONS


@pytest.mark.parametrize("loss", ["once", "every"])
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: "-".join(query.values()))
def test_what_was_sampled_is_trained_or_lost(trees: Stand, sampled: Counter[str], query: Row, loss: str) -> None:
    rows = exported(trees, **query, loss=loss, explain="true")
    left_out = [row for row in rows if "excluded" in row]
    given = [row for row in rows if "excluded" not in row]
    if query.get("shape") == "tree":
        given = [row for tree in given for row in unpack_tree(tree)]
    lost, trained = Counter[str](), Counter[str]()
    for row in left_out:
        assert (row["lost_tokens"] is None) == (row["excluded"] == "erased")
        lost[row["session_id"]] += row["lost_tokens"] or 0
    if "turn_rewards" in (given or [{"turn_rewards": {}}])[0]:
        trained.update(name for name, *_ in {place for row in given for place in in_loss(row)})
        assert trained + lost == sampled
    elif loss == "once":
        assert sum(map(trained_tokens, given)) + lost.total() == sampled.total()
    only = exported(trees, **query, loss=loss, explain="only")
    assert without_cursor(only) == without_cursor(left_out)


def in_loss(row: Row) -> Iterator[tuple[str, int, int]]:
    """The session, the turn and the place in its output of each token in the loss."""
    for span in row["turns"]:
        for at in range(span["output_start"], span["end"]):
            if row["loss_mask"][at]:
                yield row["session_id"], span["turn"], at - span["output_start"]


def trained_tokens(row: Row) -> int:
    match row:
        case {"turns": turns}:
            return sum(sum(turn["loss_mask"]) for turn in turns)
        case {"masks": masks}:
            return sum(token != -100 for mask in masks for token in mask)
        case {"loss_mask": mask} | {"loss_masks": mask} | {"mask": mask}:
            return sum(mask)
    raise AssertionError(row.keys())


def is_json(name: str, value: object) -> bool:
    return isinstance(value, str) and name in ("leaves", "turns", "metadata", "reward_components", "pinned")


def test_a_page_of_a_limit_goes_on_behind_its_last_session(trees: Stand) -> None:
    whole = exported(trees, shape="tree", explain="true")
    begun = trees.http.get("/export", params={"shape": "tree", "explain": "true"}).headers["x-turnlog-cursor"]
    found: list[Row] = []
    cursor = begun
    while page := exported(trees, shape="tree", explain="true", cursor=cursor, limit=9):
        found += page
        cursor = page[-1]["cursor"]
    assert without_cursor(found) == without_cursor(whole)


def test_packed_trees_see_what_rows_see(trees: Stand) -> None:
    """Of two trees in one sequence: each token sees the tokens of its rows before it, and no others."""
    for pair in (
        exported(trees, shape="tree", advantage="grpo", loss=loss)[at : at + 2]
        for at in (0, TREES)
        for loss in ("once", "every")
    ):
        packed = pack_trees(pair)
        mask = np.array(attention_mask(packed))
        expected = np.zeros_like(mask)
        for row in packed.rows:
            for place, token in enumerate(row):
                expected[token, row[: place + 1]] = True
                assert packed.position_ids[token] == place
                assert packed.parents[token] == (row[place - 1] if place else -1)
        assert np.array_equal(mask, expected)
        covered = np.zeros_like(mask)
        for (first, end), (low, high), kind in zip(*attention_slices(packed), strict=True):
            block = np.ones((end - first, high - low), bool)
            covered[first:end, low:high] |= np.tril(block) if kind == "causal" else block
        assert np.array_equal(mask, covered)
        weights = [0] * len(mask)
        masks = (row["loss_mask"] for tree in pair for row in unpack_tree(tree))
        for mask_of_row, at in zip(masks, packed.rows, strict=True):
            for place, masked in zip(at, mask_of_row, strict=True):
                weights[place] += masked
        assert packed.loss_weights == weights
        for begin, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
            assert not mask[begin:end, :begin].any()
            assert packed.parents[begin] == -1


@pytest.mark.parametrize(
    "query",
    [
        *({"format": "atif"}, {"format": "messages"}, {"replay": "urls"}, {"columns": "values"}, {"top_k": "1"}),
        *({"stale": "keep"}, {"stale": "mask", "max_staleness": "1"}, {"rewards": "turn"}),
    ],
    ids=lambda query: "-".join(query.values()),
)
def test_what_makes_no_sense_with_it_is_refused(trees: Stand, query: dict[str, str]) -> None:
    response = trees.http.get("/export", params={"shape": "tree", **query})
    assert error_of(response)[0] == 400
