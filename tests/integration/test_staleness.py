"""`max_staleness`, what a cursor says is current, and what a row says of weight versions and the fleet."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from helpers.answering import Answer, Answering, Asked

from integration.corpus import SINGLE, identity, parts
from integration.interrupting import interrupted
from integration.places import Places
from integration.reading import differences, read
from integration.stand import Stand, Talk, serving
from ops.simulator.process import SimulatorProcess


def without_versions(value: Any) -> Any:
    """The same JSON less all that says a weight version."""
    if isinstance(value, dict):
        return {name: without_versions(item) for name, item in value.items() if not name.startswith("weight_version")}
    return [without_versions(item) for item in value] if isinstance(value, list) else value


class Weights:
    """A store whose newest weight version only this module's tests raise: each begins where it was left."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.now = 0

    def talk(self, *versions: int | str, **body: Any) -> Talk:
        """A session with a turn under each version, where the newest one so far is 0."""
        talk = self.stand.talk(**body)
        for version in versions:
            self.say(talk, "Go on", version)
        return talk

    def say(self, talk: Talk, text: str, version: int | str) -> None:
        talk.say(text, sim={"weight_version": self.named(version)})

    def named(self, version: int | str) -> str:
        return version if isinstance(version, str) else str(self.now + version)


@pytest.fixture(scope="module")
def weights_of_all(sglang: SimulatorProcess, places: Places) -> Iterator[Weights]:
    with serving(places.new("staleness"), sglang.base_url) as made:
        yield Weights(made)


@pytest.fixture
def weights(weights_of_all: Weights) -> Weights:
    weights_of_all.now += 100
    return weights_of_all


def exported(stand: Stand, **query: Any) -> httpx.Response:
    response = stand.http.get("/export", params=query)
    assert response.status_code == 200, response.text
    return response


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.content.splitlines()]


def reasons(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["session_id"]: row["excluded"] for row in rows if "excluded" in row}


def test_a_session_whose_oldest_token_is_too_old_is_left_out(weights: Weights) -> None:
    group = uuid.uuid4().hex
    young = weights.talk(6, 7, group_id=group)
    old = weights.talk(4, 7, group_id=group)
    named = weights.talk("base", group_id=group)
    mixed = weights.talk(7, "base", group_id=group)

    def given(**query: Any) -> list[str]:
        return [row["session_id"] for row in weights.stand.rows(group_id=group, **query)]

    assert given() == [young.id, old.id, named.id, mixed.id]
    assert given(max_staleness=2) == [young.id]
    assert given(max_staleness=3) == [young.id, old.id]
    assert given(max_staleness=2, weight_version=weights.named(9)) == []
    assert given(max_staleness=0, weight_version=weights.named(4)) == [young.id, old.id], "newer than current"

    rows = weights.stand.rows(group_id=group, max_staleness=2, explain=True)
    assert reasons(rows) == {
        old.id: "stale: 3 weight versions behind, max_staleness is 2",
        named.id: "staleness unknown: no weight version is a number",
        mixed.id: "staleness unknown: a weight version is not a number",
    }
    # A row of a whole group is all or nothing.
    assert weights.stand.rows(group_id=group, shape="atropos", max_staleness=2) == []


def test_the_current_version_is_the_newest_of_the_run(weights: Weights) -> None:
    group, ours, theirs = (uuid.uuid4().hex for _ in range(3))
    talk = weights.talk(1, 3, run=ours, group_id=group)
    ahead = weights.talk(9000, run=theirs, group_id=group)
    rows = weights.stand.rows(group_id=group, max_staleness=1, explain=True)
    reason = {row["session_id"]: row.get("excluded") for row in rows}
    assert reason == {talk.id: "stale: 2 weight versions behind, max_staleness is 1", ahead.id: None}
    told = {row["session_id"]: row["staleness"] for row in weights.stand.rows(group_id=group, stale="keep")}
    assert told == {talk.id: 2, ahead.id: 0}


def test_a_cursor_says_what_was_current(weights: Weights) -> None:
    """The same cursor gives the same bytes, also after the weights have moved on."""
    stand, query = weights.stand, {"max_staleness": 1, "explain": True}
    begin = exported(stand).headers["x-turnlog-next-cursor"]
    first, second = weights.talk(4), weights.talk(5)
    before = exported(stand, cursor=begin, **query)
    assert [row["session_id"] for row in lines(before)] == [first.id, second.id]

    third = weights.talk(9)
    weights.say(second, "On", 9)
    again = exported(stand, cursor=before.headers["x-turnlog-cursor"], **query)
    assert again.content == before.content, "what is current is that of the window"
    assert again.headers["x-turnlog-cursor"] == before.headers["x-turnlog-cursor"]
    rest = exported(stand, cursor=lines(before)[0]["cursor"], **query)
    assert rest.content.splitlines() == before.content.splitlines()[1:], "a row's cursor knows it too"
    moved = exported(stand, cursor=before.headers["x-turnlog-cursor"], max_staleness=4, weight_version=weights.named(9))
    assert [row["session_id"] for row in lines(moved)] == [second.id], "the client's word stands above it"

    following = lines(exported(stand, cursor=before.headers["x-turnlog-next-cursor"], **query))
    assert [row["session_id"] for row in following] == [third.id, second.id]
    assert reasons(following) == {second.id: "stale: 4 weight versions behind, max_staleness is 1"}


def test_stale_tokens_leave_the_loss_or_are_told_in_every_format(weights: Weights) -> None:
    """The weights change in mid-generation: one turn has a stale and a fresh part."""
    group = uuid.uuid4().hex
    talk = weights.talk(4, group_id=group)
    talk.say("Go on", sim={"weight_versions": [weights.named(5), weights.named(7)], "completion_tokens": 6})
    old, named = weights.talk(3, group_id=group), weights.talk(7, "base", group_id=group)
    for one, reward in ((talk, 1.0), (old, 0.0), (named, 0.5)):
        assert weights.stand.http.put(f"{one.path}/reward", json={"reward": reward}).status_code == 200
    query = {"group_id": group, "max_staleness": 1, "advantage": "grpo"}

    def by_session(**asked: Any) -> dict[str, dict[str, Any]]:
        return {row["session_id"]: {**row, "cursor": ""} for row in weights.stand.rows(**asked)}

    plain = by_session(group_id=group, advantage="grpo")
    assert by_session(**query) == {}
    kept, masked = by_session(**query, stale="keep"), by_session(**query, stale="mask")
    whole_masks = {session_id: row["loss_mask"] for session_id, row in masked.items()}
    assert kept.keys() == plain.keys()
    for session_id, row in kept.items():
        told = {name: row.pop(name) for name in ("staleness", "stale_tokens")}
        assert row == plain[session_id]
        expected = {talk.id: 3, old.id: 4, named.id: None}[session_id]
        assert told["staleness"] == expected
    assert masked.keys() == {talk.id, old.id}
    reason = reasons(weights.stand.rows(**query, stale="mask", explain=True))
    assert reason.pop(named.id) == "staleness unknown: a weight version is not a number"
    assert {name: told.partition(":")[0] for name, told in reason.items()} == dict.fromkeys(masked, "stale")
    for session_id, row in masked.items():
        whole = plain[session_id]
        sampled = zip(whole["loss_mask"], whole["weight_versions"], strict=True)
        fresh = [int(mask and version >= weights.now + 6) for mask, version in sampled]
        assert row["stale_tokens"] == sum(whole["loss_mask"]) - sum(fresh)
        assert row["staleness"] == {talk.id: 3, old.id: 4}[session_id]
        told = {"stale_tokens": row["stale_tokens"], "staleness": row["staleness"], "loss_mask": fresh}
        assert row == {**whole, **told}, "the advantage is the same"
    assert [sum(masks) for masks in (whole_masks[talk.id], whole_masks[old.id])] == [3, 0]

    begin = exported(weights.stand, stale="mask", **query).headers["x-turnlog-cursor"]
    for shape in SINGLE:
        asked = {**query, "shape": shape, "stale": "mask", "cursor": begin}
        found = lines(exported(weights.stand, **asked))
        assert len(found) == 2, "a row of which every token is stale stays"
        for row in found:
            one = masked[identity(shape, row)["session_id"]]
            assert parts(shape, row)[1] == one["loss_mask"], shape
            assert (row["staleness"], row["stale_tokens"]) == (one["staleness"], one["stale_tokens"])
        for format in ("parquet", "safetensors", "msgpack"):
            held = read(format, exported(weights.stand, format=format, **asked).content)
            assert differences(found, held) == [], (shape, format)
    assert weights.stand.rows(shape="atropos", stale="mask", **query) == [], "a session of the group is of unknown age"
    [row] = weights.stand.rows(shape="atropos", stale="keep", **query)
    assert dict(zip(row["session_ids"], row["staleness"], strict=True)) == {talk.id: 3, old.id: 4, named.id: None}


def test_the_adapter_of_a_row_is_that_of_all_its_turns(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One", lora_path="math")
    [row] = talk.rows()
    assert row["adapter"] == "math"
    [shaped] = talk.rows(shape="miles")
    assert shaped["adapter"] == "math"
    talk.say("Two", lora_path="code")
    [row] = talk.rows()
    assert row["adapter"] is None
    assert [turn["adapter"] for turn in row["turns"]] == ["math", "code"]


class Unversioned(Answering):
    """An engine before which somebody cuts the weight versions out of the replies, and that has no route for them."""

    def __init__(self, target: str) -> None:
        super().__init__(self._passed)
        self.cuts = True
        self._target = target

    def _passed(self, asked: Asked) -> Answer:
        if asked.path == "/weight_info":
            return Answer(status=404)
        reply = httpx.request(asked.method, self._target + asked.path, content=asked.body, timeout=20)
        content = reply.content
        if self.cuts and "/completions" in asked.path:
            content = json.dumps(without_versions(reply.json())).encode()
        return Answer(content, [("Content-Type", reply.headers.get("content-type", "text/plain"))], reply.status_code)


def test_a_joined_turn_guesses_no_version(vllm: SimulatorProcess, places: Places) -> None:
    """The adapter's weights were known before the pause, and are not any more behind it."""
    with (
        Unversioned(vllm.base_url) as between,
        serving(places.new("guessed"), between.base_url, engine_url=vllm.base_url) as stand,
    ):
        assert stand.http.post("/adapters/math/resume", json={"version": "9"}).status_code == 200
        talk = stand.talk(adapter="math", on_abort="continue")

        def swap(number: int) -> None:
            stand.http.post("/adapters/math/pause")
            assert stand.http.post("/adapters/math/resume").status_code == 200

        sim = {"completion_tokens": 9}
        response = interrupted(
            stand, talk, [5], meanwhile=swap, path=talk.path + "/v1/completions", prompt="Go on", sim=sim
        )
        assert response.status_code == 200, response.text
        [event] = talk.committed()
        assert event["dispatched"] == "9"
        assert [tuple(span.values()) for span in event["weight_versions"]] == [("9", 0, 5), ("unknown", 5, 9)]


def test_where_nobody_knows_the_version_it_is_unknown(vllm: SimulatorProcess, places: Places) -> None:
    """A vLLM outside its development mode has no route that says its version."""
    with Unversioned(vllm.base_url) as between, serving(places.new("unknown"), between.base_url) as stand:
        talk = stand.talk()
        for text in ("Hello", "And then?"):
            talk.say(text)
        assert [event.get("dispatched") for event in talk.committed()] == [None, None]
        [row] = talk.rows()
        assert row["weight_version_names"] == ["unknown"]
        assert stand.http.get("/engines").json()["engines"][0]["weight_version"] is None

        first = exported(stand, max_staleness=9, explain=True)
        assert reasons(lines(first)) == {talk.id: "staleness unknown: no weight version is a number"}
        told = stand.http.post("/adapters/math/resume", json={"version": "9"})
        assert told.status_code == 200, told.text
        adapted = stand.talk(adapter="math")
        adapted.say("Hello")
        [event] = adapted.committed()
        assert (event["dispatched"], event["weight_versions"][0]["version"]) == ("9", "9"), "that of its adapter"

        between.cuts = False
        Weights(stand).talk("1")
        again = exported(stand, max_staleness=9, explain=True, cursor=first.headers["x-turnlog-cursor"])
        assert again.content == first.content, "the cursor knows that there was no number"
        assert [row["session_id"] for row in stand.rows(max_staleness=0)] == [adapted.id]
