"""Forks: sessions that begin after a turn of another one, and go on like any other."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.routing import BOTH, problems
from integration.stand import WEATHER, Stand, Talk, error_of, serving
from integration.tito import sent_ids
from ops.simulator.process import SimulatorProcess
from turnlog.client.samples import parse


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with serving(places.new("fork"), sglang.base_url, environment=environment) as made:
        yield made
        assert problems(made) == []


def ask(stand: Stand, source: Talk, *, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return stand.http.post(f"{source.path}/fork", json=body, headers=headers)


def forks(stand: Stand, source: Talk, **body: Any) -> list[Talk]:
    """The new sessions, each with the history that its client knows."""
    response = ask(stand, source, **body)
    assert response.status_code == 200, response.text
    made = response.json()["sessions"]
    assert [one["base_url"] for one in made] == [f"/sessions/{one['session_id']}/v1" for one in made]
    return [stand.known(one["session_id"]) for one in made]


def said(stand: Stand, *texts: str, **body: Any) -> Talk:
    """A session with a turn for each text, with tools."""
    talk = stand.talk(**body)
    for text in texts:
        say(talk, text)
    return talk


def say(talk: Talk, text: str) -> None:
    talk.say(text, tools=[WEATHER], sim={"tool_calls": False})


def go_on(fork: Talk, source: Talk, turn: int, text: str) -> None:
    """The fork's next turn, by a client that knows the source's first `turn` turns."""
    fork.messages = source.messages[: 2 * turn]
    say(fork, text)


FOUR = ("One", "Two", "Three", "Four")


def test_forks_begin_with_their_parents_tokens_and_train_only_their_own(used: Stand) -> None:
    source = said(used, *FOUR, group_id=(group := uuid.uuid4().hex), attempt=3, metadata={"task": 1})
    [before] = source.rows(replay="true")
    made = forks(used, source, turn=2, count=2)
    for nth, fork in enumerate(made):
        go_on(fork, source, 2, f"Another way {nth}")
    [row] = source.rows(replay="true")
    assert row == {**before, "cursor": row["cursor"], "as_of_seq": row["as_of_seq"]}
    start = row["turns"][1]["end"]
    assert row["loss_mask"] == row["sampled_mask"]
    for fork in made:
        [own] = fork.rows(replay="true")
        for name in ("tokens", "logprobs", "sampled_mask", "weight_versions"):
            assert own[name][:start] == row[name][:start], name
        assert not any(own["loss_mask"][:start])
        assert own["loss_mask"][start:] == own["sampled_mask"][start:]
        assert sum(own["loss_mask"]) == fork.committed()[2]["output_tokens"] > 0
        assert own["turns"][:2] == row["turns"][:2]
        assert (own["prompt_length"], own["segment"]) == (row["prompt_length"], 0)
        assert fork.committed()[2]["base_tokens"] == start
        names = ("group_id", "attempt", "metadata", "rollout_id", "parent_session_id")
        assert [own[name] for name in names] == [group, None, {"task": 1}, fork.id, None]
        [trained] = fork.rows(shape="slime")
        assert trained["loss_mask"] == own["loss_mask"][own["prompt_length"] :]
        for mine, theirs in zip(fork.state()["records"], source.state()["records"][:2], strict=False):
            assert (mine["request"], mine["turn"]) == (theirs["request"], theirs["turn"])
        assert fork.state()["session"]["forked_from"] == {
            "session_id": source.id,
            "turn": 2,
            "parent_loss": False,
        }
    assert "forked_from" not in source.state()["session"]


def test_a_row_that_only_repeats_is_in_no_trainers_file(used: Stand) -> None:
    source = said(used, "One")
    [fork] = forks(used, source, turn=1)
    assert fork.rows(shape="slime") == []
    [told] = fork.rows(shape="slime", explain="true")
    assert told["excluded"] == "every sampled token is in another session's loss"
    assert not any(fork.rows()[0]["loss_mask"])


def test_the_same_key_makes_the_same_sessions_once(used: Stand) -> None:
    source = said(used, "One", "Two")
    key = uuid.uuid4().hex
    first = ask(used, source, key=key, turn=1, count=2, metadata={"n": 1})
    assert first.status_code == 200
    assert ask(used, source, key=key, turn=1, count=2, metadata={"n": 1}).json() == first.json()
    assert (
        ask(used, source, key=key, turn=1, count=1, metadata={"n": 1}).json()["sessions"]
        == first.json()["sessions"][:1]
    )
    assert error_of(ask(used, source, key=key, turn=2, count=2)) == (422, "idempotency_mismatch")
    other = said(used, "One")
    assert ask(used, other, key=key, turn=1).json()["sessions"][0] not in first.json()["sessions"]
    assert ask(used, source, turn=1).json() != ask(used, source, turn=1).json()
    ended = first.json()["sessions"][0]["session_id"]
    assert used.http.delete(f"/sessions/{ended}").status_code == 204
    assert error_of(ask(used, source, key=key, turn=1, metadata={"n": 1})) == (409, "session_closed")


MASKS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    **dict.fromkeys(("slime", "miles"), lambda row: row["loss_mask"]),
    "verl": lambda row: row["response_mask"],
    "skyrl": lambda row: row["loss_masks"],
    "trl": lambda row: row["env_mask"],
    "tinker": lambda row: row["mask"],
    "areal": lambda row: row["loss_mask"][0],
    "prime-rl": lambda row: row["mask"],
    "trl-async": lambda row: row["completion_mask"],
    "openenv": lambda row: [mask for turn in row["turns"] for mask in turn["loss_mask"]],
    "xtuner": lambda row: [label != -100 for label in row["labels"]],
    "rllm": lambda row: [True for trace in row["traces"] for _ in trace["completion_token_ids"]],
    "atropos": lambda row: [mask != -100 for mask in row["masks"][0]],
}


@pytest.mark.parametrize("parent_loss", [False, True])
def test_every_shape_has_the_same_tokens_in_the_loss(used: Stand, parent_loss: bool) -> None:
    source = said(used, "One", "Two")
    [fork] = forks(used, source, turn=2, group_id=(group := uuid.uuid4().hex), parent_loss=parent_loss)
    go_on(fork, source, 2, "Three")
    assert used.http.put(f"{fork.path}/reward", json={"reward": 1.0}).status_code == 200
    outputs = [event["output_tokens"] for event in fork.committed()]
    expected = sum(outputs) if parent_loss else outputs[-1]
    for shape, mask in MASKS.items():
        [row] = used.rows(group_id=group, shape=shape, advantage="grpo")
        assert sum(map(bool, mask(row))) == expected, shape
    [sample] = parse(used.http.post(f"{fork.path}/samples").content).samples
    assert sample.arrays["loss_mask"].sum() == expected
    [document] = used.rows(group_id=group, format="atif")
    copied = [step for step in document["steps"] if step.get("is_copied_context")]
    assert len(copied) == (0 if parent_loss else 4)
    assert len(used.rows(group_id=group, format="messages")[0]["messages"]) == 6


def test_what_cannot_be_forked_is_refused_and_nothing_is_made(used: Stand) -> None:
    source = said(used, "One", group_id=(group := uuid.uuid4().hex))
    for more in ({"count": 0}, {"count": 65}, {"session_id": "mine"}, {"metadata": {"n": "x" * 70_000}}, {"turn": 0}):
        assert ask(used, source, **{"turn": 1, **more}).status_code == 400
    assert [ask(used, source, **body).status_code for body in ({}, {"turn": 2})] == [400, 404]
    assert error_of(ask(used, used.known("nobody"), turn=1)) == (404, "session_not_found")
    assert len(used.get("/sessions", group_id=group)["sessions"]) == 1


def test_a_marked_retry_is_of_the_forks_own_turns(used: Stand) -> None:
    source = said(used, "One", "Two")
    [fork] = forks(used, source, turn=2)
    sent = {"tools": [WEATHER], "sim": {"tool_calls": False}, "headers": {"x-stainless-retry-count": "1"}}
    assert "x-turnlog-replayed" in source.chat(source.messages[:-1], **sent).headers
    again = fork.chat(source.messages[:-1], **sent)
    assert "x-turnlog-replayed" not in again.headers
    assert again.headers["x-turnlog-rolled-back"] == "1"
    assert fork.chat(source.messages[:-1], **sent).content == again.content


def test_with_ids_a_fork_continues_its_parents(tito: Stand) -> None:
    source = said(tito, *FOUR)
    whole = source.state()["metadata"]["accumulated_token_ids"]
    [fork] = forks(tito, source, turn=2)
    start = source.rows()[0]["turns"][1]["end"]
    go_on(fork, source, 2, "Else")
    [prompt] = sent_ids(tito, fork)
    assert prompt[:start] == whole[:start]
    assert fork.state()["metadata"]["tito_session_mismatch"] == []
    [record] = fork.state()["records"][2:]
    assert record["request"]["input_ids"] == prompt
